"""What a trace of the run's own code says, against what runs measured and against what must be so."""

import json
from pathlib import Path

import pytest
import torch

from ullage.bench.fit import CASES, case_config
from ullage.bench.shapes import shape_config
from ullage.config.load import load_mapping
from ullage.config.settle import ACTOR_TOKENS, plainly, with_key
from ullage.model.target import Target
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.planner.replay import replay
from ullage.run import predict as predicting
from ullage.run.predict import architecture_of, predict, predict_shallow, trace_step, with_layers
from ullage.run.rehearsal import Rehearsal
from ullage.run.trace_phases import traced_target

GIB = 2**30
H200 = traced_target((9, 0), 150_110_011_392)
CPU = Target("cpu", 0, (0, 0), 8 << 30)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "update_h200_fit.json"
MEASURED = {row["case"]: row["peak_gib"] for row in json.loads(RESULTS.read_text())["fit"]}
BEFORE_GRAPHS = 33 / 1024
"""GiB: these were measured before the engine captured its steps on a queue of their own, with a workspace for it."""
OTHER_WORKSPACE = 33 / 1024
"""GiB: a first step meets the backward thread's cuBLAS workspace only in its update; a trace has it from the start."""


@pytest.fixture
def shapes(monkeypatch):
    """Models by the names of the benchmarks."""
    monkeypatch.setattr(predicting, "architecture_of", shape_config)


@pytest.mark.parametrize("case", ["14B", "32B", "32B LoRA"])
def test_steps_that_an_h200_measured(case, shapes):
    config = case_config(CASES[case])
    # Measured when every sample had room for a prompt of its own.
    config = with_key(config, "actor_rollout_ref.rollout.kv_cache_tokens", CASES[case].slots * (1024 + 16))
    found = predict_shallow(config, CASES[case].shape, H200, mix="drawn").phases
    measured = MEASURED[case]
    assert found["update"] / GIB - BEFORE_GRAPHS == pytest.approx(measured["update"], abs=0.01)
    for phase in ("rollout", "logprob"):
        assert found[phase] / GIB - BEFORE_GRAPHS - OTHER_WORKSPACE == pytest.approx(measured[phase], rel=0.004), phase


def config_of(**given):
    fixed = {
        "data.train_batch_size": 4,
        "data.max_prompt_length": 24,
        "data.max_response_length": 40,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 128,
    }
    return plainly(
        load_mapping({**fixed, **{key.replace("__", "."): value for key, value in given.items()}}).config, "cuda"
    )


LEVERS = {
    "plain": {},
    "streamed": {"memory__optimizer_state": "streamed"},
    "host": {"memory__optimizer_state": "host", "memory__gradients": "host"},
    "8-bit": {"actor_rollout_ref__actor__optim__optimizer": "adamw_8bit", "memory__rounding": "stochastic"},
    "offload": {"memory__activation_offload": "async", "memory__recompute": "none"},
    "matmuls": {"memory__recompute": "matmuls", "memory__activation_offload": "sync"},
    "ppo": {"algorithm__name": "ppo", "memory__offload_roles": True, "algorithm__use_kl_in_reward": True},
    "lora": {"actor_rollout_ref__model__lora_rank": 4, "algorithm__name": "ppo", "critic__model__lora_rank": 4},
    "qlora": {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__model__quantization": "nf4"},
    "top-p": {"actor_rollout_ref__rollout__top_p": 0.9},
}


@pytest.mark.parametrize("lever", LEVERS)
def test_every_lever_can_be_traced_and_its_owners_add_up(lever, shapes):
    config = config_of(**LEVERS[lever])
    found = predict(config, "tiny", H200)
    wanted = ["load", "rollout", "logprob", "update"]
    if config.algorithm.name == "ppo":
        wanted += ["values", "update_critic"]
    if config.algorithm.use_kl_in_reward:
        wanted.append("reference")
    assert set(found.phases) == set(wanted)
    assert found.peak_bytes == max(found.phases.values()) <= found.least_bytes < found.peak_bytes + 64 * 2**20
    # The allocator rounds every tensor up to 512 bytes; a phase's owners are what it was made of.
    for phase, owners in found.components.items():
        assert 0 <= found.phases[phase] - sum(owners.values()) < 400 * 512, phase


def test_host_memory_is_what_the_levers_put_there(shapes):
    config = config_of(memory__optimizer_state="streamed", memory__gradients="host")
    trained = sum(p.numel() for p in Rehearsal(config, shape_config("tiny"), H200, _quiet).actor.optimizer.parameters)
    found = predict(config, "tiny", H200)
    stages = 4 * 2 * max(64 * 512, 64 * 128)
    """Of gradients on their way: four pieces as large as the largest parameter."""
    assert found.host_bytes == (4 + 4 + 4 + 2) * trained + stages


def test_what_is_on_the_host_is_not_on_the_device(shapes):
    here = predict(config_of(), "tiny", H200).components["update"]
    away = predict(config_of(memory__optimizer_state="streamed"), "tiny", H200).components["update"]
    assert (here["master"], here["optimizer"]) == (4 * 107_072, 8 * 107_072)
    assert "master" not in away
    assert away["optimizer"] == 2 * 12 * 64 * 512, "two stages for a piece of master and two moments"
    assert away["gradients"] == here["gradients"] == 2 * 107_072


def test_the_least_capacity_holds_the_pool_of_captured_steps(shapes, monkeypatch):
    found = predict(config_of(), "tiny", H200)
    assert found.graphs_bytes == 2 * 2**20, "a few rows of a tiny model: one segment of small blocks"
    moving = shape_config("tiny")
    moving.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    monkeypatch.setattr(predicting, "architecture_of", lambda name: moving)
    eager = predict(config_of(), "moving", H200)
    assert eager.graphs_bytes == 0
    # Without graphs there is no second queue either.
    assert found.phases["update"] - eager.phases["update"] == 33 * 2**20 - 512, "this rope keeps its first numbers"
    assert found.least_bytes - eager.least_bytes == pytest.approx(44 * 2**20, abs=2 * 2**20), "42 MiB hold 33"


def test_a_deep_model_is_worked_out_from_shallow_ones(shapes, monkeypatch):
    deep = with_layers(shape_config("tiny"), 12)
    monkeypatch.setattr(predicting, "architecture_of", lambda name: deep)
    few_slots = {"actor_rollout_ref__rollout__max_num_seqs": 1, "memory__recompute": "none"}
    for levers in (few_slots, {"actor_rollout_ref__model__lora_rank": 4}):
        whole, shallow = (each(config_of(**levers), "deep", H200).phases for each in (predict, predict_shallow))
        assert whole.keys() == shallow.keys()
        for phase, size in whole.items():
            assert shallow[phase] == pytest.approx(size, rel=2e-3), phase


def test_fewer_sequences_are_traced_than_a_step_has_but_none_that_matters():
    """The peaks are those of a step with every micro-batch."""
    config = config_of(data__train_batch_size=8)
    few = trace_step(config, shape_config("tiny"), H200, mix="drawn").trace
    chosen = Rehearsal._two_micro_batches
    try:
        Rehearsal._two_micro_batches = lambda self, samples: samples
        everyone = trace_step(config, shape_config("tiny"), H200, mix="drawn").trace
    finally:
        Rehearsal._two_micro_batches = chosen
    assert len(few.events) < len(everyone.events)
    assert replay(few.events) == replay(everyone.events)


def test_a_rehearsal_is_a_real_step_on_a_real_device():
    config = plainly(config_of(algorithm__name="ppo"), "cpu")
    run = Rehearsal(config, shape_config("tiny"), CPU, _quiet)
    before = {name: p.detach().clone() for name, p in run.actor.model.module.named_parameters()}
    samples = run.step()
    assert {(s.group, s.index) for s in samples} == {(g, i) for g in range(4) for i in range(2)}
    assert all(len(sample.token_ids) == 40 and len(set(sample.token_ids)) > 1 for sample in samples)
    changed = [name for name, p in run.actor.model.module.named_parameters() if not torch.equal(p, before[name])]
    assert len(changed) > 10


def test_models_by_name_by_shape_and_by_folder(tiny_model):
    by_name, shape = architecture_of("Qwen2.5-7B"), find_shape("Qwen2.5-7B")
    assert (by_name.model_type, by_name.hidden_size, by_name.num_hidden_layers) == ("qwen2", shape.hidden, shape.layers)
    assert architecture_of("qwen3-8b").model_type == "qwen3"
    assert architecture_of("llama-3.1-8b").num_key_value_heads == 8
    assert architecture_of(str(tiny_model)).get_text_config().num_hidden_layers == 2


def _quiet(name):
    from contextlib import nullcontext

    return nullcontext()


def test_a_cache_that_outgrows_the_gradients_is_no_line(shapes, monkeypatch):
    """Two and four layers' gradients have room for the cache; twelve layers' have not, beside one embedding."""
    deep = with_layers(shape_config("tiny"), 12)
    monkeypatch.setattr(predicting, "architecture_of", lambda name: deep)
    config = config_of()
    assert [trace_step(config, with_layers(deep, depth), H200).lends for depth in (2, 12)] == [True, False]
    assert predict_shallow(config, "deep", H200).phases == predict(config, "deep", H200).phases


def test_compiled_layers_are_corrected_by_formula_and_say_so_nowhere_else():
    eager = config_of(memory__recompute="none", actor_rollout_ref__rollout__max_num_seqs=4)
    eager = with_key(with_key(eager, "data.max_response_length", 2000), ACTOR_TOKENS, 8192)
    compiled = with_key(eager, "memory.compile", True)
    plain, fewer = (predict_shallow(config, "Qwen2.5-0.5B", H200).phases for config in (eager, compiled))
    shape = find_shape("Qwen2.5-0.5B")
    forms = [{p.name: p.allocated_bytes for p in Layout(shape, config).phases()} for config in (eager, compiled)]
    assert plain["update"] - fewer["update"] == forms[0]["update"] - forms[1]["update"] > 2**30
    assert {name: plain[name] for name in ("rollout", "logprob")} == {
        name: fewer[name] for name in ("rollout", "logprob")
    }


def test_passes_are_as_full_as_a_mix_of_lengths_can_make_them():
    """Three samples are 117 tokens: behind short prompts they fit 128, and the prompts fill what is left."""
    config = config_of(data__max_prompt_length=30)
    drawn, fullest = (
        trace_step(config, shape_config("tiny"), H200, mix=mix).trace.components("update")["activations"]
        for mix in ("drawn", "fullest")
    )
    assert fullest > drawn
    run = Rehearsal(config, shape_config("tiny"), H200, _quiet, samples=False, mix="fullest")
    assert [sum(block.prompt + 39 * block.samples for block in blocks) for blocks in run._fullest_mixes()] == [108, 128]


def test_shares_of_layers_are_traced_where_they_are_whole(shapes, monkeypatch):
    deep = with_layers(shape_config("tiny"), 12)
    monkeypatch.setattr(predicting, "architecture_of", lambda name: deep)
    few_slots = {"actor_rollout_ref__rollout__max_num_seqs": 1}
    for share in (0.25, 0.3):
        config = config_of(memory__recompute=share, **few_slots)
        whole, shallow = (each(config, "deep", H200).phases["update"] for each in (predict, predict_shallow))
        assert shallow == pytest.approx(whole, rel=1e-3), share
