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
    assert config.actor_rollout_ref.rollout.name == given["actor_rollout_ref.rollout.name"]
    # Published scripts use engines of a later release: they load, and a run says so before it starts.
    assert f"{ARR}rollout.name" in [problem.path for problem in not_yet(config)]


@pytest.mark.parametrize(("key", "value"), USUAL.items(), ids=list(USUAL))
def test_every_usual_key_has_a_verdict(key, value):
    overrides = [f"{key}={value}", "data.train_batch_size=1024"]
    if key == "trainer.device":
        overrides[0] = "trainer.device=cuda"
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
        (["critic.optim.lr=1e-5", "critic.model.path=x"],
         "no effect here (there is no critic): critic.optim.lr, critic.model.path"),
        (["algorithm.gamma=0.9"], "no effect here (only read by features that are off): algorithm.gamma"),
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
        "algorithm.filter_groups.enable=false", f"{ARR}model.override_config={{}}",
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
        ([f"{ARR}model.lora_rank=64", f"{ARR}model.lora_alpha=32"], f"{ARR}model.lora_rank",
         "LoRA comes in a later release; set lora_rank=0 for full fine-tuning (and 1 more of its keys)"),
        ([f"{ARR}rollout.multi_turn.enable=True"], f"{ARR}rollout.multi_turn.enable",
         "several turns and tools come in a later release"),
        (["algorithm.filter_groups.enable=True"], "algorithm.filter_groups.enable",
         "filtering groups comes in a later release"),
        (["algorithm.rollout_correction.rollout_is=token"], "algorithm.rollout_correction.rollout_is",
         "rollout correction comes in a later release; the embedded engine has nothing to correct"),
        (["reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"],
         "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
         "the penalty on long answers comes in a later release; put it in a reward function"),
        ([f"{ARR}actor.optim.optimizer=SGD"], f"{ARR}actor.optim.optimizer",
         "optimizers other than AdamW come in a later release"),
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


def test_keys_of_a_critic_matter_when_there_is_one():
    loaded = load_mapping({}, ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-5", "algorithm.lam=0.95"])
    assert loaded.config.later == {"critic.optim.lr": 1e-5, "algorithm.lam": 0.95}
    off = load_mapping({}, ["algorithm.adv_estimator=gae", "critic.enable=false", "critic.optim.lr=1e-5"])
    assert off.config.later == {}


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
