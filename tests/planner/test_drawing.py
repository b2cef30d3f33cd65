"""The engine by closed form, worked out by hand for Qwen2.5-7B and Qwen3-8B."""

from dataclasses import replace

import pytest

from ullage.config.load import load_mapping
from ullage.model.kernels import paged
from ullage.planner import components as c
from ullage.planner import drawing as drawn
from ullage.planner.components import MIB, WORKSPACE
from ullage.planner.drawing import Drawing
from ullage.planner.model_shape import Shape, find_shape
from ullage.planner.phases import Layout
from ullage.rollout.embedded import engine, requests, state

SEGMENT = drawn.SEGMENT_TOKENS
SEVEN, EIGHT = find_shape("Qwen2.5-7B"), find_shape("Qwen3-8B")


def drawing(shape, **given):
    plain = {"slots": 64, "n": 1, "prompt": 64, "longest": 240, "truncated": False, "deterministic": False}
    held = {"vocabulary": shape.vocabulary, "width": 2, "rank": 0, "quantisation": None}
    return Drawing(shape=shape, **(held | plain | given))


def test_the_planner_s_numbers_are_those_of_the_engine():
    kernels = paged.SEGMENTS, paged.PREFIX_SEGMENTS, paged.LEAST_SEGMENT
    assert kernels == (drawn.SEGMENTS, drawn.PREFIX_SEGMENTS, drawn.SEGMENT_TOKENS)
    assert (engine.PREFILL_TOKENS, engine.PREFILL_ELEMENTS) == (c.PREFILL_TOKENS, c.PREFILL_ELEMENTS)
    assert (requests.SHARED_LEAST, state.LEAST_MEMBERS) == (drawn.LEAST_SHARED, drawn.LEAST_MEMBERS)


def test_logits_are_drawn_from_as_they_are_unless_top_p_or_top_k_leave_some_out():
    assert drawing(SEVEN).logits().bytes == 4 * 64 * 152064
    assert drawing(SEVEN, truncated=True).logits().bytes == 10 * 64 * 152064


def test_graphs_keep_logits_and_what_a_layer_makes():
    term = drawing(SEVEN).graphs()
    # In 20 MiB: 37.125 MiB of logits and 8.75 MiB of four hidden states and three tensors of the MLP; small blocks.
    assert term.inputs["layer"] == 64 * 2 * (4 * 3584 + 3 * 18944)
    assert (term.name, term.bytes) == ("graphs", 64 * MIB)
    assert drawing(SEVEN, rank=8).graphs().inputs["layer"] == 64 * 2 * (4 * 3584 + 4 * 18944)
    assert drawing(SEVEN, quantisation="int8").graphs().inputs["plain"] == 6 * 3584 * 18944


@pytest.mark.parametrize(("name", "planned", "measured"), [("Qwen2.5-0.5B", 184, 168), ("Qwen3-8B", 244, 238)])
def test_pools_that_an_h200_measured_fit_what_is_planned(name, planned, measured):
    # Attention had room for 16 segments then, whatever the length.
    found = drawing(find_shape(name), slots=256, longest=16 * SEGMENT).graphs().bytes
    assert found == planned * MIB
    assert measured * MIB <= found < (measured + 20) * MIB


@pytest.mark.parametrize(
    ("given", "segments"),
    [
        ({"longest": SEGMENT - 16}, 0),  # these pages and one more are one segment, which is not merged
        ({"longest": SEGMENT - 15}, 2),
        ({"longest": 16 * SEGMENT}, 16),
        ({"longest": 64 * SEGMENT}, 16),
        ({"longest": SEGMENT - 16, "n": 4, "prompt": 128}, 1 + 1),
        ({"longest": 4 * SEGMENT, "n": 4, "prompt": 128}, 5 + 5),
        ({"longest": 16 * SEGMENT, "n": 16, "prompt": 128}, 16 + 8),
        ({"longest": 16 * SEGMENT, "n": 3, "prompt": 128}, 16),
        ({"longest": 16 * SEGMENT, "n": 4, "prompt": 127}, 16),
    ],
)
def test_attention_has_partial_results_for_each_segment(given, segments):
    attention = 64 * 2 * (2 * 4096 + 3 * 4096 + 2 * 1024) + 4 * 64 * 32 * segments * 130
    mlp = 64 * 2 * (4 * 4096 + 3 * 12288)
    assert drawing(EIGHT, **given).graphs().inputs["layer"] == max(attention, mlp)


def test_a_sliding_window_ends_what_a_sequence_reads_for_itself():
    narrow = replace(EIGHT, sliding_window=2 * SEGMENT)
    attention = 64 * 2 * (5 * 4096 + 2 * 1024) + 4 * 64 * 32 * 2 * 130
    assert drawing(narrow, longest=16 * SEGMENT).graphs().inputs["layer"] == max(
        attention, 64 * 2 * (4 * 4096 + 3 * 12288)
    )


def layout(**given):
    return Layout(SEVEN, load_mapping({"algorithm.name": "grpo"} | given).config)


def test_graphs_are_reserved_from_the_first_rollout_on_and_allocated_in_no_phase():
    made = layout()
    load, *later = made.phases()
    (pool,) = made.graphs()
    assert "graphs" not in load.components
    for phase in later:
        assert phase.components["graphs"] == pool.bytes
        parts = [count for name, count in phase.components.items() if name not in ("graphs", "context")]
        assert phase.allocated_bytes == sum(parts)
        assert phase.components["buffers"] in (2 * WORKSPACE, 3 * WORKSPACE)


def test_one_pool_holds_the_steps_of_evaluations_too():
    val = {"data.val_files": ["val.jsonl"], "actor_rollout_ref.rollout.val_kwargs.top_p": 0.9}
    wide = layout(**val, **{"actor_rollout_ref.rollout.val_kwargs.temperature": 1.0})
    assert wide.graphs()[0].inputs["logits"] == 10 * 64 * 152064
    assert layout().graphs()[0].inputs["logits"] == 4 * 64 * 152064


def test_what_is_not_captured_keeps_nothing():
    assert layout(**{"algorithm.name": "sft"}).graphs() == []
    fields = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "vocab_size": 512}
    for rope in ({"rope_scaling": {"type": "dynamic"}}, {"rope_parameters": {"rope_type": "longrope"}}):
        made = Layout(Shape.from_config(fields | rope, "moving"), load_mapping({"algorithm.name": "grpo"}).config)
        assert made.graphs() == []
        assert {phase.components.get("buffers", 0) for phase in made.phases()} == {0, WORKSPACE, 2 * WORKSPACE}
    scaled = Shape.from_config(fields | {"rope_scaling": {"rope_type": "llama3"}}, "scaled")
    assert not scaled.moving_rope
