"""Closed forms against traces of Ullage's own code, lever by lever: every phase, and host memory.

A mini-batch is one pass here, whatever is mixed. What both leave out of their account, cuBLASLt's and index tensors,
comes to a few MiB.
"""

import json

import pytest

from ullage.config.load import load_mapping
from ullage.planner import components as c
from ullage.planner.allocator import LARGE_SEGMENT
from ullage.planner.components import MIB, SLAB
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout
from ullage.run.predict import predict
from ullage.run.trace_phases import traced_target

SMALL = {
    "model_type": "qwen2",
    "vocab_size": 32768,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 3,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
NORMED = SMALL | {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": False}
NARROW = SMALL | {"model_type": "llama", "intermediate_size": 2432, "num_key_value_heads": 14}
WORK = {
    "algorithm.name": "grpo",
    "data.train_batch_size": 8,
    "data.max_prompt_length": 960,
    "data.max_response_length": 65,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.max_num_seqs": 16,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.actor.optim.optimizer": "adamw",
    "memory.replay": False,
    "memory.rounding": "master",
    "memory.optimizer_state": "device",
    "memory.gradients": "weights",
    "memory.offload_roles": False,
    "memory.recompute": "none",
    "memory.activation_offload": "none",
    "memory.activation_share": 1.0,
}
LORA = {"actor_rollout_ref.model.lora_rank": 32}
OWN_CRITIC = {"algorithm.name": "ppo", "critic.optim.optimizer": "adamw"}
HOST_STATE = {"memory.optimizer_state": "host", "memory.gradients": "host"}
FRUGAL = {"memory.optimizer_state": "streamed", "memory.gradients": "float32", "memory.rounding": "stochastic"}


def recompute(kind, **more):
    return {"memory.recompute": kind} | {f"memory.activation_{name}": value for name, value in more.items()}


FAST = [
    pytest.param(SMALL, {}, id="everything kept, tied"),
    pytest.param(NORMED, recompute("full", offload="async") | HOST_STATE, id="inputs leave beside, state on the host"),
    pytest.param(SMALL, recompute("matmuls", offload="sync") | FRUGAL, id="products kept, inputs leave"),
    pytest.param(NORMED, recompute(0.5, offload="sync", share=0.6) | OWN_CRITIC, id="half run again, some leave"),
    pytest.param(NORMED, recompute("none", offload="async") | LORA, id="LoRA, all leave beside"),
    pytest.param(SMALL, recompute("matmuls") | LORA, id="LoRA, products kept"),
    pytest.param(
        NARROW, recompute("full") | LORA | {"actor_rollout_ref.model.quantization": "int8"}, id="int8, run again"
    ),
    pytest.param(
        NORMED,
        LORA | OWN_CRITIC | {"actor_rollout_ref.model.quantization": "nf4", "critic.model.lora_rank": 16},
        id="nf4, adapters of a critic",
    ),
]
SLOW = [
    pytest.param(NARROW, recompute(kind, offload=offload, share=share) | method, marks=pytest.mark.slow)
    for kind in ("none", "full", "matmuls", 0.4)
    for offload, share in (("none", 1.0), ("sync", 0.5), ("async", 1.0), ("async", 0.5))
    for method in ({"actor_rollout_ref.actor.use_kl_loss": True, "memory.offload_roles": True} | OWN_CRITIC, LORA)
]


@pytest.mark.parametrize(("fields", "levers"), FAST + SLOW)
def test_every_phase_needs_what_a_trace_says(tmp_path, fields, levers):
    config = load_mapping(WORK | levers).config
    (tmp_path / "config.json").write_text(json.dumps(fields))
    traced = predict(config, str(tmp_path), traced_target((9, 0), 80 << 30))
    made = Layout(Shape.from_config(fields, "small"), config)
    forms = {phase.name: phase.allocated_bytes for phase in made.phases()}
    if made.quantisation is None:
        # A rehearsal makes its weights on the device: tied tables are two until they are one, and the widest layers of
        # one input are there twice while they are laid side by side. A run reads them into host memory, and the device
        # gets each once, which is what the form says.
        shape = made.shape
        twice = max(2 * shape.table * shape.tied, 2 * 2 * shape.hidden * shape.mlp)
        workspaces = c.buffers(backward=True, ranks=1).bytes  # which a trace counts from the start
        assert traced.phases["load"] == pytest.approx(forms["load"] + twice + workspaces, abs=3 * MIB)
    passing = {name: bytes_ for name, bytes_ in traced.phases.items() if name != "load"}
    assert passing.keys() <= forms.keys()
    for name, expected in passing.items():
        # A forward pass of the first step has one cuBLAS workspace; a trace counts both from the start.
        assert forms[name] == pytest.approx(expected, rel=0.005, abs=38 * MIB), name
    peak = max(passing.values())
    assert max(forms[name] for name in passing) == pytest.approx(peak, rel=0.005)
    (pool,) = made.graphs()
    assert traced.graphs_bytes <= pool.bytes <= traced.graphs_bytes + LARGE_SEGMENT + 2 * MIB
    held = made.host()
    roles = len(made.roles.trained) if made.leaving else 0
    kept = sum(held[name] for name in ("optimizer", "gradients", "activations", "roles"))
    assert abs(kept - traced.host_bytes) <= roles * SLAB + 4096
