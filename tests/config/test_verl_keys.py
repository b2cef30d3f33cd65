import json
from pathlib import Path

import pytest

from ullage.base.errors import ConfigError
from ullage.config.check import not_yet
from ullage.config.keys import fields_by_path
from ullage.config.load import load_mapping
from ullage.config.verl_keys import LATER, NO_EFFECT, REFUSED

DATA = Path(__file__).parent.parent / "data" / "config"
SCRIPTS = json.loads((DATA / "verl_scripts.json").read_text())
USUAL = json.loads((DATA / "verl_usual_keys.json").read_text())
REFUSED_HERE = {
    "actor_rollout_ref.model.override_config.max_position_embeddings",
    "actor_rollout_ref.model.trust_remote_code",
    "actor_rollout_ref.rollout.over_sample_rate",
    "critic.model.trust_remote_code",
    "data.custom_cls.path",
    "data.sampler.class_name",
    "data.sampler.class_path",
    "data.trust_remote_code",
}
ARR = "actor_rollout_ref."
LEFT = {
    "examples/grpo_trainer/run_qwen2-32b_sglang_fsdp_npu.sh": [f"{ARR}rollout.name", "trainer.nnodes"],
    "examples/rollout_correction/run_with_rollout_corr.sh": [
        f"{ARR}rollout.name", "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.loss_type"
    ],
    "recipe/dapo/run_dapo_qwen2.5_32b.sh": ["trainer.nnodes"],
}  # fmt: skip
"""What stops a published script before it runs, where that is more than its engine."""


def test_there_are_at_least_ten_scripts():
    assert len({script["script"] for script in SCRIPTS}) >= 10


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script["script"].removeprefix("examples/"))
def test_published_scripts_load(script):
    overrides = script["overrides"]
    loaded = load_mapping({}, overrides)
    given = dict(item.lstrip("+").split("=", 1) for item in overrides)
    config = loaded.config
    assert config.data.train_batch_size == int(given["data.train_batch_size"])
    assert config.actor_rollout_ref.model.path.endswith(given["actor_rollout_ref.model.path"].lstrip("~"))
    assert config.actor_rollout_ref.actor.optim.lr == float(given["actor_rollout_ref.actor.optim.lr"])
    assert config.actor_rollout_ref.rollout.name == given.get(f"{ARR}rollout.name", "embedded")
    # Published scripts use engines of a later release: they load, and a run says so before it starts.
    assert [problem.path for problem in not_yet(config)] == LEFT.get(script["script"], [f"{ARR}rollout.name"])


@pytest.mark.parametrize(("key", "value"), USUAL.items(), ids=list(USUAL))
def test_every_usual_key_has_a_verdict(key, value):
    overrides = [f"{key}={value}", "data.train_batch_size=1024"]
    if key == "trainer.device":
        overrides[0] = "trainer.device=cuda"
    if key == "reward_model.reward_kwargs.overlong_buffer_cfg.enable":
        overrides.append("reward_model.reward_kwargs.overlong_buffer_cfg.len=128")
    if key in REFUSED_HERE:
        with pytest.raises(ConfigError, match=key):
            load_mapping({}, overrides)
    else:
        load_mapping({}, overrides)


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (["ray_kwargs.ray_init.num_cpus=4"],
         "no effect here (there is no Ray controller): ray_kwargs.ray_init.num_cpus"),
        ([f"{ARR}model.use_remove_padding=True"],
         f"no effect here (padding is never computed): {ARR}model.use_remove_padding"),
        (["critic.ppo_epochs=3", "critic.optim.num_cycles=2"],
         "no effect here (there is no critic): critic.ppo_epochs, critic.optim.num_cycles"),
        (["algorithm.filter_groups.metric=acc"],
         "no effect here (only read by features that are off): algorithm.filter_groups.metric"),
        ([f"{ARR}actor.fsdp_config.{name}=1" for name in "abcdef"],
         "no effect here (weights are not sharded or offloaded in this release): "
         + ", ".join(f"{ARR}actor.fsdp_config.{name}" for name in "abcd") + " and 2 more"),
    ],
)  # fmt: skip
def test_without_effect_is_said_once(overrides, notice):
    loaded = load_mapping({}, overrides)
    assert loaded.notices == [notice]
    assert loaded.config == load_mapping({}).config


@pytest.mark.parametrize(
    "override",
    [
        f"{ARR}model.lora_rank=0", f"{ARR}model.trust_remote_code=False", f"{ARR}rollout.multi_turn.enable=False",
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable=false", f"{ARR}model.override_config={{}}",
        f"{ARR}rollout.repetition_penalty=1.0",
        "trainer.default_hdfs_dir=null", f"{ARR}actor._target_=verl.workers.config.FSDPActorConfig",
    ],
)  # fmt: skip
def test_what_is_off_needs_no_word(override):
    loaded = load_mapping({}, [override])
    assert (loaded.notices, loaded.config) == ([], load_mapping({}).config)


@pytest.mark.parametrize(
    ("overrides", "path", "rule"),
    [
        ([f"{ARR}model.lora.rank=64", f"{ARR}model.lora.alpha=32"], f"{ARR}model.lora.rank",
         "other settings of adapters come in a later release; there are lora_rank, lora_alpha and target_modules "
         "(and 1 more of its keys)"),
        ([f"{ARR}rollout.multi_turn.enable=True"], f"{ARR}rollout.multi_turn.enable",
         "verl's tool and agent classes do not load here; name an environment instead, such as environment.name=tools"),
        ([f"{ARR}actor.optim.optimizer=Muon"], f"{ARR}actor.optim.optimizer",
         "other optimizers come in a later release; there are adamw, adamw_8bit and sgd"),
        ([f"{ARR}actor.optim.optimizer_impl=torch_optimizer"], f"{ARR}actor.optim.optimizer_impl",
         "other optimizers come in a later release; there are adamw, adamw_8bit and sgd"),
        (["data.image_key=pictures"],
         "data.image_key", "images, video and sound come in a later release; train on text"),
    ],
)  # fmt: skip
def test_a_later_release_loads_and_does_not_run(overrides, path, rule):
    loaded = load_mapping({}, overrides)
    assert set(loaded.config.later) == {item.split("=")[0] for item in overrides}
    assert [(problem.path, problem.rule) for problem in not_yet(loaded.config)] == [(path, rule)]
    assert len(loaded.notices) == 1
    assert "a run does not start with it" in loaded.notices[0]


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ([], ["acc", "score", "seq_reward", "seq_final_reward"]),
        (["reward.overlong_buffer.length=128"], ["acc", "score"]),
        (["algorithm.use_kl_in_reward=true"], ["acc", "score", "seq_reward"]),
    ],
)
def test_groups_are_filtered_by_the_reward(overrides, same):
    key = "algorithm.filter_groups.metric"
    for metric in ("acc", "score", "seq_reward", "seq_final_reward", "f1"):
        loaded = load_mapping({}, ["algorithm.filter_groups.enable=true", *overrides, f"{key}={metric}"])
        if metric in same:
            assert loaded.notices == [f"no effect here (groups are compared by their rewards): {key}"]
            assert not_yet(loaded.config) == []
        else:
            rule = "filtering groups by another number than the whole reward comes in a later release; leave it out"
            assert [(problem.path, problem.rule) for problem in not_yet(loaded.config)] == [(key, rule)]


def test_the_whole_recipe_of_dapo_is_read():
    (script,) = [script for script in SCRIPTS if script["script"].startswith("recipe/dapo/")]
    config = load_mapping({}, script["overrides"]).config
    assert config.reward.overlong_buffer.model_dump() == {"length": 4096, "penalty_factor": 1.0}
    assert config.algorithm.filter_groups.model_dump() == {"enable": True, "max_num_gen_batches": 30}
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.28


@pytest.mark.parametrize("override", ["critic.ppo_epochs=2", "critic.optim.optimizer_impl=mine"])
def test_keys_of_a_critic_matter_when_there_is_one(override):
    key = override.split("=")[0]
    assert list(load_mapping({}, ["algorithm.adv_estimator=gae", override]).config.later) == [key]
    assert load_mapping({}, ["algorithm.adv_estimator=gae", "critic.enable=false", override]).config.later == {}


def test_a_critic_on_the_mini_batches_of_the_actor_needs_no_word():
    same = [f"{role}.ppo_mini_batch_size=256" for role in (ARR + "actor", "critic")]
    loaded = load_mapping({}, ["algorithm=ppo", "data.train_batch_size=1024", "critic.ppo_epochs=1", *same])
    assert (loaded.notices, loaded.config.later) == ([], {})
    alone = load_mapping({}, ["algorithm=ppo", "data.train_batch_size=1024", same[1]])
    assert alone.config.later == {"critic.ppo_mini_batch_size": 256}  # the actor takes all 1024 at once


def test_a_mistyped_key_of_a_critic_is_found():
    with pytest.raises(ConfigError, match=r"critic.optim.lrr = 1: unknown key; did you mean critic.optim.lr\?"):
        load_mapping({}, ["algorithm=ppo", "critic.optim.lrr=1"])


@pytest.mark.parametrize(
    "override",
    [
        f"{ARR}model.trust_remote_code=True", f"{ARR}model.external_lib=my_package", "data.custom_cls.path=x.py",
        f"{ARR}model.override_config.rope_theta=1e6", f"{ARR}rollout.do_sample=False",
        f"{ARR}rollout.repetition_penalty=1.1", "trainer.val_only=True",
    ],
)  # fmt: skip
def test_refused(override):
    with pytest.raises(ConfigError, match=f"1 problem in the config\n  {override.split('=')[0]} = "):
        load_mapping({}, [override])


def test_resuming_is_a_command():
    with pytest.raises(ConfigError, match=r"trainer.resume_from_path = 'runs/x': a config starts a new run"):
        load_mapping({}, ["trainer.resume_mode=resume_path", "trainer.resume_from_path=runs/x"])
    assert load_mapping({}, ["trainer.resume_mode=auto"]).config.later == {}


def test_no_rule_is_about_one_of_our_own_keys_by_its_full_name():
    named = {pattern for rule in (*REFUSED, *LATER, *NO_EFFECT) for pattern in rule.patterns.split()}
    assert named.isdisjoint(fields_by_path())
