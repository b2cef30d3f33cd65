import pytest

from ullage.base.errors import ConfigError
from ullage.config.aliases import RENAMED
from ullage.config.keys import fields_by_path
from ullage.config.load import load_mapping

ARR = "actor_rollout_ref."


def value_of(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_every_renamed_key_leads_to_a_key_and_is_not_one():
    assert set(RENAMED.values()) <= set(fields_by_path())
    assert set(RENAMED).isdisjoint(fields_by_path())


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        (f"{ARR}actor.grad_clip=0.5", f"{ARR}actor.optim.clip_grad", 0.5),
        (f"{ARR}actor.max_grad_norm=0.5", f"{ARR}actor.optim.clip_grad", 0.5),
        (f"{ARR}actor.learning_rate=1e-5", f"{ARR}actor.optim.lr", 1e-5),
        (f"{ARR}actor.clip_epsilon=0.3", f"{ARR}actor.clip_ratio", 0.3),
        (f"{ARR}actor.kl_coef=0.01", f"{ARR}actor.kl_loss_coef", 0.01),
        (f"{ARR}actor.kl_coef=0.01", f"{ARR}actor.use_kl_loss", True),
        (f"{ARR}actor.kl_coef=0", f"{ARR}actor.use_kl_loss", False),
        (f"{ARR}actor.optim.warmup_style=cosine", f"{ARR}actor.optim.lr_scheduler_type", "cosine"),
        (f"{ARR}actor.model_dtype=bfloat16", f"{ARR}model.dtype", "bfloat16"),
        (f"{ARR}model.torch_dtype=fp32", f"{ARR}model.dtype", "float32"),
        (f"{ARR}rollout.response_length=99", "data.max_response_length", 99),
        (f"{ARR}rollout.val_kwargs.do_sample=False", f"{ARR}rollout.val_kwargs.temperature", 0.0),
        (f"{ARR}rollout.val_kwargs.do_sample=True", f"{ARR}rollout.val_kwargs.temperature", 1.0),
        (f"{ARR}actor.optim.lr_warmup_steps=null", f"{ARR}actor.optim.lr_warmup_steps", -1),
        *(
            (f"{ARR}actor.optim.optimizer={given}", f"{ARR}actor.optim.optimizer", ours)
            for given, ours in (
                ("AdamW", "adamw"),
                ("Adam", "adamw"),
                ("adamw", "adamw"),
                ("null", "adamw"),
                ("AdamW8bit", "adamw_8bit"),
                ("adamw_bnb_8bit", "adamw_8bit"),
                ("SGD", "sgd"),
            )
        ),
        ("critic.optim.optimizer=SGD", "critic.optim.optimizer", "sgd"),
        ("critic.grad_clip=0.5", "critic.optim.clip_grad", 0.5),
        ("critic.learning_rate=1e-4", "critic.optim.lr", 1e-4),
        ("critic.optim.warmup_style=cosine", "critic.optim.lr_scheduler_type", "cosine"),
        ("critic.optim.lr_warmup_steps=null", "critic.optim.lr_warmup_steps", -1),
        ("critic.optim.weight_decay=0", "critic.optim.lr", 1e-5),
        ("trainer.max_actor_ckpt_to_keep=5", "trainer.max_ckpt_to_keep", 5),
        ("trainer.max_actor_ckpt_to_keep=null", "trainer.max_ckpt_to_keep", 2),
        ("data.filter_overlong_prompts=True", "data.overlong_prompts", "drop"),
        ("data.filter_overlong_prompts=False", "data.overlong_prompts", "error"),
        ("data.truncation=left", "data.overlong_prompts", "left"),
        ("data.prompt_key=question", "data.columns", {"prompt": "question"}),
        ("data.prompt_key=prompt", "data.columns", {}),
        ("data.reward_fn_key=kind", "data.columns", {"source": "kind"}),
        ("data.reward_fn_key=data_source", "data.columns", {}),
        ("trainer.logger=[console,mlflow,wandb]", "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=swanlab", "trainer.logger", ["console"]),
        ("data.gen_batch_size=64", "algorithm.filter_groups.max_num_gen_batches", 10),
        ("algorithm.filter_groups.max_num_gen_batches=0", "algorithm.filter_groups.max_num_gen_batches", 10),
        ("reward.reward_model.enable=True", "reward_model.enable", True),
    ],
)
def test_alias(override, path, value):
    assert value_of(load_mapping({}, [override]).config, path) == value


def test_filtering_wins_over_truncation():
    both = ["data.filter_overlong_prompts=True", "data.truncation=left"]
    assert load_mapping({}, both).config.data.overlong_prompts == "drop"
    assert load_mapping({}, [both[0].replace("True", "False"), both[1]]).config.data.overlong_prompts == "left"


def test_kl_coefficient_respects_the_switch():
    config = load_mapping({}, [f"{ARR}actor.kl_coef=0.01", f"{ARR}actor.use_kl_loss=false"]).config
    assert config.actor_rollout_ref.actor.use_kl_loss is False


@pytest.mark.parametrize("parent", ["custom_reward_function", "reward.custom_reward_function"])
def test_custom_reward_function(parent):
    overrides = [f"{parent}.path=r.py", f"{parent}.reward_kwargs.limit=3", f"+{parent}.reward_kwargs.mode=strict"]
    (function,) = load_mapping({}, overrides).config.reward.functions
    assert (function.path, function.name, function.weight) == ("r.py", "compute_score", 1.0)
    assert function.kwargs == {"limit": 3, "mode": "strict"}
    (function,) = load_mapping({}, [*overrides, f"{parent}.name=grade"]).config.reward.functions
    assert function.name == "grade"
    assert load_mapping({}, [f"{parent}.path=null", f"{parent}.name=compute_score"]).config.reward.functions == []


@pytest.mark.parametrize(
    ("parent", "section"),
    [
        ("reward_model.reward_kwargs", "overlong_buffer_cfg"),
        ("reward.reward_kwargs", "overlong_buffer_cfg"),
        ("reward_model", "overlong_buffer"),
    ],
)
def test_penalty_on_long_answers(parent, section):
    names = {"enable": True, "len": 128, "penalty_factor": 0.5, "log": False}
    overrides = [f"+{parent}.{section}.{name}={value}" for name, value in names.items()]
    loaded = load_mapping({}, [*overrides, f"+{parent}.max_resp_len=512"])
    buffer = loaded.config.reward.overlong_buffer
    assert (buffer.length, buffer.penalty_factor) == (128, 0.5)
    assert loaded.notices == [
        f"{parent}.{section}.enable is read as reward.overlong_buffer = {{'length': 128, 'penalty_factor': 0.5}}"
    ]
    off = load_mapping({}, [overrides[0].replace("True", "False"), overrides[1]])
    assert off.config.reward.overlong_buffer is None
    assert off.notices == [f"no effect here (there is no penalty on long answers): {parent}.{section}.len"]


def test_the_penalty_on_long_answers_is_checked():
    parent = "reward_model.reward_kwargs"
    buffer = f"{parent}.overlong_buffer_cfg"
    on = [f"{buffer}.enable=True", f"{buffer}.len=128"]
    for override, line in (
        (
            f"{parent}.max_resp_len=256",
            "256: the penalty ends at data.max_response_length, which is 512; leave this out",
        ),
        (f"{buffer}.length=128", "128: unknown key"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_mapping({}, [*on, override])
        assert caught.value.cause == f"1 problem in the config\n  {override.split('=')[0]} = {line}"
    with pytest.raises(ConfigError, match=r"reward.overlong_buffer.length = null: must be a whole number above 0"):
        load_mapping({}, on[:1])


def test_generation_batches_are_counted_in_steps():
    draws = ["data.train_batch_size=512", "algorithm.filter_groups.max_num_gen_batches=10"]
    for filtered in ("algorithm.filter_groups.enable=True", "algorithm.name=dapo"):
        loaded = load_mapping({}, [*draws, filtered, "data.gen_batch_size=1300"])
        assert loaded.config.algorithm.filter_groups.max_num_gen_batches == 26  # 13,000 prompts in draws of 512
        assert loaded.notices == [
            "data.gen_batch_size is read as algorithm.filter_groups.max_num_gen_batches = 26: "
            "prompts are drawn 512 at a time"
        ]
    with pytest.raises(ConfigError, match=r"data.gen_batch_size = 1300: differs from data.train_batch_size = 512"):
        load_mapping({}, [*draws, "data.gen_batch_size=1300"])
    with pytest.raises(ConfigError, match=r"data.gen_batch_size = 'many': must be a whole number above 0"):
        load_mapping({}, ["algorithm=dapo", "data.gen_batch_size=many"])
    with pytest.raises(ConfigError, match=r"max_num_gen_batches = 0: must be a whole number above 0"):
        load_mapping({}, ["algorithm=dapo", "algorithm.filter_groups.max_num_gen_batches=0"])


def test_token_limits_of_sequence_parallel_are_those_of_one_pass():
    actor = ARR + "actor."
    loaded = load_mapping({}, [f"{actor}ulysses_sequence_parallel_size=2", f"{actor}ppo_max_token_len_per_gpu=600"])
    assert loaded.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 1200
    assert loaded.notices[0] == f"{actor}ppo_max_token_len_per_gpu = 600 is read as 1200: one pass of 2 GPUs in verl"
    critic = ["critic.ulysses_sequence_parallel_size=2", "critic.ppo_max_token_len_per_gpu=2048"]
    assert load_mapping({}, critic).config.critic.ppo_max_token_len_per_gpu == 4096


def test_two_names_with_one_value_agree_and_with_two_values_do_not():
    pair = [f"{ARR}actor.grad_clip=0.5", f"{ARR}actor.optim.clip_grad=0.5"]
    assert load_mapping({}, pair).config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    with pytest.raises(ConfigError) as caught:
        load_mapping({}, [pair[0], f"{ARR}actor.optim.clip_grad=2.0"])
    assert caught.value.cause == (
        f"1 problem in the config\n  {ARR}actor.grad_clip = 0.5: the same as {ARR}actor.optim.clip_grad, "
        "which is given as 2.0; keep one of the two"
    )
    with pytest.raises(ConfigError, match=r"data.prompt_key = 'a': the same as data.columns.prompt.* 'b'; keep one"):
        load_mapping({}, ["data.prompt_key=a", "data.columns.prompt=b"])


def test_what_was_aliased_is_said():
    notices = load_mapping({}, ["trainer.logger=[console,mlflow]", f"{ARR}actor.clip_epsilon=0.3"]).notices
    assert notices == [
        f"{ARR}actor.clip_epsilon is read as {ARR}actor.clip_ratio = 0.3",
        "trainer.logger: mlflow dropped; there are console, tensorboard and wandb",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "data.filter_overlong_prompts",
        f"{ARR}rollout.val_kwargs.do_sample",
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
    ],
)
def test_switches_take_true_or_false(key):
    with pytest.raises(ConfigError, match="= 'maybe': must be true or false"):
        load_mapping({}, [f"{key}=maybe"])
