"""Phases by closed form against what one H200 measured: benchmarks/results/update_h200_*.json."""

import json
from pathlib import Path

import pytest

from ullage.config.load import load_mapping
from ullage.planner import components as c
from ullage.planner.components import GIB, Pass
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout, phases

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPES = {size: find_shape(f"Qwen2.5-{size}") for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")}
SHAPES["8B"] = find_shape("Qwen3-8B")
OPTIMIZER = "actor_rollout_ref.actor.optim.optimizer"
FIT = {
    "data.train_batch_size": 8,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 2048,
}
FRUGAL = FIT | {
    "memory.rounding": "stochastic",
    "memory.optimizer_state": "streamed",
    "memory.recompute": "full",
    "memory.activation_offload": "async",
    OPTIMIZER: "adamw_8bit",
}
LORA = FIT | {
    "actor_rollout_ref.model.lora_rank": 16,
    "memory.recompute": "full",
    "actor_rollout_ref.rollout.max_num_seqs": 32,
    # Measured when every sample had room for a prompt of its own.
    "actor_rollout_ref.rollout.kv_cache_tokens": 32 * (1024 + 16),
}
BEFORE_GRAPHS = c.WORKSPACE
"""Whole steps were measured before the engine captured its steps on a queue of their own."""
EVEN = 7721
"""Tokens of the larger of two micro-batches of 15,396, which `pack` fills evenly."""
NORMS = 16 / 2**14
"""Bytes for each gradient while their norm is taken: of rows of 2**14, in float32, together, and in float64."""


def rows(name):
    return json.loads((RESULTS / f"update_h200_{name}.json").read_text())[name.removesuffix("_again")]


def layout(shape, settings, kind=Layout):
    return kind(shape, load_mapping({"algorithm.name": "grpo"} | settings).config)


class Measured(Layout):
    """With the micro-batch that was measured: three of a group's samples, all of full length."""

    def _passes(self, limit, rank):
        assert limit == 2048
        tokens, positions = 512 + 3 * 511, 3 * 512
        return [Pass(tokens=tokens, positions=positions, rank=rank, more_keys=3 * 512)]


def fitted(row):
    return layout(SHAPES[row["case"].split()[0]], LORA if "LoRA" in row["case"] else FRUGAL, Measured)


@pytest.mark.parametrize("row", rows("fit"), ids=lambda row: row["case"])
def test_whole_steps_are_predicted_phase_by_phase(row):
    made = fitted(row)
    found = {phase.name: phase for phase in made.phases()}
    for name in ("rollout", "logprob"):
        allocated = found[name].allocated_bytes - BEFORE_GRAPHS
        assert allocated / GIB == pytest.approx(row["peak_gib"][name], rel=0.003), name
    for name, measured in row["components_gib"].items():
        assert found["update"].components.get(name, 0) / GIB == pytest.approx(measured, abs=0.006), name
    held = made.host()
    assert (held["optimizer"] + held["gradients"]) / GIB == pytest.approx(row["host_gib"], abs=0.006)


def logits_that_stayed(shape, positions):
    """In some rows a chunk of logits was alive while the head's gradient was handed over, which ended since."""
    logits = 4 * min(positions, c.HEAD_CHUNK) * shape.vocabulary
    return logits + 6 * shape.table - max(logits + 4 * shape.table, 6 * shape.table)


@pytest.mark.parametrize("row", rows("fit"), ids=lambda row: row["case"])
def test_the_update_of_whole_steps_is_predicted(row):
    made = fitted(row)
    update = next(phase for phase in made.phases() if phase.name == "update").allocated_bytes
    update -= BEFORE_GRAPHS
    if row["case"] in ("3B", "8B"):
        update += logits_that_stayed(made.shape, made.update_pass.positions)
    assert update / GIB == pytest.approx(row["peak_gib"]["update"], rel=0.002)


def update_and_step(row, fullest):
    pairs = (setting.split("=") for setting in row["settings"].split(", "))
    named = {OPTIMIZER if key == "optimizer" else f"memory.{key}": value for key, value in pairs}
    typed = {
        key: json.loads(value.lower()) if value in ("True", "False", "0.5") else value for key, value in named.items()
    }
    shares = {key: float(value) if key.endswith("_share") else value for key, value in typed.items()}
    made = layout(SHAPES[row["shape"]], {"actor_rollout_ref.rollout.n": 2} | shares)
    fed, carry = row["tokens"] - row["sequences"], row["tokens"] - 16 * row["sequences"]
    tokens = fed if row["micro_batch"] >= row["tokens"] else fullest
    a = Pass(tokens=tokens, positions=tokens * carry // fed, compiled=made.config.memory.compile)
    stays = sum(term.bytes for term in made.resident() if term.name != "kv_cache")
    stays += c.buffers(backward=True, ranks=1).bytes
    norms = 0 if made.chosen.gradients == "host" else NORMS * made.shape.parameters
    return stays + sum(term.bytes for term in made.backward(made.actor, a)), stays + norms


@pytest.mark.parametrize(
    "row", rows("speed") + rows("activations"), ids=lambda row: f"{row['shape']} {row['settings']}"
)
def test_updates_with_every_treatment_of_activations_are_predicted(row):
    update, _ = update_and_step(row, EVEN)
    assert update / GIB == pytest.approx(row["peak_gib"], rel=0.0005)


@pytest.mark.parametrize("row", rows("levers") + rows("state_again"), ids=lambda row: f"{row['shape']} {row['lever']}")
def test_updates_and_steps_with_every_lever_are_predicted(row):
    update, step = update_and_step(row, EVEN)
    assert update / GIB == pytest.approx(row["peak_gib"], rel=0.002)
    assert step / GIB == pytest.approx(row["step_peak_gib"], abs=0.01)


def peak(shape, settings):
    return max(phase.total_bytes for phase in phases(shape, load_mapping({"algorithm.name": "grpo"} | settings).config))


def test_roles_are_there_only_while_a_phase_uses_them_where_they_park():
    shape = SHAPES["1.5B"]
    settings = {"algorithm.name": "ppo", "actor_rollout_ref.actor.use_kl_loss": True}
    here, parked = layout(shape, settings), layout(shape, settings | {"memory.offload_roles": True})
    both = 2 * shape.parameters + 2 * shape.trunk_parameters
    weights = {phase.name: phase.components["weights"] for phase in here.phases()}
    assert list(weights) == [
        "load", "rollout", "logprob", "reference", "values", "update", "update_critic", "optimizer_step", "sync",
        "save",
    ]  # fmt: skip
    assert weights["update"] == 2 * shape.parameters + both
    weights = {phase.name: phase.components["weights"] for phase in parked.phases()}
    assert weights["update"] == weights["rollout"] == 2 * shape.parameters
    assert weights["reference"] == 4 * shape.parameters
    assert weights["values"] == weights["update_critic"] == 2 * shape.parameters + 2 * shape.trunk_parameters
    assert parked.host()["roles"] == both
    assert here.host()["roles"] == 0


def test_every_phase_has_its_place_and_evaluation_its_own_settings():
    settings = {
        "algorithm.name": "ppo",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "reward_model.enable": True,
        "reward_model.model.path": "Qwen2.5-0.5B",
        "data.val_files": ["held_out.jsonl"],
        "actor_rollout_ref.rollout.val_kwargs.temperature": 0.0,
        "data.max_prompt_length": 8,
    }
    made = layout(SHAPES["1.5B"], settings)
    found = {phase.name: phase for phase in made.phases()}
    assert list(found) == [
        "load", "rollout", "reward_model", "logprob", "reference", "values", "update", "update_critic",
        "optimizer_step", "sync", "save", "eval",
    ]  # fmt: skip
    assert found["rollout"].components["head"] == 4 * 64 * 151936
    assert found["eval"].components["head"] == 4 * 64 * 151936  # greedy: nothing is drawn
    assert found["sync"].allocated_bytes == sum(term.bytes for term in made.resident()) + 2 * c.WORKSPACE
    few = settings | {"data.val_max_samples": 5, "actor_rollout_ref.rollout.val_kwargs.n": 2}
    assert layout(SHAPES["1.5B"], few).eval_slots == 10


def test_the_rollout_shows_prefill_and_decode_and_counts_the_larger():
    rollout = next(phase for phase in layout(SHAPES["7B"], {}).phases() if phase.name == "rollout")
    counted = [term for term in rollout.terms if term.name in ("head", "working_layer")]
    prefill, decode = 2 * 4096 * (3 * 18944 + 3 * 3584), 4 * 64 * 152064
    embedded = 2 * 4096 * (3584 + 2 * 128)
    assert [term.bytes for term in counted] == [prefill, embedded, 0]
    assert f"decode: {decode:,} B, less than prefill" in counted[2].formula


def test_the_critics_step_needs_its_weights_here():
    settings = {"algorithm.name": "ppo", "memory.offload_roles": True, "memory.rounding": "stochastic"}
    made = layout(SHAPES["1.5B"], settings | {"critic.optim.optimizer": "adamw_8bit"})
    step = next(phase for phase in made.phases() if phase.name == "optimizer_step")
    assert step.components["weights"] == 2 * SHAPES["1.5B"].parameters + 2 * SHAPES["1.5B"].trunk_parameters
    moments = 8 * SHAPES["1.5B"].parameters + c.moments(made.critic.parameters, "adamw_8bit").bytes
    assert step.components["optimizer"] == moments


def test_adapters_need_no_copy_for_the_reference_and_the_critic_can_share_the_weights():
    settings = {
        "algorithm.name": "ppo",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.model.lora_rank": 16,
        "critic.model.lora_rank": 16,
    }
    made = layout(SHAPES["7B"], settings)
    update = next(phase for phase in made.phases() if phase.name == "update")
    assert update.components["weights"] == 2 * SHAPES["7B"].parameters + 2 * 2 * c.adapter_parameters(SHAPES["7B"], 16)


def test_supervised_training_samples_nothing():
    made = layout(SHAPES["0.5B"], {"algorithm.name": "sft"})
    assert [phase.name for phase in made.phases()] == ["load", "update", "optimizer_step", "save"]
    made = layout(SHAPES["0.5B"], {"algorithm.name": "sft", "data.val_files": ["held_out.jsonl"]})
    assert made.phases()[-1].name == "eval"  # the loss of held-out answers
    assert "head" in made.phases()[-1].components


def test_gradients_on_the_host_leave_no_room_to_lend():
    shape = SHAPES["7B"]
    lent, own = layout(shape, {}), layout(shape, {"memory.gradients": "host"})
    assert lent.kv_cache().bytes == 0
    assert own.kv_cache().bytes == (9 * 512 + 64 * (512 + 16)) * 57_344  # 64 of 512 samples, eight of each prompt
    assert own.host()["gradients"] == 2 * (shape.parameters + 4 * c.PIECE)
    assert peak(shape, {"memory.gradients": "host"}) < peak(shape, {})


def test_a_pass_is_as_full_as_its_limit_whatever_the_lengths():
    """Of a mix with long prompts and one with short ones, that which needs more: here more positions carry loss."""
    made = layout(SHAPES["7B"], FIT)
    assert (made.update_pass.tokens, made.update_pass.positions) == (2048, 4 * 512)
    assert made.update_pass.more_keys == 4 * (2048 - 4 * 511)
    assert made.full_length_samples == 3
    few = layout(SHAPES["7B"], FIT | {"data.train_batch_size": 1, "actor_rollout_ref.rollout.n": 2})
    assert (few.update_pass.tokens, few.update_pass.positions) == (512 + 2 * 511, 2 * 512)


def test_keys_of_long_prompts_are_gathered_where_that_needs_more_than_logits():
    settings = {
        "data.max_prompt_length": 2000,
        "data.max_response_length": 9,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16_600,
        "memory.recompute": "none",
    }
    made = layout(SHAPES["8B"], settings)
    # Eight groups of 2,064 tokens, and a prompt of 80 with one sample.
    assert (made.update_pass.tokens, made.update_pass.positions) == (16_600, 65 * 9)
    assert made.update_pass.more_keys == 8 * 8 * 2000
    assert made.fullest_blocks == [*[(2000, 8, 9)] * 8, (80, 1, 9)]


def test_roles_on_the_actors_own_layers_have_phases():
    settings = {
        "algorithm.name": "ppo",
        "critic.share_actor": True,
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.actor.use_kl_loss": True,
    }
    found = {phase.name: phase for phase in layout(SHAPES["0.5B"], settings).phases()}
    assert found.keys() >= {"reference", "values", "update_critic"}
    assert found["reference"].components["weights"] == found["logprob"].components["weights"]
    assert found["values"].components["working_layer"] < found["update_critic"].allocated_bytes
    assert "activations" not in found["update_critic"].components  # nothing of the layers is kept


def test_checkpoints_hold_weights_and_state():
    made = layout(SHAPES["0.5B"], {})
    assert made.disk()["checkpoint"] == (2 + 12) * 494_032_768
    assert made.disk()["kept"] == 4 * (2 + 12) * 494_032_768
    assert made.host()["checkpoint"] == 12 * 494_032_768  # on its way from the device to a file
    streamed = layout(SHAPES["0.5B"], {"memory.optimizer_state": "streamed"}).host()
    assert (streamed["optimizer"], streamed["checkpoint"]) == (12 * 494_032_768, 2 * 494_032_768)
