"""Value models: where their heads come from, what they compute, what they train."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from experience_samples import CPU, load, make_rollouts, stay_double
from ullage.base.errors import ModelError
from ullage.batch.pack import Limits
from ullage.model.load import load_trunk
from ullage.model.value_model import load_value_model, share_trunk
from ullage.workers.passes import micro_batches

WHOLE = Limits(max_tokens=4096)


def put_numbers_in(model):
    """A head that is not zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (model.weight, model.bias):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def values_of(model, stage):
    ((packed, _),) = micro_batches(stage, model.trunk, WHOLE)
    values = packed.scatter(model.values(packed), stage.mask_NT.shape[1])
    return values[packed.samples.argsort()]


def by_hand(folder, model, stage):
    """One sequence at a time through transformers' own forward pass; the state before each token, times the head."""
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    out = torch.zeros(stage.mask_NT.shape, dtype=torch.float64)
    for i, response in enumerate(stage.responses):
        prompt = stage.prompts[int(stage.group_N[i])]
        hidden = theirs(torch.tensor([prompt + response])).last_hidden_state[0]
        for t in range(len(response)):
            if stage.mask_NT[i, t]:
                out[i, t] = hidden[len(prompt) + t - 1] @ model.weight[0] + model.bias[0]
    return out


@pytest.mark.invariant
@pytest.mark.parametrize("shared", [False, True])
def test_values_are_those_of_the_state_before_each_token(tiny_model, shared):
    model = share_trunk(load(tiny_model)) if shared else load_value_model(str(tiny_model), CPU, dtype="float64")
    put_numbers_in(model)
    stage = make_rollouts()
    carriers = stage.select(stage.mask_NT.any(-1).nonzero()[:, 0])
    with torch.no_grad(), stay_double():
        got, want = values_of(model, carriers), by_hand(tiny_model, model, carriers)
    assert want.abs().max() > 1
    torch.testing.assert_close(got[carriers.mask_NT], want[carriers.mask_NT], rtol=1e-10, atol=1e-10)


def test_a_new_head_says_zero_and_draws_no_random_number(tiny_model):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = load_value_model(str(tiny_model), CPU)
    assert torch.equal(torch.get_rng_state(), before)
    stage = make_rollouts()
    carriers = stage.select(stage.mask_NT.any(-1).nonzero()[:, 0])
    with torch.no_grad():
        assert not values_of(model, carriers).any()


def test_a_trunk_of_its_own_is_trained_without_a_language_model_head(tiny_model):
    model = load_value_model(str(tiny_model), CPU)
    language_model = load(tiny_model, "float32")
    names = [name for name, _ in model.named_parameters()]
    trunk = [f"trunk.{name}" for name, _ in language_model.module.base_model.named_parameters()]
    assert names == [*trunk, "head.weight", "head.bias"]
    assert not any("lm_head" in name for name in names)


def test_a_shared_trunk_gets_no_gradient(tiny_model):
    language_model = load(tiny_model)
    model = put_numbers_in(share_trunk(language_model))
    stage = make_rollouts()
    values_of(model, stage.select(torch.arange(4))).sum().backward()
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    assert model.weight.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in language_model.module.parameters())


def test_a_head_on_half_precision_is_in_float32_where_it_is_trained_alone(tiny_model):
    language_model = load(tiny_model, "bfloat16")
    alone = share_trunk(language_model)
    together = load_value_model(str(tiny_model), CPU, dtype="bfloat16")
    assert (alone.weight.dtype, together.weight.dtype) == (torch.float32, torch.bfloat16)
    stage = make_rollouts().select(torch.arange(2))
    for model in (alone, put_numbers_in(together)):
        assert values_of(model, stage).dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "has_bias"), [(AutoModelForSequenceClassification, False), (AutoModelForTokenClassification, True)]
)
def test_the_head_of_a_classifier_is_kept(tiny_model, tmp_path, kind, has_bias):
    config = AutoConfig.from_pretrained(tiny_model, num_labels=1)
    theirs = kind.from_pretrained(tiny_model, config=config, dtype=torch.float32)
    with torch.no_grad():
        theirs.score.weight.normal_()
        if has_bias:
            theirs.score.bias.fill_(0.25)
    theirs.save_pretrained(tmp_path)
    model = load_value_model(str(tmp_path), CPU)
    assert torch.equal(model.weight, theirs.score.weight)
    assert model.bias.item() == (0.25 if has_bias else 0.0)
    for (_, ours), (_, parameter) in zip(
        model.trunk.module.named_parameters(), theirs.base_model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, parameter)


def test_a_classifier_of_several_labels_is_refused(tiny_model, tmp_path):
    config = AutoConfig.from_pretrained(tiny_model, num_labels=3)
    AutoModelForTokenClassification.from_pretrained(tiny_model, config=config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"classification head of shape 3x128; a critic needs one output per token"):
        load_value_model(str(tmp_path), CPU)


def test_a_folder_that_lacks_a_layer_is_refused(tiny_model, tmp_path):
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model)
    state = {name: value for name, value in theirs.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    theirs.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"lacks 1 of the model's tensors, such as model.layers.1.mlp.up_proj.weight"):
        load_trunk(str(tmp_path), CPU)


def test_weights_go_and_come_back(tiny_model):
    model = put_numbers_in(load_value_model(str(tiny_model), CPU))
    saved = {name: value.detach().clone() for name, value in model.tensors().items()}
    other = load_value_model(str(tiny_model), CPU)
    places = [parameter.data_ptr() for _, parameter in other.named_parameters()]
    other.restore(saved)
    assert all(torch.equal(value, saved[name]) for name, value in other.tensors().items())
    assert [parameter.data_ptr() for _, parameter in other.named_parameters()] == places
