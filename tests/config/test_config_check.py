import pytest

from ullage.base import extensions
from ullage.base.errors import ConfigError
from ullage.config.check import _UNGROUPED, is_run_name, not_yet, problems, require_runnable
from ullage.config.load import load_mapping
from ullage.config.verl_keys import ALGORITHM_NAMES, ALGORITHMS_LATER

ARR = "actor_rollout_ref."
RUNNABLE = {
    "actor_rollout_ref": {"model": {"path": "m"}},
    "data": {"train_files": "x.jsonl"},
    "reward": "gsm8k",
}


def rules(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_mapping({}, overrides)
    return caught.value.cause.split("\n  ")[1:]


def test_the_defaults_have_no_problem():
    config = load_mapping({}).config
    assert list(problems(config)) == []
    assert not_yet(config) == []


def test_token_limit_holds_one_sequence():
    lengths = ["data.max_prompt_length=100", "data.max_response_length=50"]
    load_mapping({}, [*lengths, f"{ARR}actor.ppo_max_token_len_per_gpu=150"])
    assert rules(*lengths, f"{ARR}actor.ppo_max_token_len_per_gpu=149") == [
        f"{ARR}actor.ppo_max_token_len_per_gpu = 149: must hold one whole sequence: max_prompt_length + "
        "max_response_length = 150; raise it to that, shorten those, or set it to auto"
    ]
    assert len(rules(*lengths, f"{ARR}ref.log_prob_max_token_len_per_gpu=149")) == 1


def test_limits_and_optimizer_of_the_critic_are_checked_like_the_actors():
    lengths = ["data.max_prompt_length=100", "data.max_response_length=50"]
    assert len(rules(*lengths, "critic.ppo_max_token_len_per_gpu=149")) == 1
    assert rules("critic.optim.min_lr_ratio=2") == ["critic.optim.min_lr_ratio = 2.0: must be at most 1: it is a share"]


def test_a_critic_that_shares_the_trunk_has_no_model_of_its_own():
    assert rules("critic.share_actor=true", "critic.model.path=x") == [
        "critic.model.path = 'x': a critic that shares the actor's weights has no model of its own; "
        "leave one of the two out"
    ]


def test_a_critic_can_be_asked_for():
    for overrides in (["critic.enable=true"], ["algorithm.adv_estimator=gae"]):
        assert not_yet(load_mapping(RUNNABLE, overrides).config) == []


def test_mini_batch_is_part_of_the_batch():
    load_mapping({}, ["data.train_batch_size=8", f"{ARR}actor.ppo_mini_batch_size=8"])
    assert rules("data.train_batch_size=8", f"{ARR}actor.ppo_mini_batch_size=9") == [
        f"{ARR}actor.ppo_mini_batch_size = 9: must be at most data.train_batch_size = 8; both count prompts"
    ]


def test_a_group_has_two_members():
    assert rules(f"{ARR}rollout.n=1") == [
        f"{ARR}rollout.n = 1: must be at least 2 for grpo: a sample is compared with the others of its prompt"
    ]
    load_mapping({}, [f"{ARR}rollout.n=1", "algorithm=my_algorithm.py"])


@pytest.mark.parametrize(
    ("override", "name"),
    [
        *((f"algorithm={name}", name) for name in ("dapo", "dr_grpo", "gspo", "rloo", "cispo", "kl_cov", "gdpo")),
        ("algorithm.adv_estimator=rloo_vectorized", "rloo"),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
    ],
)
def test_group_baselines_need_a_group(override, name):
    (line,) = rules(f"{ARR}rollout.n=1", override)
    assert line.startswith(f"{ARR}rollout.n = 1: must be at least 2 for {name}: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=ppo"],
        ["algorithm.adv_estimator=gae"],
        ["algorithm=remax"],
        ["algorithm.adv_estimator=reinforce_plus_plus"],
        ["algorithm=gspo", "algorithm.adv_estimator=gae"],
    ],
)
def test_other_baselines_do_not(overrides):
    load_mapping({}, [f"{ARR}rollout.n=1", *overrides])


def test_the_algorithms_without_groups_exist():
    assert set(_UNGROUPED) < set(extensions.known("algorithms"))


def test_groups_are_filtered_where_there_are_groups():
    on = "algorithm.filter_groups.enable=true"
    load_mapping({}, [on])
    load_mapping({}, [on, "algorithm=my_algorithm.py"])
    reason = "does not compare the samples of a prompt, so no group is without signal; set it to false"
    assert rules(on, "algorithm.adv_estimator=gae") == [f"algorithm.filter_groups.enable = true: ppo {reason}"]
    assert rules("algorithm=dapo", "algorithm.adv_estimator=remax") == [
        f"algorithm.filter_groups.enable = null: remax {reason}"
    ]
    load_mapping({}, ["algorithm=dapo", "algorithm.adv_estimator=remax", on.replace("true", "false")])
    assert rules(on, "algorithm=my_algorithm.py", f"{ARR}rollout.n=1") == [
        f"{ARR}rollout.n = 1: must be at least 2 where groups are filtered: the rewards of one sample cannot differ"
    ]


def test_the_overlong_buffer_is_part_of_an_answer():
    load_mapping({}, ["reward.overlong_buffer.length=512"])
    assert rules("reward.overlong_buffer.length=513") == [
        "reward.overlong_buffer.length = 513: must be at most data.max_response_length = 512: these are its last tokens"
    ]


def test_the_covariance_of_a_candidate_lies_between_two_bounds():
    load_mapping({}, [f"{ARR}actor.policy_loss.clip_cov_lb=4.5"])
    assert rules(f"{ARR}actor.policy_loss.clip_cov_lb=5") == [
        f"{ARR}actor.policy_loss.clip_cov_lb = 5.0: must be below clip_cov_ub = 5.0: "
        "a token is a candidate between the two"
    ]


def test_the_kl_counted_twice_is_said():
    both = ["algorithm.use_kl_in_reward=true", f"{ARR}actor.use_kl_loss=true"]
    assert load_mapping({}, both).notices == [
        f"algorithm.use_kl_in_reward and {ARR}actor.use_kl_loss are both on: the KL is counted twice"
    ]
    assert [load_mapping({}, [one]).notices for one in both] == [[], []]


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        (f"{ARR}rollout.top_k=-2", "must be at least 1, or -1 for no limit"),
        (f"{ARR}rollout.val_kwargs.top_k=-5", "must be at least 1, or -1 for no limit"),
        (f"{ARR}actor.optim.betas=[0.9, 1.0]", "each must be at least 0 and below 1"),
        (f"{ARR}actor.optim.lr_warmup_steps_ratio=1.5", "must be at most 1: it is a share"),
        (f"{ARR}actor.optim.min_lr_ratio=2", "must be at most 1: it is a share"),
        (f"{ARR}actor.optim.lr_warmup_steps=-2", "must be at least 0, or -1 for the ratio"),
        ("trainer.save_freq=0", "must be at least 1, or -1 for never"),
        ("trainer.test_freq=-3", "must be at least 1, or -1 for never"),
        ("data.train_max_samples=0", "must be at least 1, or -1 for no limit"),
        ("trainer.default_local_dir=", "must name a folder"),
    ],
)
def test_one_rule(override, rule):
    (line,) = rules(override)
    assert line.startswith(override.split("=")[0] + " = ")
    assert line.endswith(rule)


@pytest.mark.parametrize("name", ["a", "qwen2.5_7b-grpo", "0", "A" * 80, "console", "com10", "nulls"])
def test_run_names(name):
    assert is_run_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a..b",
        ".hidden",
        "-x",
        "a/b",
        "a\\b",
        "a b",
        "A" * 81,
        "nul",
        "CON",
        "com1.txt",
        "a.",
        "é",
        "a\n",
    ],
)
def test_bad_run_names(name):
    assert not is_run_name(name)


@pytest.mark.parametrize(
    ("override", "path", "remedy"),
    [
        *((f"{ARR}rollout.name={name}", f"{ARR}rollout.name", f"set {ARR}rollout.name=embedded")
          for name in ("vllm", "sglang", "tgi", "trtllm", "hf")),
        ("trainer.nnodes=2", "trainer.nnodes", "set trainer.nnodes=1"),
        *((f"algorithm.adv_estimator={name}", "algorithm.adv_estimator", "this one has cispo, clip_cov, dapo, ")
          for name in ("optimal_token_baseline", "tir_optimal_token_baseline")),
        *((f"{ARR}actor.policy_loss.loss_mode={name}", f"{ARR}actor.policy_loss.loss_mode", "this one has cispo, ")
          for name in ("dppo_tv", "dppo_kl", "dro", "bypass_mode")),
    ],
)  # fmt: skip
def test_not_yet(override, path, remedy):
    config = load_mapping(RUNNABLE, [override]).config
    (problem,) = not_yet(config)
    assert problem.path == path
    assert "later release" in problem.rule
    assert remedy in problem.rule
    with pytest.raises(ConfigError, match="1 problem in the config"):
        require_runnable(config)


def test_an_algorithm_is_a_file_of_ours_or_of_the_user(monkeypatch):
    monkeypatch.setattr("ullage.base.extensions.known", lambda room: ["grpo", "ppo"])
    known = (
        "Known are gae, geo_mean, grpo, grpo_vectorized, ppo, rloo_vectorized, vanilla; "
        "or give a dotted module, or a path that ends in .py"
    )
    for path in ("algorithm.name", "algorithm.adv_estimator", f"{ARR}actor.policy_loss.loss_mode"):
        (problem,) = not_yet(load_mapping(RUNNABLE, [f"{path}=grop"]).config)
        assert str(problem) == f"{path} = 'grop': unknown; did you mean grpo? {known}"
        (problem,) = not_yet(load_mapping(RUNNABLE, [f"{path}=xyz"]).config)
        assert str(problem) == f"{path} = 'xyz': unknown; {known}"
        for name in ("grpo", "vanilla", "mine/algorithm.py", "package.module"):
            assert not_yet(load_mapping(RUNNABLE, [f"{path}={name}"]).config) == []


def test_every_algorithm_of_ours_can_run():
    for name in extensions.known("algorithms"):
        assert not_yet(load_mapping(RUNNABLE, [f"algorithm={name}"]).config) == []


def test_every_name_of_verl_leads_to_a_file():
    assert set(ALGORITHM_NAMES.values()) <= set(extensions.known("algorithms"))
    assert ALGORITHMS_LATER.isdisjoint(extensions.known("algorithms"))


def test_what_a_run_needs():
    require_runnable(load_mapping(RUNNABLE).config)
    with pytest.raises(ConfigError) as caught:
        require_runnable(load_mapping({}, ["trainer.nnodes=2"]).config)
    assert caught.value.cause == (
        "4 problems in the config\n"
        "  actor_rollout_ref.model.path = '': no model; give a Hugging Face folder, a GGUF file or a Hub id\n"
        "  data.train_files = []: no training data; give JSONL, parquet or a Hub id\n"
        "  reward.functions = []: no reward; give a built-in (reward=gsm8k) or your own file (reward=my_reward.py)\n"
        "  trainer.nnodes = 2: several machines come in a later release; set trainer.nnodes=1"
    )


@pytest.mark.parametrize(
    "override",
    [
        "data.curriculum=true", "environment.name=tools", "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.bypass_mode=true",
    ],
)  # fmt: skip
def test_supervised_training_has_no_samples(override):
    with pytest.raises(ConfigError, match=f"{override.split('=')[0]} = .*: supervised training samples nothing"):
        load_mapping({}, ["algorithm=sft", override])


def test_a_cache_holds_at_least_one_sequence():
    lengths = ["data.max_prompt_length=100", "data.max_response_length=28"]
    require_runnable(load_mapping(RUNNABLE, [*lengths, f"{ARR}rollout.kv_cache_tokens=128"]).config)
    with pytest.raises(ConfigError, match=r"kv_cache_tokens = 127: must hold one whole sequence: .* = 128;"):
        require_runnable(load_mapping(RUNNABLE, [*lengths, f"{ARR}rollout.kv_cache_tokens=127"]).config)
