"""Closed forms of sharded layouts against traces of FSDP2 on a fake process group, and of experts' layers.

The traced step is a plain one: float32 shards, bfloat16 computation, float32 reduction, whole logits, AdamW.
"""

from contextlib import contextmanager
from functools import cache
from unittest import mock

import pytest
import torch
import transformers
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ullage.planner import components as c
from ullage.planner.components import GIB, Pass
from ullage.planner.model_shape import Shape, find_shape
from ullage.planner.replay import Allocate, Enter, replay
from ullage.planner.sharding import Groups, Sharding
from ullage.run.trace import CUBLAS_THREADS, CUBLAS_WORKSPACE_BYTES, Recorder, record

WORKSPACES = CUBLAS_THREADS * sum(CUBLAS_WORKSPACE_BYTES)
SMALL = {
    "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 8000,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
BIG_TABLE = SMALL | {"vocab_size": 64_000, "num_hidden_layers": 2}
TIED = BIG_TABLE | {"tie_word_embeddings": True}


class ShardedRecorder(Recorder):
    """A DTensor has the shape of the whole and the storage of none: its part is a tensor of its own."""

    def counts(self, tensor):
        return not isinstance(tensor, DTensor)


@contextmanager
def ranks(world):
    """A process group of which only this rank is there; nothing is sent."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        distributed.destroy_process_group()


def build(fields, *, recompute):
    known = {key: value for key, value in fields.items() if key != "model_type"}
    config = AutoConfig.for_model(fields["model_type"], use_cache=False, **known)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def shard(model, mesh, *, own_groups):
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if own_groups:
        fully_shard(model.model.embed_tokens, **options)
        fully_shard(model.lm_head, **options)
    fully_shard(model, **options)


@cache
def traced(fields, world, batch, length, *, recompute, own_groups):
    """Peaks by phase, without cuBLAS's workspaces, of the second micro-batch and the step after it."""
    fields = dict(fields)

    def step(phase):
        phase("load")
        model = build(fields, recompute=recompute)
        shard(model, mesh, own_groups=own_groups)
        # The optimizer sees the rank's own parts: on DTensors fake tensors of the whole shape would pass by.
        parts = [(p, torch.nn.Parameter(p._local_tensor)) for p in model.parameters()]
        optimizer = torch.optim.AdamW([part for _, part in parts], lr=1e-6, foreach=True)
        ids = torch.randint(0, fields["vocab_size"], (batch, length))
        for number, stepping in enumerate((True, False, True)):
            phase(f"forward {number}")
            logits = model(input_ids=ids).logits[:, :-1].float()
            loss = -torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).mean()
            del logits
            phase(f"backward {number}")
            loss.backward()
            del loss
            if stepping:
                phase(f"optimizer {number}")
                for whole, part in parts:
                    part.grad = whole.grad._local_tensor
                optimizer.step()
                optimizer.zero_grad()
                model.zero_grad()

    with ranks(world) as mesh, FakeTensorMode(), no_mask():
        events = ShardedRecorder().run(step).events
    return {name: peak.allocated - WORKSPACES for name, peak in replay(events, "native").items()}


def no_mask():
    # On fake tensors transformers cannot tell that nothing is packed, and would build a mask.
    return mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", return_value=None)


def predicted(shape, world, batch, length, *, recompute, own_groups, logit_bytes=8, accumulated=True):
    """The same peaks by closed form: the head's term is this plain step's, the rest is the planner's.

    A first micro-batch (not `accumulated`) has no gradients yet; at its end, those of the layers.
    """
    sharding = Sharding(data=world, shards=world, own_groups=own_groups)
    groups = Groups(shape=shape, sharding=sharding, width=2, trained=shape.layer_parameters, trains_tables=True)
    tokens = batch * length
    a = Pass(tokens=tokens, positions=tokens)
    stays = (16 if accumulated else 12) * shape.parameters / world
    gained = 0 if accumulated else 4 * (shape.parameters - groups.root // 2) / world
    kept = c.activations(shape, a, recomputed=shape.layers if recompute else 0, matmuls=False, leaving=0).bytes
    logits = tokens * shape.vocabulary
    norm = tokens * (10 * shape.hidden + 4)  # the last one's, and what it gives to the head
    forward = max(
        # float32 logits and their log-softmax; the head's own group is given back before
        kept + norm + logit_bytes * logits + groups.root,
        kept + norm + 2 * logits + groups.forward_head().bytes,
        kept + groups.forward_layer().bytes,
        groups.forward_start().bytes,
    )
    waiting = 2 * shape.table if shape.tied else 0
    layer = c.working_layer(shape, a, recomputed=recompute).bytes
    backward = max(
        kept + norm + 12 * logits + groups.root,
        kept + layer + groups.backward_layer().bytes + waiting,
        kept + groups.backward_table().bytes,
        2 * waiting + groups.backward_end().bytes + gained,
    )
    return {"forward 2": stays + forward, "backward 2": stays + backward, "optimizer 2": 20 * shape.parameters / world}


@pytest.mark.parametrize(
    ("fields", "length", "world", "own_groups"),
    [
        pytest.param(SMALL, 64, 8, True, id="layers, 8 ranks"),
        pytest.param(SMALL, 64, 64, True, id="layers, 64 ranks"),
        pytest.param(SMALL, 64, 64, False, id="layers beside a root group"),
        pytest.param(SMALL, 1024, 8, True, id="the loss"),
        pytest.param(BIG_TABLE, 16, 8, True, id="tables of their own"),
        pytest.param(BIG_TABLE, 16, 64, False, id="tables in the root group"),
        pytest.param(TIED, 16, 64, False, id="one matrix for both ends"),
        pytest.param(SMALL, 1024, 64, False, id="the loss beside a root group", marks=pytest.mark.slow),
        pytest.param(BIG_TABLE, 16, 8, False, id="tables in the root group, 8 ranks", marks=pytest.mark.slow),
        pytest.param(TIED, 16, 8, False, id="one matrix for both ends, 8 ranks", marks=pytest.mark.slow),
    ],
)
def test_gather_and_reduce_buffers_are_those_of_a_trace(fields, length, world, own_groups):
    options = {"recompute": True, "own_groups": own_groups}
    found = traced(tuple(fields.items()), world, 1, length, **options)
    for name, expected in predicted(Shape.from_config(fields, "small"), world, 1, length, **options).items():
        assert expected == pytest.approx(found[name], rel=0.025), name


@pytest.mark.parametrize(
    ("name", "batch", "length", "recompute", "world", "forward", "backward", "optimizer"),
    [
        ("Qwen2.5-0.5B", 2, 1024, True, 8, 3.94, 4.51, 1.15),
        ("Qwen2.5-7B", 1, 4096, True, 8, 19.35, 20.51, 17.73),
        ("Qwen2.5-7B", 1, 4096, True, 64, 10.04, 11.20, 2.22),
        ("Qwen2.5-7B", 1, 4096, False, 8, 42.66, 43.82, 17.73),
        ("Qwen2.5-7B", 1, 512, True, 64, 6.26, 7.80, 2.22),
    ],
)
def test_traces_of_whole_models_follow_from_the_closed_forms(
    name, batch, length, recompute, world, forward, backward, optimizer
):
    """GiB of traces at full depth, embedding and head in the root group, first micro-batch, half precision logits kept
    beside the float32 ones. In the last row sharded state is 1.8 GiB of 7.8: the root group is the rest."""
    shape = find_shape(name)
    found = predicted(
        shape, world, batch, length, recompute=recompute, own_groups=False, logit_bytes=10, accumulated=False
    )
    expected = {"forward 2": forward, "backward 2": backward, "optimizer 2": optimizer}
    assert {key: value / GIB for key, value in found.items()} == pytest.approx(expected, rel=0.01)


# --- experts and latent attention ---

EXPERTS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128}
QWEN3_MOE = EXPERTS | {
    "model_type": "qwen3_moe", "intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 192, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = EXPERTS | {
    "model_type": "mixtral", "intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def layer_bytes(fields, tokens, layers):
    """What was live when each phase began, and the most that was live in it."""
    known = {key: value for key, value in fields.items() if key != "model_type"}

    def step(phase):
        config = AutoConfig.for_model(fields["model_type"], use_cache=False, num_hidden_layers=layers, **known)
        options = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
        model = AutoModel.from_config(config, dtype=torch.bfloat16, **options).train()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = torch.randint(0, 100, (1, tokens))
        phase("forward")
        with torch.no_grad():
            model(input_ids=ids)
        phase("saving")
        hidden = model(input_ids=ids).last_hidden_state
        phase("saved")
        del hidden
        model.gradient_checkpointing_enable({"use_reentrant": False})
        hidden = model(input_ids=ids).last_hidden_state
        gradient = torch.ones_like(hidden)
        phase("backward")
        hidden.backward(gradient)

    with no_mask():
        trace = record(step)
    sizes, began, most, inside, live = {}, {}, {}, "", 0
    for event in trace.events:
        if isinstance(event, Enter):
            inside = event.phase
            began.setdefault(inside, live)  # a phase is entered again around its backward pass
        elif isinstance(event, Allocate):
            sizes[event.key] = event.size
            live += event.size
        else:
            live -= sizes.pop(event.key)
        most[inside] = max(most.get(inside, 0), live)
    return began, most


@pytest.mark.parametrize("fields", [QWEN3_MOE, MIXTRAL], ids=["many small experts", "few large ones"])
def test_what_layers_with_experts_keep_and_need_is_that_of_a_trace(fields):
    shape, tokens = Shape.from_config(fields | {"num_hidden_layers": 3}, "experts"), 2048
    a = Pass(tokens=tokens, positions=0)
    began, most = layer_bytes(fields, tokens, 3)
    fewer, _ = layer_bytes(fields, tokens, 2)
    saved = (began["saved"] - began["saving"]) - (fewer["saved"] - fewer["saving"])
    assert c.saved_by_layer(shape, a) == pytest.approx(saved, rel=0.01)
    around = tokens * (2 * shape.hidden + 4 * shape.head_size)  # the embeddings of tokens and positions
    forward = most["forward"] - began["forward"] - around
    assert c.forward_layer(shape, a).bytes == pytest.approx(forward, rel=0.01)
    backward = most["backward"] - began["backward"]
    assert c.working_layer(shape, a, recomputed=True).bytes == pytest.approx(backward, rel=0.1)


def test_with_few_tokens_the_gradient_of_all_experts_is_the_peak_of_a_layer():
    shape, a = Shape.from_config(QWEN3_MOE | {"num_hidden_layers": 3}, "experts"), Pass(tokens=64, positions=0)
    began, most = layer_bytes(QWEN3_MOE, 64, 3)
    layer = c.working_layer(shape, a, recomputed=True).bytes
    assert layer == pytest.approx(most["backward"] - began["backward"], rel=0.01)
    assert layer > 2 * shape.fused_experts == 2 * 64 * 2 * 192 * 256
