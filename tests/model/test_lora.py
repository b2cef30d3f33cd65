"""Adapters: what they compute and train, whose they are, PEFT's files in and out, and merged weights."""

import json
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from experience_samples import CPU, load, make_rollouts, rollouts_of
from ullage.base.errors import ConfigError, ModelError
from ullage.batch.pack import Limits
from ullage.engine.recompute import recompute_layers
from ullage.model.adapter_files import read_adapter
from ullage.model.attention import PackedLayout, Span
from ullage.model.load import load_model
from ullage.model.lora import AdaptedLinear, Adapter, Adapters, Pair, Settings, _WideLinear, new_adapter
from ullage.model.value_model import add_value_head
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.workers.passes import micro_batches, stage_logprobs

IDS = [1, *range(5, 30), 7, 7, 2]
NEAR = 1e-5


def numbers_in(adapter, seed=3):
    """The adapter with an `up` that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    return Adapter(
        adapter.settings,
        {n: Pair(p.down, torch.randn(p.up.shape, generator=generator) * 0.3) for n, p in adapter.layers.items()},
    )


def adapted(folder, dtype="float32", *, rank=4, alpha=8.0, targets=("all-linear",), name="actor", seed=3):
    model = load(folder, dtype)
    made = new_adapter(model.module, Settings(rank=rank, alpha=alpha), targets, seed)
    return model.adapted(name, numbers_in(made, seed))


@torch.no_grad()
def logits(model, ids=IDS):
    layout = PackedLayout([Span(0, len(ids), ())], CPU, model.dtype)
    hidden = model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None], layout)
    return model.head.logits(hidden, 1.0)


@torch.no_grad()
def their_logits(module, ids=IDS):
    return module.eval()(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def plain(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def test_a_layer_adds_the_scaled_product():
    linear = torch.nn.Linear(2, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        linear.bias.copy_(torch.tensor([0.5, -0.5]))

    class Holder(torch.nn.Module):
        base_model_prefix = "trunk"

        def __init__(self):
            super().__init__()
            self.trunk = torch.nn.ModuleDict({"layer": linear})

        @property
        def base_model(self):
            return self.trunk

    holder = Holder()
    adapters = Adapters(holder, wide=True)
    pair = Pair(torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0], [10.0]]))
    adapters.attach("one", Adapter(Settings(rank=1, alpha=3.0), {"trunk.layer": pair}), torch.float32)
    x = torch.tensor([[4.0, 1.0]])
    # base: (4 + 2 + .5, 12 + 4 - .5); down: 4 - 1 = 3; up: (6, 30); scale 3
    assert holder.trunk["layer"](x).tolist() == [[6.5 + 18, 15.5 + 90]]
    adapters.select(None)
    assert holder.trunk["layer"](x).tolist() == [[6.5, 15.5]]
    adapters.select("another")
    assert holder.trunk["layer"](x).tolist() == [[6.5, 15.5]]
    # [[1, 2], [3, 4]] + 3 * [[2, -2], [10, -10]]
    assert adapters.merged_state("one")["trunk.layer.weight"].tolist() == [[7.0, -4.0], [33.0, -26.0]]
    assert set(adapters.merged_state("one")) == {"trunk.layer.weight", "trunk.layer.bias"}


def test_gradients_of_the_wide_product():
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((1, 5, 4), (2, 4))
    )
    assert torch.autograd.gradcheck(_WideLinear.apply, (x, weight))


@pytest.mark.parametrize(
    ("settings", "layer", "rank", "scale"),
    [
        (Settings(rank=4, alpha=8.0), "model.layers.0.q_proj", 4, 2.0),
        (Settings(rank=4, alpha=8.0, rank_stabilised=True), "model.layers.0.q_proj", 4, 4.0),
        (Settings(rank=4, alpha=8.0, rank_pattern={"q_proj": 2}), "model.layers.0.q_proj", 2, 4.0),
        (Settings(rank=4, alpha=8.0, rank_pattern={"q_proj": 2}), "model.layers.0.eq_proj", 4, 2.0),
        (Settings(rank=4, alpha=8.0, alpha_pattern={r"layers.\d+.q_proj": 2.0}), "model.layers.11.q_proj", 4, 0.5),
    ],
)
def test_ranks_and_scales(settings, layer, rank, scale):
    assert (settings.rank_of(layer), settings.scale_of(layer)) == (rank, scale)


def test_a_new_adapter_changes_nothing_and_no_weight_moves(tiny_model):
    model = load(tiny_model, "float32")
    before, weights = logits(model), {name: p.data_ptr() for name, p in model.module.named_parameters()}
    ours = model.adapted("actor", new_adapter(model.module, Settings(rank=4, alpha=8.0), ["all-linear"], seed=3))
    assert torch.equal(logits(ours), before)
    after = dict(ours.module.named_parameters())
    assert {name: after[name].data_ptr() for name in weights} == weights
    assert not any(after[name].requires_grad for name in weights)
    trained = {id(parameter) for _, parameter in ours.named_parameters()}
    assert trained == {id(parameter) for parameter in after.values() if parameter.requires_grad}
    assert len(trained) == 2 * 7 * 2  # two layers of seven linear layers, two factors each
    assert ours.head.weight is ours.module.lm_head.weight


def test_new_adapters_are_uniform_and_belong_to_seed_and_layer(tiny_model):
    module = load(tiny_model, "float32").module
    settings = Settings(rank=64, alpha=8.0)
    all_of_them = new_adapter(module, settings, ["all-linear"], seed=3).layers
    few = new_adapter(module, settings, ["layers.1.mlp.down_proj", "v_proj"], seed=3).layers
    assert sorted(few) == [
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.self_attn.v_proj",
    ]
    assert all(torch.equal(few[name].down, all_of_them[name].down) for name in few)
    other = new_adapter(module, settings, ["v_proj"], seed=4).layers
    name = "model.layers.1.self_attn.v_proj"
    assert not torch.equal(other[name].down, few[name].down)
    down = few["model.layers.1.mlp.down_proj"].down
    bound = 256**-0.5
    assert 0.99 * bound < down.max() < bound
    assert abs(down.std() / (bound / 3**0.5) - 1) < 0.02
    assert few[name].up.abs().max() == 0


def test_host_memory_never_holds_all_of_a_new_adapter(tiny_model):
    module = load(tiny_model, "float32").module
    made = new_adapter(module, Settings(rank=4, alpha=8.0), ["all-linear"], seed=3).layers
    seen = [weakref.ref(part) for pair in made.values() for part in pair]
    assert [reference() for reference in seen] == [None] * 2 * 14
    assert all(torch.equal(one, other) for name in made for one, other in zip(made[name], made[name], strict=True))


def test_an_adapter_that_is_refused_leaves_the_module_as_it_was(tiny_model):
    module = load(tiny_model, "float32").module
    adapters, settings = Adapters(module, wide=False), Settings(rank=4, alpha=8.0)
    layers = dict(new_adapter(module, settings, ["q_proj"], seed=3).layers)
    last = "model.layers.1.self_attn.q_proj"
    layers[last] = Pair(torch.zeros(4, 64), layers[last].up)
    before = list(module.state_dict())
    with pytest.raises(ModelError, match=r"takes 64 numbers to 128"):
        adapters.attach("actor", Adapter(settings, layers), torch.float32)
    layers[last] = Pair(torch.zeros(1, 128), torch.zeros(128, 1))  # would be broadcast
    with pytest.raises(ModelError, match=r"rank 1 and 1, and says 4"):
        adapters.attach("actor", Adapter(settings, layers), torch.float32)
    assert list(module.state_dict()) == before
    assert adapters.settings == {}


@pytest.mark.parametrize(
    ("architecture", "targets", "message"),
    [
        ("llama", ["q_proj", "o_porj"], r"is called o_porj; did you mean o_proj"),
        ("llama", ["lm_head"], r"no linear layer below the head of LlamaForCausalLM is called lm_head"),
        ("gpt2", ["all-linear"], r"GPT2LMHeadModel has no plain linear layer"),
        ("qwen3_moe", ["gate_proj"], r"no linear layer below the head of Qwen3MoeForCausalLM is called gate_proj"),
    ],
)
def test_targets_that_are_not_there(tiny_architecture, architecture, targets, message):
    module = load(tiny_architecture(architecture), "float32").module
    with pytest.raises(ConfigError, match=message):
        new_adapter(module, Settings(rank=4, alpha=8.0), targets, seed=3)


@pytest.mark.invariant
def test_roles_share_weights_and_keep_their_adapters(tiny_model):
    base = logits(load(tiny_model, "float32"))
    actor = adapted(tiny_model)
    alone = logits(actor)
    made = new_adapter(actor.module, Settings(rank=2, alpha=2.0), ["q_proj", "up_proj"], seed=9)
    critic = actor.adapted("critic", numbers_in(made, seed=9))
    reference = replace(actor, adapter=None)
    critics = logits(critic)
    assert torch.equal(logits(reference), base)
    assert torch.equal(logits(actor), alone)
    assert torch.equal(logits(critic), critics)
    assert torch.equal(critics, logits(adapted(tiny_model, rank=2, alpha=2.0, targets=["q_proj", "up_proj"], seed=9)))
    assert min((alone - base).abs().max(), (critics - base).abs().max(), (critics - alone).abs().max()) > 0.1
    names = {id(parameter) for _, parameter in actor.named_parameters()}
    assert names.isdisjoint(id(parameter) for _, parameter in critic.named_parameters())
    assert list(reference.named_parameters()) == []


@pytest.mark.invariant
@pytest.mark.parametrize("together", [False, True])
def test_recomputed_layers_meet_the_adapter_of_their_forward_pass(tiny_model, together):
    stage, limits = make_rollouts(), Limits(max_tokens=4096)

    def gradients(recompute):
        actor = adapted(tiny_model, "float64")
        made = new_adapter(actor.module, Settings(rank=2, alpha=2.0), ["q_proj"], seed=9)
        critic = add_value_head(actor.adapted("critic", numbers_in(made)))
        with torch.no_grad():
            critic.weight.fill_(0.1)
        if recompute:
            recompute_layers(actor.layers)
        for packed, _ in micro_batches(stage, actor, limits):
            policy = actor.logprobs(packed, temperature=1.0)[0].sum()
            if not together:
                policy.backward()
            value = critic.values(packed).square().sum()  # selects the critic's adapter
            (policy + value if together else value).backward()
        return [parameter.grad for _, parameter in [*actor.named_parameters(), *critic.named_parameters()]]

    kept, recomputed = gradients(False), gradients(True)
    assert len(kept) == 28 + 4 + 2
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in kept)


@pytest.mark.invariant
def test_what_is_trained_on_a_critic_is_its_adapter_and_head(tiny_model):
    actor = adapted(tiny_model)
    made = new_adapter(actor.module, Settings(rank=2, alpha=2.0), ["q_proj"], seed=9)
    critic = add_value_head(actor.adapted("critic", made))
    q_proj = "trunk.model.layers.{}.self_attn.q_proj.{}"
    factors = {q_proj.format(layer, part) for layer in (0, 1) for part in ("down", "up")}
    assert set(critic.tensors()) == factors | {"head.weight", "head.bias"}
    saved = {name: torch.full_like(tensor, 0.25) for name, tensor in critic.tensors().items()}
    before = logits(actor)
    critic.restore(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in critic.tensors().items())
    assert torch.equal(logits(actor), before)


@pytest.mark.invariant
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_rollout_and_trainer_agree_to_the_last_bit(tiny_model, rank):
    model = adapted(tiny_model, rank=rank)
    prompts = [tuple(IDS[: 4 + 9 * number]) for number in range(3)]
    engine = Engine(model, slots=5, max_length=64)
    requests = [GroupRequest(prompt=prompt, seeds=(1, 2, 3, 4)) for prompt in prompts]
    samples = engine.generate(requests, Sampling(max_tokens=9))
    stage = rollouts_of(prompts, samples)
    for limits in (Limits(max_tokens=4096), Limits(max_tokens=64, share_prefix=False)):
        trained = stage_logprobs(stage, [torch.arange(len(stage.responses))], model, limits, 1.0)
        assert torch.equal(trained[stage.mask_NT], stage.rollout_logprobs_NT.to(trained.dtype)[stage.mask_NT])


# --- PEFT's files ---


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("llama", ["all-linear"]),
        ("qwen3", ["q_proj", "v_proj"]),
        ("phi3", ["layers.0.self_attn.qkv_proj", "down_proj"]),
        ("qwen3_moe", ["all-linear"]),
    ],
)
def test_what_is_written_loads_in_peft_with_the_same_logits(tiny_architecture, tmp_path, architecture, targets):
    from peft import PeftModel

    folder = tiny_architecture(architecture)
    model = adapted(folder, targets=targets)
    model.save(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(plain(folder), tmp_path / "adapter")
    expected = logits(model)
    assert (their_logits(theirs) - expected).abs().max() <= NEAR
    assert (their_logits(plain(folder)) - expected).abs().max() > 0.1
    in_theirs = {name.removeprefix("base_model.model.") for name, m in theirs.named_modules() if hasattr(m, "lora_A")}
    assert in_theirs == {name for name, m in model.module.named_modules() if isinstance(m, AdaptedLinear)}
    again = load_model(str(tmp_path / "adapter"), CPU)
    assert torch.equal(logits(again), expected)
    assert again.tokenizer("2+3")["input_ids"] == model.tokenizer("2+3")["input_ids"]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
        {"target_modules": r".*layers\.1.*\.(k_proj|up_proj)"},
        {
            "target_modules": ["q_proj", "k_proj", "up_proj"],
            "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 6},
            "alpha_pattern": {"q_proj": 3},
        },
    ],
)
def test_what_peft_writes_loads_with_the_same_logits(tiny_model, tmp_path, options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", lora_dropout=0.1, **options)
    torch.manual_seed(0)
    theirs = get_peft_model(plain(tiny_model), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = their_logits(theirs)
    model = load_model(str(tmp_path / "theirs"), CPU)
    assert (logits(model) - expected).abs().max() <= NEAR
    assert (logits(replace(model, adapter=None)) - expected).abs().max() > 0.1
    model.save(tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(logits(load_model(str(tmp_path / "ours"), CPU)), logits(model))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_merged_weights_are_a_plain_model_with_the_same_logits(tiny_architecture, tmp_path, architecture):
    folder = tiny_architecture(architecture)
    model = adapted(folder)
    model.save_merged(tmp_path / "merged")
    expected = logits(model)
    assert (their_logits(plain(tmp_path / "merged")) - expected).abs().max() <= NEAR
    assert (logits(load(tmp_path / "merged", "float32")) - expected).abs().max() <= NEAR
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "merged"))
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        f"{name}.weight" for name, module in model.module.named_modules() if isinstance(module, AdaptedLinear)
    }
    assert torch.equal(logits(model), expected)


def test_a_half_precision_adapter_stays_one(tiny_model, tmp_path):
    model = adapted(tiny_model, "bfloat16")
    assert {parameter.dtype for _, parameter in model.named_parameters()} == {torch.bfloat16}
    model.save(tmp_path / "adapter")
    again = load_model(str(tmp_path / "adapter"), CPU, dtype="bfloat16")
    pairs = zip(model.named_parameters(), again.named_parameters(), strict=True)
    assert all(mine == theirs and torch.equal(one, other) for (mine, one), (theirs, other) in pairs)


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "adapter"
    adapted(tiny_model, targets=["q_proj"]).save(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, r"not supported: peft_type = 'LOHA'"),
        ({"use_dora": True, "bias": "all"}, r"not supported: use_dora = True, bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"not supported: modules_to_save = \['lm_head'\]"),
        ({"init_lora_weights": "pissa"}, r"not supported: init_lora_weights = 'pissa'"),
        ({"r": 8}, r"self_attn.q_proj have rank 4, adapter_config.json says 8"),
        ({"r": "many"}, r"is damaged: r, lora_alpha or a pattern"),
        ({"r": 0}, r"a rank below 1"),
        ({"alpha_pattern": {"(": 1}}, r"is damaged: r, lora_alpha or a pattern"),
        ({"target_modules": ["q_proj", "k_proj"]}, r"has no tensors for k_proj"),
        ({"base_model_name_or_path": "/no/such/model"}, r"the model that .* adapts: no such model folder"),
        ({"base_model_name_or_path": None}, r"does not name the model it adapts"),
        ({"base_model_name_or_path": "ITSELF"}, r"which is an adapter itself"),
    ],
)
def test_configs_that_are_refused(written, tmp_path, change, message):
    folder = shutil.copytree(written, tmp_path / "adapter")
    path = folder / "adapter_config.json"
    changed = {key: str(folder) if value == "ITSELF" else value for key, value in change.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(folder), CPU)
    assert caught.value.remedy


def rewrite(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "adapter_config.json").write_text("{"), r"adapter_config.json is damaged"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\0" * 99), r"safetensors is damaged"),
        (lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), r"has only pickle weights"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), r"has no adapter_model.safetensors"),
        (lambda f: rewrite(f, lambda t: t.pop(NAME.format("B"))), r"lacks tensors of model.layers.1.self_attn.q_proj"),
        (lambda f: rewrite(f, dict.clear), r"lacks tensors of every layer"),
        (
            lambda f: rewrite(f, lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(36, 128)})),
            r"changes more than linear layers: base_model.model.lm_head.weight",
        ),
        (
            lambda f: rewrite(f, lambda t: t.update({NAME.format("A"): torch.zeros(4, 64)})),
            r"layers.1.self_attn.q_proj takes 64 numbers to 128, the layer 128 to 128",
        ),
        (
            lambda f: rewrite(
                f, lambda t: t.update({key.replace("layers.1", "layers.7"): t.pop(key) for key in list(t)})
            ),
            r"changes model.layers.7.self_attn.q_proj, which is no linear layer",
        ),
    ],
)
def test_files_that_are_refused(written, tmp_path, change, message):
    folder = shutil.copytree(written, tmp_path / "adapter")
    change(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(folder), CPU)
    assert caught.value.remedy


def test_a_folder_without_an_adapter_is_none(tmp_path):
    with pytest.raises(ModelError, match=r"is not a PEFT adapter folder"):
        read_adapter(tmp_path)
