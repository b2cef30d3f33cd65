"""The choice: what it picks fits, nothing that fits is faster, and every value says why it is there."""

import random
from dataclasses import replace

import pytest

from ullage.config.load import load_mapping
from ullage.config.settle import ACTOR_TOKENS, NUM_SLOTS, PATHS, open_keys, settled, value_of, with_key
from ullage.planner.choose import WORTH, Space, capacity_of, choose, peak_phase
from ullage.planner.fixes import least
from ullage.planner.hardware import find_gpu, parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.planner.seconds import step_seconds

GIB = 2**30
H200 = parse_machine("h200")
STATE, GRADIENTS, RECOMPUTE = "memory.optimizer_state", "memory.gradients", "memory.recompute"
OFFLOAD, ROLES = "memory.activation_offload", "memory.offload_roles"
PLAIN = {STATE: "device", GRADIENTS: "weights", ROLES: False, RECOMPUTE: "none", OFFLOAD: "none"}
"""Every lever let go."""
LORA = {"actor_rollout_ref.model.lora_rank": 16}
QLORA = LORA | {"actor_rollout_ref.model.quantization": "nf4"}
PPO = {"algorithm.name": "ppo"}


def config_of(settings, budget=None):
    given = {"algorithm.name": "grpo"} | settings | ({"memory.budget": budget} if budget else {})
    return load_mapping(given).config


def measured(shape, config, machine):
    """Peak and seconds as a plan of the settled config has them, from nothing that the search worked out."""
    layout = Layout(shape, config, ranks=machine.gpus)
    return peak_phase(layout).total_bytes, sum(step_seconds(layout, machine.gpu).values())


def check_nothing_is_better(shape, config, chosen):
    """With one key changed: a lever let go leaves nothing that fits and is faster, since a plainer choice is taken even
    where it is a little slower; another step of a ladder leaves nothing that is faster by more than a hundredth."""
    space, capacity = Space(shape, config, 1), capacity_of(config, H200)
    peak, seconds = measured(shape, chosen, H200)
    assert peak <= capacity
    pulled = [(key, value) for key, value in PLAIN.items() if value_of(chosen, key) != value]
    for key, value in pulled:
        needs, takes = measured(shape, with_key(chosen, key, value), H200)
        assert needs > capacity or takes > seconds
    # Shares of the layers are steps of a ladder, too; beside offload there are none.
    shares = [] if value_of(chosen, OFFLOAD) != "none" else [eighths / 8 for eighths in range(1, 8)]
    for key, ladder in ((ACTOR_TOKENS, space.tokens), (NUM_SLOTS, space.slots), (RECOMPUTE, shares)):
        for value in ladder:
            needs, takes = measured(shape, with_key(chosen, key, value), H200)
            assert needs > capacity or takes >= seconds / (1 + WORTH)


@pytest.mark.parametrize("size", ["0.5B", "1.5B", "3B", "7B"])
def test_24_gib_and_nothing_else_set(size):
    shape, config = find_shape(f"Qwen2.5-{size}"), config_of({}, "24GiB")
    choice = choose(shape, config, H200)
    assert choice.fits
    check_nothing_is_better(shape, config, settled(config, choice.values))


def test_seven_billion_in_24_gib_keep_state_and_gradients_on_the_host():
    values = choose(find_shape("Qwen2.5-7B"), config_of({}, "24GiB"), H200).values
    assert (values[STATE], values[GRADIENTS], values[RECOMPUTE]) == ("streamed", "host", "full")


@pytest.mark.parametrize(
    ("size", "settings", "budget"),
    [
        ("0.5B", {}, "8GiB"),
        ("0.5B", PPO, "16GiB"),
        ("3B", {}, "40GiB"),
        ("3B", PPO, "24GiB"),
        ("7B", LORA, "24GiB"),
        ("7B", QLORA, "12GiB"),
        ("7B", PPO | {"actor_rollout_ref.actor.use_kl_loss": True}, "80GiB"),
        ("14B", QLORA | PPO | {"critic.model.lora_rank": 16}, "24GiB"),
        ("7B", {"memory.compile": True}, "48GiB"),
        ("1.5B", {"algorithm.name": "sft"}, "24GiB"),
    ],
)
def test_no_lever_let_go_fits_and_is_faster(size, settings, budget):
    shape, config = find_shape(f"Qwen2.5-{size}"), config_of(settings, budget)
    choice = choose(shape, config, H200)
    assert choice.fits
    check_nothing_is_better(shape, config, settled(config, choice.values))


@pytest.mark.parametrize(("settings", "budget"), [({}, "12GiB"), (PPO | {ACTOR_TOKENS: 4096}, "14GiB")])
def test_the_search_finds_what_trying_everything_finds(settings, budget):
    shape, config = find_shape("Qwen2.5-0.5B"), config_of(settings, budget)
    space = Space(shape, config, 1)
    tried = []
    for held in space.held:
        for made in space.made:
            values = {PATHS[name]: value for name, value in (held._asdict() | made._asdict()).items()}
            peak, seconds = measured(shape, settled(config, values), H200)
            if peak <= capacity_of(config, H200):
                levers = sum(value_of(settled(config, values), key) != plain for key, plain in PLAIN.items())
                tried.append((seconds, levers))
    assert len(tried) > 50
    way, fits = space.best(H200.gpu, capacity_of(config, H200), None)
    assert fits
    near = (1 + WORTH) * min(seconds for seconds, _ in tried)
    plainest = min(levers for seconds, levers in tried if seconds <= near)
    fastest = min(seconds for seconds, levers in tried if levers == plainest)
    assert (way.levers, way.seconds) == (plainest, pytest.approx(fastest, abs=2e-6))


def test_a_plainer_choice_is_taken_where_a_lever_is_worth_less_than_a_hundredth():
    space = Space(find_shape("Qwen2.5-3B"), config_of({}), 1)
    ways = [way for way in space.ways(H200.gpu, 20 * GIB, None) if way.fits(None)]
    fastest, (taken, _) = min(ways, key=lambda way: way.seconds), space.best(H200.gpu, 20 * GIB, None)
    assert taken.held == fastest.held
    # Layer inputs that leave make room for passes of twice the tokens, which save little.
    assert (fastest.made.activation_offload, fastest.made.tokens) == ("async", 32768)
    assert (taken.made.activation_offload, taken.made.tokens) == ("none", 16384)
    assert taken.levers == 2 < fastest.levers
    assert fastest.seconds < taken.seconds <= 1.01 * fastest.seconds
    why = choose(space.base.shape, config_of({}, "20GiB"), H200).why
    assert why[OFFLOAD].startswith("it fits; ")


def test_a_layout_with_other_choices_is_the_layout_of_a_config_with_them():
    shape, config = find_shape("Qwen2.5-1.5B"), config_of(PPO | {"actor_rollout_ref.actor.use_kl_loss": True})
    space = Space(shape, config, 2)
    draw = random.Random(1)
    for _ in range(25):
        held, made = draw.choice(space.held), draw.choice(space.made)
        values = {PATHS[name]: value for name, value in (held._asdict() | made._asdict()).items()}
        fresh, made_over = Layout(shape, settled(config, values), ranks=2), space.layout(held, made)
        assert fresh.phases() == made_over.phases()
        assert fresh.host() == made_over.host()
        assert step_seconds(fresh, H200.gpu) == step_seconds(made_over, H200.gpu)


def test_keys_that_were_set_stay_and_no_other_key_changes():
    settings = {STATE: "device", ACTOR_TOKENS: 3000, RECOMPUTE: 0.4, "memory.rounding": "stochastic"}
    config = config_of(settings, "60GiB")
    choice = choose(find_shape("Qwen2.5-3B"), config, H200)
    assert choice.fits
    assert not set(choice.values) & set(settings)
    assert set(choice.values) == set(open_keys(config)) == set(choice.why)
    chosen = settled(config, choice.values)
    assert open_keys(chosen) == []
    for key in choice.values:
        chosen = with_key(chosen, key, value_of(config, key))
    assert chosen == config


def test_what_is_chosen_is_a_config():
    values = choose(find_shape("Qwen2.5-7B"), config_of(PPO, "40GiB"), H200).values
    again = load_mapping(PPO | values).config
    assert {key: value_of(again, key) for key in values} == values


def test_the_same_question_has_the_same_answer():
    shape, config = find_shape("Qwen2.5-3B"), config_of(PPO, "24GiB")
    assert choose(shape, config, H200) == choose(shape, config, H200)


def test_reasons_name_what_another_value_would_need_or_cost():
    shape, config = find_shape("Qwen2.5-7B"), config_of({}, "24GiB")
    choice = choose(shape, config, H200)
    chosen = settled(config, choice.values)
    needs, takes = measured(shape, with_key(chosen, STATE, "device"), H200)
    slower = measured(shape, chosen, H200)[1] - takes
    told = f"update would need {needs / GIB:.1f} GiB of 24.0 GiB with device; this costs +{slower:.1f} s a step"
    assert choice.why[STATE] == told
    roomy = choose(find_shape("Qwen2.5-0.5B"), config_of({}), H200)
    assert roomy.values[STATE] == "device"
    assert roomy.why[STATE] == "it fits; streamed would cost +0.1 s a step"
    assert roomy.why["memory.activation_share"] == "nothing leaves"


def test_where_there_is_room_nothing_is_pulled():
    values = choose(find_shape("Qwen2.5-0.5B"), config_of({}), H200).values
    assert {key: values[key] for key in PLAIN} == PLAIN
    assert (values[ACTOR_TOKENS], values[NUM_SLOTS]) == (32768, 256)


def test_where_nothing_fits_the_choice_needs_least():
    shape, config = find_shape("Qwen2.5-7B"), config_of({}, "16GiB")
    choice = choose(shape, config, H200)
    assert not choice.fits
    assert set(choice.why.values()) == {"nothing fits; with this the run needs least"}
    peak, _ = measured(shape, settled(config, choice.values), H200)
    space = Space(shape, config, 1)
    everything = min(peak_phase(space.layout(held, made)).total_bytes for held in space.held for made in space.made)
    assert peak == everything == least(shape, config, H200)


@pytest.mark.parametrize("settings", [{}, LORA, QLORA, {"memory.gradients": "float32"}])
def test_the_least_of_few_is_the_least_of_all(settings):
    shape, config = find_shape("Qwen2.5-1.5B"), config_of(settings)
    space = Space(shape, config, 1)
    everything = min(peak_phase(space.layout(held, made)).total_bytes for held in space.held for made in space.made)
    assert least(shape, config, H200) == everything


def test_host_memory_limits_what_moves_there():
    shape, config = find_shape("Qwen2.5-3B"), config_of({}, "60GiB")
    assert choose(shape, config, H200).values[STATE] == "streamed"
    poor = replace(H200, host_bytes=40 * GIB)  # 12 bytes of 3.09 B parameters are 34.5 GiB; the process needs 2.5
    choice = choose(shape, config, poor)
    assert choice.fits
    assert choice.values[STATE] == "device"
    assert not choose(shape, config, replace(poor, host_bytes=20 * GIB)).fits


def test_where_the_host_has_too_little_for_anything_the_choice_needs_least_of_it():
    """A file of moments and master, 12 bytes of 7.6 B parameters, is written from host memory whatever is chosen."""
    shape, config, poor = find_shape("Qwen2.5-7B"), config_of({}), replace(H200, host_bytes=4 * GIB)
    choice = choose(shape, config, poor)
    assert not choice.fits
    layout = Layout(shape, settled(config, choice.values))
    host = layout.host()
    assert {name for name, count in host.items() if count} == {"process", "checkpoint"}
    assert host["checkpoint"] == 12 * shape.parameters
    assert peak_phase(layout).total_bytes <= H200.gpu.memory_bytes


def test_what_earlier_runs_measured_counts():
    shape, config = find_shape("Qwen2.5-7B"), config_of({})
    plain, more = (choose(shape, config, H200, scale=scale) for scale in ({}, {"update": 1.5}))
    assert plain.values != more.values
    layout = Layout(shape, settled(config, more.values))
    assert peak_phase(layout).total_bytes < peak_phase(layout, {"update": 1.5}).total_bytes <= H200.gpu.memory_bytes
    assert not choose(shape, config, H200, scale={"rollout": 50.0}).fits


def test_the_budget_is_never_more_than_the_gpu_has():
    assert capacity_of(config_of({}, "24GiB"), H200) == 24 * GIB
    assert capacity_of(config_of({}, "400GiB"), H200) == H200.gpu.memory_bytes
    assert capacity_of(config_of({}), H200) == find_gpu("h200").memory_bytes


def test_ladders_end_at_the_whole_of_what_there_is():
    shape = find_shape("Qwen2.5-0.5B")
    lengths = {"data.max_prompt_length": 500, "data.max_response_length": 1000}
    space = Space(shape, config_of(lengths), 1)
    assert space.tokens == (1500, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
    assert space.slots == (8, 16, 32, 64, 128, 256)
    small = Space(shape, config_of(lengths | {"data.train_batch_size": 2, "actor_rollout_ref.rollout.n": 5}), 1)
    assert small.slots == (8, 10)
    assert small.tokens == (1500, 2048, 3072, 4096, 6144, 8192, 12288)  # 11,000 tokens in all
    assert Space(shape, config_of(lengths | {"data.train_batch_size": 2}), 2).slots == (8,)
    long = Space(shape, config_of(lengths | {"data.max_response_length": 40000}), 1)
    assert long.tokens == (40500,)
