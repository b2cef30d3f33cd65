"""Configs of the memory benchmark: the same for a seed, of every kind, and all of them allowed to start."""

from collections import Counter

import pytest

from ullage.base.errors import UsageError
from ullage.bench.memory_draws import (
    DEVICE_SHARE,
    DRAWN,
    HOST_LIMIT,
    MODELS,
    SECONDS_LIMIT,
    Draw,
    capped_first,
    draws,
    seconds,
    step_host_bytes,
)
from ullage.config.check import problems
from ullage.config.settle import open_keys
from ullage.engine.optimizer import check
from ullage.planner.components import CONTEXT
from ullage.planner.hardware import find_gpu
from ullage.planner.model_shape import Shape, find_shape
from ullage.run.levers import optimizer_levers

MEMORY = find_gpu("h200").memory_bytes


@pytest.fixture(scope="module")
def drawn():
    return draws(40, 7, MEMORY)


def test_a_seed_gives_one_draw(drawn):
    again = draws(8, 7, MEMORY)
    assert [draw.key for draw in again] == [draw.key for draw in drawn[:8]]
    assert len({draw.key for draw in drawn}) == 40
    assert draws(1, 8, MEMORY)[0].key != drawn[0].key


def test_every_model_and_method_and_lever_is_there(drawn):
    assert set(Counter(draw.model for draw in drawn)) == set(DRAWN)
    assert Counter(draw.method for draw in drawn) == {"full": 18, "LoRA": 11, "nf4": 6, "int8": 5}
    for key, kinds in {
        "memory.optimizer_state": {"device", "streamed", "host"},
        "memory.gradients": {"weights", "float32", "host"},
        "memory.rounding": {"master", "stochastic"},
        "memory.activation_offload": {"none", "sync", "async"},
        "memory.offload_roles": {True, False},
        "actor_rollout_ref.actor.optim.optimizer": {"adamw", "adamw_8bit", "sgd"},
        "algorithm.name": {"grpo", "ppo"},
    }.items():
        assert {draw.settings[key] for draw in drawn} == kinds
    recompute = {draw.settings["memory.recompute"] for draw in drawn}
    assert {"none", "full", "matmuls"} < recompute
    assert any(isinstance(share, float) for share in recompute)
    tokens = {draw.settings["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] for draw in drawn}
    assert {2048, 16384} <= tokens
    critics = [draw for draw in drawn if draw.settings["algorithm.name"] == "ppo"]
    assert {bool(draw.settings.get("critic.share_actor")) for draw in critics} == {True, False}
    assert any("critic.model.lora_rank" in draw.settings for draw in critics)
    assert any("actor_rollout_ref.actor.use_kl_loss" in draw.settings for draw in drawn)


def test_every_config_may_start_and_leaves_nothing_open(drawn):
    import torch

    for draw in drawn:
        assert list(problems(draw.config)) == []
        assert open_keys(draw.config) == []
        assert draw.config.memory.replay is False
        levers = optimizer_levers(draw.config)
        check(draw.config.actor_rollout_ref.actor.optim, levers, torch.bfloat16)
        check(draw.config.critic.optim, levers, torch.bfloat16)


def test_every_config_is_within_the_limits(drawn):
    for draw in drawn:
        peak = max(phase.allocated_bytes for phase in draw.layout.phases()) + CONTEXT
        assert peak <= DEVICE_SHARE * MEMORY
        assert step_host_bytes(draw.layout) <= HOST_LIMIT
        assert sum(seconds(draw).values()) <= SECONDS_LIMIT


def test_gradients_wait_through_a_second_pass(drawn):
    for draw in drawn:
        data, n = draw.config.data, draw.config.actor_rollout_ref.rollout.n
        total = data.train_batch_size * (data.max_prompt_length + n * (data.max_response_length - 1))
        assert draw.layout.update_pass.tokens < total


def test_a_card_that_holds_none_of_them_is_refused():
    with pytest.raises(UsageError, match=r"no config of 0\.5B, full, fits 1 GiB"):
        draws(1, 7, 1 << 30)


def test_the_key_is_the_configs_own():
    one = Draw(0, "tiny", {"algorithm.name": "grpo", "memory.replay": False})
    assert Draw(5, "tiny", {"memory.replay": False, "algorithm.name": "grpo"}).key == one.key
    assert Draw(0, "0.5B", one.settings).key != one.key
    assert Draw(0, "tiny", {**one.settings, "memory.replay": True}).key != one.key


def test_the_shapes_are_those_of_the_models():
    names = {"Llama 1B": "Llama-3.2-1B", "Llama 8B": "Llama-3.1-8B", "8B": "Qwen3-8B", "7B": "Qwen2.5-7B"}
    for name, known in names.items():
        assert Shape.from_config(MODELS[name]).parameters == find_shape(known).parameters
        assert Shape.from_config(MODELS[name]).kv_bytes_per_token == find_shape(known).kv_bytes_per_token


def test_which_are_capped_depends_on_the_seed_alone(drawn):
    chosen = capped_first(drawn, 7, 20)
    assert len(chosen) == 20
    assert [draw.key for draw in capped_first(drawn[::-1], 7, 5)] == [draw.key for draw in chosen[:5]]
    assert capped_first(drawn, 8, 20) != chosen
