import pytest

from ullage.base.errors import ConfigError
from ullage.config.check import is_run_name, not_yet, problems, require_runnable
from ullage.config.load import load_mapping

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
    load_mapping({}, [f"{ARR}rollout.n=1", "algorithm.adv_estimator=gae"])


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        (f"{ARR}rollout.top_k=50", "set it to -1"),
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
        ("critic.enable=true", "critic.enable", "use algorithm=grpo"),
        ("reward_model.enable=true", "reward_model.enable", "score with reward functions"),
        ("trainer.nnodes=2", "trainer.nnodes", "set trainer.nnodes=1"),
        ("algorithm.adv_estimator=rloo", "algorithm.adv_estimator", "set algorithm.adv_estimator=grpo"),
        (f"{ARR}actor.policy_loss.loss_mode=gspo", f"{ARR}actor.policy_loss.loss_mode", "loss_mode=vanilla"),
        ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward", f"{ARR}actor.use_kl_loss=true"),
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
    monkeypatch.setattr("ullage.base.extensions.known", lambda room: ["grpo"])
    (problem,) = not_yet(load_mapping(RUNNABLE, ["algorithm=gspo"]).config)
    assert str(problem) == "algorithm.name = 'gspo': this release has grpo; set algorithm=grpo"
    for name in ("grpo", "mine/algorithm.py", "package.module"):
        assert not_yet(load_mapping(RUNNABLE, [f"algorithm={name}"]).config) == []


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
