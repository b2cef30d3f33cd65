import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.base.errors import ConfigError
from ullage.config.check import require_runnable
from ullage.config.keys import key_listing
from ullage.config.load import load_config, load_mapping, resolved_yaml
from ullage.config.tree import Config
from ullage.config.yaml_reader import read_text

DATA = Path(__file__).parent.parent / "data" / "config"
SEEDS = sorted(DATA.glob("seed_*.yaml"))
TEMPLATE = Path(__file__).parent.parent.parent / "src" / "ullage" / "config" / "templates" / "grpo.yaml"


def problems(mapping, *overrides):
    """The lines of the error, without the count."""
    with pytest.raises(ConfigError) as caught:
        load_mapping(mapping, overrides)
    assert caught.value.code == 78
    assert caught.value.remedy
    first, *lines = caught.value.cause.split("\n  ")
    assert first == ("1 problem" if len(lines) == 1 else f"{len(lines)} problems") + " in the config"
    return lines


def test_defaults_are_the_tree():
    loaded = load_config(None)
    assert loaded.config == Config()
    assert loaded.notices == []
    assert loaded.given == {}


def test_file_and_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref:\n  actor:\n    optim: {lr: 1e-6}\ntrainer: {seed: 3}\ncritic:\n")
    loaded = load_config(path, ["trainer.seed=4", "+data.train_files=[a.jsonl,b.jsonl]", "trainer.logger=console"])
    assert loaded.config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert loaded.config.trainer.seed == 4
    assert loaded.config.data.train_files == ["a.jsonl", "b.jsonl"]
    assert loaded.config.trainer.logger == ["console"]
    assert loaded.given["trainer"] == {"seed": 4, "logger": "console"}


def test_an_empty_file_is_all_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("# nothing yet\n")
    assert load_config(path).config == Config()


@pytest.mark.parametrize("text", ["- a\n- b\n", "hello", "5"])
def test_top_level_must_be_sections(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run.yaml:1: a config is sections of keys, this is (list|str|int)"):
        load_config(path)


def test_the_file_is_named_in_the_error(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {sav_freq: 5}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.cause == (
        f"1 problem in {path}\n  trainer.sav_freq = 5: unknown key; did you mean trainer.save_freq?"
    )


def test_every_problem_at_once():
    mapping = {
        "trainer": {"sav_freq": 5, "experiment_name": "../x"},
        "actor_rollout_ref": {
            "actor": {"optim": {"lr": "fast"}, "ppo_mini_batch_size": 128, "clip_ratio_c": 1.0},
            "rollout": {"temperature": 0, "top_k": -2},
        },
        "data": {"trust_remote_code": True, "shuffle": "yes"},
        "lr": 1e-6,
    }
    arr = "actor_rollout_ref."
    assert sorted(problems(mapping)) == sorted([
        "trainer.sav_freq = 5: unknown key; did you mean trainer.save_freq?",
        "trainer.experiment_name = '../x': names a folder: letters, digits, _ . - only, a letter or digit first, "
        "at most 80, and no system name",
        f"{arr}actor.optim.lr = 'fast': must be a number at least 0",
        f"{arr}actor.ppo_mini_batch_size = 128: must be at most data.train_batch_size = 64; both count prompts",
        f"{arr}actor.clip_ratio_c = 1.0: must be above 1: it bounds the ratio from above",
        f"{arr}rollout.temperature = 0: must be a number above 0",
        f"{arr}rollout.top_k = -2: must be at least 1, or -1 for no limit",
        "data.trust_remote_code = true: runs code that comes with a model or data set, which Ullage never does; "
        "use a model that `transformers` supports, and set it to false",
        "data.shuffle = 'yes': must be true or false",
        f"lr = 1e-06: unknown key; did you mean {arr}actor.optim.lr?",
    ])  # fmt: skip


def test_a_wrong_key_is_not_reported_again_by_the_rules_that_read_it():
    mapping = {"data": {"train_batch_size": "many"}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 256}}}
    assert problems(mapping) == ["data.train_batch_size = 'many': must be a whole number above 0"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainr.save_freq=5", "trainr.save_freq = 5: unknown key; did you mean trainer.save_freq?"),
        ("trainer.lr=1", "trainer.lr = 1: unknown key; did you mean actor_rollout_ref.actor.optim.lr?"),
        ("data.batch_size=4", "data.batch_size = 4: unknown key; did you mean data.train_batch_size?"),
        ("actor_rollout_ref.actor.grad_clp=1", "actor_rollout_ref.actor.grad_clp = 1: unknown key; "
         "did you mean actor_rollout_ref.actor.optim.clip_grad?"),
        ("zzz.qqq=1", "zzz.qqq = 1: unknown key"),
        ("trainer=5", "trainer = 5: must be a section of keys"),
        ("trainer.seed=1.5", "trainer.seed = 1.5: must be a whole number"),
        ("trainer.seed=true", "trainer.seed = true: must be a whole number"),
        ("trainer.project_name=7", "trainer.project_name = 7: must be text; put it in quotes"),
        ("memory.budget=24", "memory.budget = 24: must be a size with its unit, such as 24GiB, or auto"),
        ("memory.budget=null", "memory.budget = null: must be a size with its unit, such as 24GiB, or auto"),
        ("memory.budget=24GX", "memory.budget = '24GX': must be a size with its unit, such as 24GiB, or auto"),
        ("trainer.logger=[console,wandbb]",
         "trainer.logger[1] = 'wandbb': must be one of 'console', 'tensorboard', 'wandb'"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=big", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu "
         "= 'big': must be a whole number above 0, or 'auto'"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]",
         "actor_rollout_ref.actor.optim.betas = [0.9]: must be a list of 2 items, each a number"),
        ("actor_rollout_ref.actor.optim.lr=.inf",
         "actor_rollout_ref.actor.optim.lr = inf: must be a number at least 0"),
        ("actor_rollout_ref.actor.optim.lr=null",
         "actor_rollout_ref.actor.optim.lr = null: must be a number at least 0"),
        ("reward.max_failure_fraction=2",
         "reward.max_failure_fraction = 2: must be a number at least 0 and at most 1"),
        ("data.columns=x", "data.columns = 'x': must be a mapping of keys to values"),
        ("data.mixing_weights={sums: 1, words: 0}", "data.mixing_weights.words = 0: must be a number above 0"),
        ("data.columns={query: x}",
         "data.columns.query = 'x': names no column of ours; they are prompt, target, source, completion"),
        ("reward=[{named: gsm8k}]", "reward.functions[0].named = 'gsm8k': unknown key; did you mean name?"),
        ("reward=[{name: gsm8k, weight: heavy}]", "reward.functions[0].weight = 'heavy': must be a number"),
        ("reward.overlong_buffer={length: 9, lenght: 4}",
         "reward.overlong_buffer.lenght = 4: unknown key; did you mean length?"),
        ("reward.overlong_buffer.penalty_factor=2",
         "reward.overlong_buffer.length = null: must be a whole number above 0"),
        ("reward.overlong_buffer=128", "reward.overlong_buffer = 128: must be a mapping of keys to values, or null"),
        ("actor_rollout_ref.actor.policy_loss.clip_cov_rati=1",
         "actor_rollout_ref.actor.policy_loss.clip_cov_rati = 1: unknown key; "
         "did you mean actor_rollout_ref.actor.policy_loss.clip_cov_ratio?"),
        ("critic.loss_agg_mode=mean", "critic.loss_agg_mode = 'mean': must be one of 'token-mean', 'token-sum', "
         "'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm', null"),
        ("reward=[{weight: 1}]", "reward.functions[0] = {}: needs a path or a name"),
        ("data.train_files=${oc.env:HOME}/x", "data.train_files = '${oc.env:HOME}/x': a variable that nothing expands "
         "here; write the value itself"),
        ("data.train_files=[$HOME/x]",
         "data.train_files = ['$HOME/x']: a variable that nothing expands here; write the value itself"),
        ("trainer.wandb_api_key=abc123", "trainer.wandb_api_key = ***: looks like a secret, and a config is written "
         "to the run's folder; set it in the environment instead"),
        ("reward=[{name: x, kwargs: {password: abc123}}]", "reward.functions = '***': looks like a secret, and a "
         "config is written to the run's folder; set it in the environment instead"),
    ],
)  # fmt: skip
def test_one_problem(override, line):
    assert problems({}, override) == [line]


def test_values_of_any_length_are_shortened():
    (line,) = problems({"trainer": {"seed": "x" * 500}})
    assert line == "trainer.seed = '" + "x" * 56 + "...: must be a whole number"


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("actor_rollout_ref.actor.optim.lr='1e-6'", lambda c: c.actor_rollout_ref.actor.optim.lr, 1e-6),
        ("actor_rollout_ref.actor.optim.lr=1", lambda c: c.actor_rollout_ref.actor.optim.lr, 1.0),
        ("actor_rollout_ref.actor.optim.betas=[0, '0.95']", lambda c: c.actor_rollout_ref.actor.optim.betas,
         (0.0, 0.95)),
        ("data.train_batch_size=1e3", lambda c: c.data.train_batch_size, 1000),
        ("trainer.total_training_steps=5.0", lambda c: c.trainer.total_training_steps, 5),
        ("data.train_files=x.jsonl", lambda c: c.data.train_files, ["x.jsonl"]),
        ("actor_rollout_ref.rollout.kv_cache_tokens=64", lambda c: c.actor_rollout_ref.rollout.kv_cache_tokens, 64),
        ("data.system_prompt=Answer in ${x}$", lambda c: c.data.system_prompt, "Answer in ${x}$"),
        ("reward.overlong_buffer={length: '64', penalty_factor: 1}", lambda c: c.reward.overlong_buffer.model_dump(),
         {"length": 64, "penalty_factor": 1.0}),
        ("data.columns.prompt=question", lambda c: c.data.columns, {"prompt": "question"}),
    ],
)  # fmt: skip
def test_coercions(override, read, value):
    found = read(load_mapping({}, [override]).config)
    assert found == value
    assert type(found) is type(value)


def test_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_mapping(
        {"reward": "~/r.py"}, ["data.train_files=[~/a.jsonl]", "trainer.default_local_dir=~/runs"]
    ).config
    assert config.data.train_files == ["/home/someone/a.jsonl"]
    assert config.trainer.default_local_dir == "/home/someone/runs"
    assert config.reward.functions[0].path == "/home/someone/r.py"


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("gsm8k", [(None, "gsm8k")]),
        ("my/reward.py", [("my/reward.py", "")]),
        ("my/reward.py:grade", [("my/reward.py", "grade")]),
        ("package.module.function", [(None, "package.module.function")]),
        (["gsm8k", "format"], [(None, "gsm8k"), (None, "format")]),
        ({"functions": "length"}, [(None, "length")]),
        ({"functions": [{"name": "math"}, "r.py"]}, [(None, "math"), ("r.py", "")]),
        ({"functions": {"name": "math"}}, [(None, "math")]),
    ],
)
def test_reward_shorthands(reward, expected):
    functions = load_mapping({"reward": reward}).config.reward.functions
    assert [(function.path, function.name) for function in functions] == expected


def test_algorithm_shorthand_and_override_below_it():
    config = load_mapping({"algorithm": "grpo"}, ["algorithm.norm_adv_by_std_in_grpo=False"]).config
    assert (config.algorithm.name, config.algorithm.norm_adv_by_std_in_grpo) == ("grpo", False)
    assert load_mapping({}, ["algorithm=my_algorithm.py"]).config.algorithm.name == "my_algorithm.py"
    config = load_mapping({"algorithm": {"name": "grpo", "gamma": 0.9}}, ["algorithm=ppo"]).config
    assert (config.algorithm.name, config.algorithm.gamma) == ("ppo", 0.9)
    assert load_mapping({"algorithm": "gspo"}).config.algorithm.name == "gspo"
    assert load_mapping({}, ["algorithm.adv_estimator=rloo"]).config.algorithm.name is None


def test_a_reward_given_as_an_override_leaves_the_rest_of_its_section():
    config = load_mapping({"reward": {"functions": "math", "num_workers": 3}}, ["reward=gsm8k"]).config
    assert ([function.name for function in config.reward.functions], config.reward.num_workers) == (["gsm8k"], 3)


def test_the_mapping_given_is_left_alone():
    mapping = {"trainer": {"seed": 3}, "algorithm": "grpo"}
    load_mapping(mapping, ["trainer.seed=4"])
    assert mapping == {"trainer": {"seed": 3}, "algorithm": "grpo"}


def test_python_values():
    config = load_mapping(
        {"data": {"train_files": (Path("a.jsonl"),)}, "reward": {"functions": [{"path": Path("r.py")}]}}
    ).config
    assert config.data.train_files == ["a.jsonl"]
    assert config.reward.functions[0].path == "r.py"
    assert problems({"data": {"seed": object}})[0].endswith(
        "must be plain: text, numbers, true or false, null, lists and mappings of these"
    )
    assert problems({3: {}}) == ["3 = {}: a key must be text"]
    with pytest.raises(ConfigError, match="a config is a mapping of keys, not list"):
        load_mapping([])


def test_a_key_with_dots_in_its_name_is_the_nested_key():
    assert load_mapping({"trainer.seed": 5, "actor_rollout_ref.rollout": {"n": 3}}).config.trainer.seed == 5
    assert problems({"trainer.seed": 5, "trainer": {"seed": 6}}) == [
        "trainer.seed = 6: given twice, once with dots in its name; keep one"
    ]


def test_numbers_beyond_every_range():
    assert problems({"actor_rollout_ref": {"actor": {"optim": {"lr": 10**5000}}}}) == [
        "actor_rollout_ref.actor.optim.lr = a very long number: must be a number at least 0"
    ]


@pytest.mark.parametrize(
    ("text", "rule"), [("a\0b", "contains a NUL character"), ("a\udcff", "contains bytes that are not UTF-8")]
)
def test_text_that_no_file_can_hold(text, rule):
    (line,) = problems({"trainer": {"project_name": text}})
    assert line.endswith(rule)


def test_keys_inside_free_mappings_are_text():
    (line,) = problems({"reward": [{"name": "x", "kwargs": {"table": {1: 2}}}]})
    assert line.endswith("a key must be text")


def test_a_loaded_config_is_frozen():
    config = load_config(None).config
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.seed = 5


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
def test_yaml_of_the_seeds_loads(path):
    by_file = load_config(path)
    by_mapping = load_mapping(yaml.safe_load(path.read_text()))  # where `1e-6` is text
    assert by_file.config == by_mapping.config
    assert load_mapping(read_text(resolved_yaml(by_file.config), "resolved")).config == by_file.config


def test_basic_ppo_of_the_seeds():
    loaded = load_config(DATA / "seed_basic_ppo.yaml")
    assert loaded.config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert loaded.config.actor_rollout_ref.rollout.n == 5
    assert loaded.config.trainer.logger == ["console", "wandb"]
    assert loaded.notices == [
        "actor_rollout_ref.actor.learning_rate is read as actor_rollout_ref.actor.optim.lr = 1e-06",
        "actor_rollout_ref.model.enable_gradient_checkpointing is read as memory.recompute = 'full'",
        "no effect here (the rollout uses the trainer's own weights): "
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ]


def test_the_template_can_run():
    loaded = load_config(TEMPLATE)
    assert loaded.notices == []
    require_runnable(loaded.config)


def test_resolved_yaml_has_every_key_and_loads_back():
    config = load_mapping(
        {
            "reward": [{"path": "r.py", "kwargs": {"a": ["1e-6", "no", None, 1.5]}}],
            "data": {"system_prompt": "1e3\n#x"},
        },
        [
            "trainer.experiment_name='007'",
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.actor.optim.lr=3e-7",
        ],
    ).config
    text = resolved_yaml(config)
    again = load_mapping(read_text(text, "resolved"))
    assert again.config == config
    assert again.notices == []
    written = read_text(text, "resolved")
    for key in key_listing():
        value = written
        for name in key.path.split("."):
            value = value[name]


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.binary(max_size=4)
nested = st.recursive(
    anything,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
PATHS = [key.path for key in key_listing()] + [
    "trainer", "data", "reward", "algorithm", "actor_rollout_ref", "actor_rollout_ref.actor.kl_coef", "data.truncation",
    "data.filter_overlong_prompts", "data.prompt_key", "custom_reward_function.path",
    "custom_reward_function.reward_kwargs",
    "actor_rollout_ref.rollout.val_kwargs.do_sample", "critic.optim.lr", "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size", "nonsense.key", "later.x", "data.gen_batch_size",
    "algorithm.filter_groups.metric", "reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.max_resp_len", "reward_model.overlong_buffer.enable",
]  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(PATHS), nested, max_size=3))
def test_no_value_raises_anything_but_a_config_error(values):
    with contextlib.suppress(ConfigError):
        config = load_mapping(values).config
        assert load_mapping(read_text(resolved_yaml(config), "resolved")).config == config


@settings(deadline=None)
@given(st.sampled_from(PATHS), st.text(max_size=30))
def test_no_override_raises_anything_but_a_config_error(path, text):
    with contextlib.suppress(ConfigError):
        load_mapping({}, [f"{path}={text}"])


def test_the_room_is_light():
    code = (
        "import sys, ullage.config.load as load; load.load_config(None);"
        "print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
