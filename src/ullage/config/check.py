"""Rules between keys, and what a run needs before it starts."""

import difflib
import math
import re
from collections.abc import Iterator

from ullage.base import extensions
from ullage.base.units import bytes_of
from ullage.config import verl_keys
from ullage.config.problems import Problem, raise_if_any
from ullage.config.tree import Config, Memory

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,79}", re.ASCII)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*", re.ASCII)
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(1, 10))}
_COLUMNS = ("prompt", "target", "source", "completion")
REJECTION_RULES = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""What algorithm.rollout_correction.rollout_rs may name; their maths is in maths/correction.py."""
_REMEDY = "set these keys, in the file or as key=value"
SUPERVISED = "sft"
"""The algorithm that learns from given answers and needs no reward."""
_UNGROUPED = ("ppo", "reinforce_plus_plus", "remax", "sft")
"""Algorithms of ours whose advantages do not compare the samples of one prompt."""


def problems(config: Config) -> Iterator[Problem]:
    """Everything that is wrong between keys, each one being right by itself."""
    yield from _batch_sizes(config)
    yield from _groups(config)
    yield from _sampling(config)
    yield from _supervised(config)
    yield from _loss(config)
    yield from _correction(config)
    yield from _optimizer(config)
    yield from _critic(config)
    yield from _adapters(config)
    yield from _curriculum(config)
    yield from _memory(config)
    yield from _counts(config)
    yield from _names(config)
    yield from _tool_time(config)


def _batch_sizes(config: Config) -> Iterator[Problem]:
    actor, data = config.actor_rollout_ref.actor, config.data
    mini = actor.ppo_mini_batch_size
    if mini is not None and mini > data.train_batch_size:
        rule = f"must be at most data.train_batch_size = {data.train_batch_size}; both count prompts"
        yield Problem(_ACTOR + "ppo_mini_batch_size", mini, rule, ("data.train_batch_size",))
    longest = data.max_prompt_length + data.max_response_length
    lengths = ("data.max_prompt_length", "data.max_response_length")
    for path, limit in (
        (_ACTOR + "ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        (
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu,
        ),
        ("critic.ppo_max_token_len_per_gpu", config.critic.ppo_max_token_len_per_gpu),
    ):
        if limit != "auto" and limit < longest:
            rule = f"must hold one whole sequence: max_prompt_length + max_response_length = {longest}"
            yield Problem(path, limit, f"{rule}; raise it to that, shorten those, or set it to auto", lengths)


def _groups(config: Config) -> Iterator[Problem]:
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    given = algorithm.adv_estimator or algorithm.name or "grpo"
    estimator = verl_keys.ALGORITHM_NAMES.get(given, given)
    filtered = algorithm.filter_groups.enable
    if filtered is None:
        filtered = algorithm.name == "dapo"
    read = ("algorithm.name", "algorithm.adv_estimator", "algorithm.filter_groups.enable")
    if filtered and estimator in _UNGROUPED:
        rule = f"{estimator} does not compare the samples of a prompt, so no group is without signal; set it to false"
        yield Problem("algorithm.filter_groups.enable", algorithm.filter_groups.enable, rule, read[:2])
    elif n < 2 and estimator not in _UNGROUPED and estimator in extensions.known("algorithms"):
        rule = f"must be at least 2 for {estimator}: a sample is compared with the others of its prompt"
        yield Problem(_ROLLOUT + "n", n, rule, read)
    elif n < 2 and filtered:
        rule = "must be at least 2 where groups are filtered: the rewards of one sample cannot differ"
        yield Problem(_ROLLOUT + "n", n, rule, read)


def _sampling(config: Config) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    for path, top_k in ((_ROLLOUT + "top_k", rollout.top_k), (_ROLLOUT + "val_kwargs.top_k", rollout.val_kwargs.top_k)):
        if top_k < -1:
            yield Problem(path, top_k, "must be at least 1, or -1 for no limit")


def _supervised(config: Config) -> Iterator[Problem]:
    """Nothing is sampled in training, so what concerns samples has no meaning there."""
    if config.algorithm.name != SUPERVISED:
        return
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    if rollout.temperature != 1:
        rule = "must be 1 for supervised training, which samples nothing; evaluation has val_kwargs.temperature"
        yield Problem(_ROLLOUT + "temperature", rollout.temperature, rule, ("algorithm.name",))
    path = "algorithm.rollout_correction."
    for key, value, off in (
        ("data.curriculum", config.data.curriculum, False),
        ("environment.name", config.environment.name, None),
        (path + "rollout_is", None if correction.rollout_is == "auto" else correction.rollout_is, None),
        (path + "rollout_rs", correction.rollout_rs, None),
        (path + "bypass_mode", correction.bypass_mode, False),
    ):
        if value != off:
            yield Problem(key, value, "supervised training samples nothing; leave it out", ("algorithm.name",))


def _loss(config: Config) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    if actor.clip_ratio_c <= 1:
        yield Problem(_ACTOR + "clip_ratio_c", actor.clip_ratio_c, "must be above 1: it bounds the ratio from above")
    low, high = actor.policy_loss.clip_cov_lb, actor.policy_loss.clip_cov_ub
    if low >= high:
        rule = f"must be below clip_cov_ub = {high}: a token is a candidate between the two"
        yield Problem(_ACTOR + "policy_loss.clip_cov_lb", low, rule, (_ACTOR + "policy_loss.clip_cov_ub",))
    overlong, longest = config.reward.overlong_buffer, config.data.max_response_length
    if overlong is not None and overlong.length > longest:
        rule = f"must be at most data.max_response_length = {longest}: these are its last tokens"
        read = ("reward.overlong_buffer", "data.max_response_length")
        yield Problem("reward.overlong_buffer.length", overlong.length, rule, read)


def _correction(config: Config) -> Iterator[Problem]:
    correction = config.algorithm.rollout_correction
    path = "algorithm.rollout_correction."
    bound = correction.rollout_is_threshold
    if not _is_bound(bound):
        rule = 'must be a number above 0, or two as "low_high", such as "0.5_2.0"'
        yield Problem(path + "rollout_is_threshold", bound, rule)
    names = [name.strip() for name in (correction.rollout_rs or "").split(",") if name.strip()]
    for name in names:
        if name not in REJECTION_RULES:
            rule = f"unknown rule {name}; known are {', '.join(REJECTION_RULES)}"
            yield Problem(path + "rollout_rs", correction.rollout_rs, rule)
    bounds = [bound.strip() for bound in str(correction.rollout_rs_threshold).split(",")]
    if names and not (all(map(_is_bound, bounds)) and len(bounds) in (1, len(names))):
        rule = f'rollout_rs = {", ".join(names)} needs one bound for all or one each: numbers, or "low_high"'
        yield Problem(path + "rollout_rs_threshold", correction.rollout_rs_threshold, rule, (path + "rollout_rs",))


def _is_bound(given: float | str) -> bool:
    parts = str(given).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        return False
    return len(numbers) <= 2 and 0 < numbers[0] <= numbers[-1] < math.inf


def _optimizer(config: Config) -> Iterator[Problem]:
    for path, optim in (
        (_ACTOR + "optim.", config.actor_rollout_ref.actor.optim),
        ("critic.optim.", config.critic.optim),
    ):
        if not all(0 <= beta < 1 for beta in optim.betas):
            yield Problem(path + "betas", list(optim.betas), "each must be at least 0 and below 1")
        for name in ("lr_warmup_steps_ratio", "min_lr_ratio"):
            share = getattr(optim, name)
            if share > 1:
                yield Problem(path + name, share, "must be at most 1: it is a share")
        if optim.lr_warmup_steps < -1:
            rule = "must be at least 0, or -1 for the ratio"
            yield Problem(path + "lr_warmup_steps", optim.lr_warmup_steps, rule)


def _critic(config: Config) -> Iterator[Problem]:
    path = config.critic.model.path
    if config.critic.share_actor and path is not None:
        rule = "a critic that shares the actor's weights has no model of its own; leave one of the two out"
        yield Problem("critic.model.path", path, rule, ("critic.share_actor",))
    if config.critic.share_actor and config.critic.model.lora_rank:
        rule = "a value head on the actor's hidden states has no adapter of its own; leave one of the two out"
        yield Problem("critic.model.lora_rank", config.critic.model.lora_rank, rule, ("critic.share_actor",))


def _memory(config: Config) -> Iterator[Problem]:
    memory = config.memory
    for key, share in (("recompute", memory.recompute), ("activation_share", memory.activation_share)):
        if not isinstance(share, str) and not 0 <= share <= 1:
            yield Problem(f"memory.{key}", share, "a share of the layers must lie between 0 and 1")
    if memory.budget != "auto" and bytes_of(memory.budget) is None:
        wants = Memory.model_fields["budget"].description
        yield Problem("memory.budget", memory.budget, f"must be {wants}")


def _curriculum(config: Config) -> Iterator[Problem]:
    if config.data.curriculum and config.reward_model.enable:
        rule = "a reward model's score has no highest, so no answer is a success; leave one of the two out"
        yield Problem("data.curriculum", True, rule, ("reward_model.enable",))


def _adapters(config: Config) -> Iterator[Problem]:
    model = config.actor_rollout_ref.model
    if (model.lora_rank or config.critic.model.lora_rank) and not model.target_modules:
        rule = "must name a linear layer for an adapter, such as q_proj, or all-linear"
        yield Problem("actor_rollout_ref.model.target_modules", [], rule, ("actor_rollout_ref.model.lora_rank",))
    if model.quantization and not (model.lora_rank or model.lora_adapter_path):
        rule = "only weights that are not trained can be quantised; set lora_rank"
        yield Problem(
            "actor_rollout_ref.model.quantization",
            model.quantization,
            rule,
            ("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_adapter_path"),
        )


def _counts(config: Config) -> Iterator[Problem]:
    trainer, data = config.trainer, config.data
    for path, count in (
        ("trainer.save_freq", trainer.save_freq),
        ("trainer.test_freq", trainer.test_freq),
        ("data.train_max_samples", data.train_max_samples),
        ("data.val_max_samples", data.val_max_samples),
    ):
        if count < 1 and count != -1:
            yield Problem(
                path,
                count,
                "must be at least 1, or -1 for no limit" if "max" in path else "must be at least 1, or -1 for never",
            )


def _names(config: Config) -> Iterator[Problem]:
    name = config.trainer.experiment_name
    if name is not None and not is_run_name(name):
        rule = "names a folder: letters, digits, _ . - only, a letter or digit first, at most 80, and no system name"
        yield Problem("trainer.experiment_name", name, rule)
    if not config.trainer.default_local_dir:
        yield Problem("trainer.default_local_dir", "", "must name a folder")
    for column in config.data.columns:
        if column not in _COLUMNS:
            rule = f"names no column of ours; they are {', '.join(_COLUMNS)}"
            yield Problem(f"data.columns.{column}", config.data.columns[column], rule, ("data.columns",))
    for index, function in enumerate(config.reward.functions):
        if not function.path and not function.name:
            yield Problem(f"reward.functions[{index}]", {}, "needs a path or a name", ("reward.functions",))
        variable = function.kwargs.get("api_key_env")
        if function.path is None and variable is not None and not _VARIABLE.fullmatch(str(variable)):
            rule = "must be the name of an environment variable, in capitals, such as JUDGE_API_KEY"
            # Its value is not shown: it may be the key itself.
            yield Problem(f"reward.functions[{index}].kwargs.api_key_env", "***", rule, ("reward.functions",))
    environment, known = config.environment.name, extensions.known("environments")
    if environment is not None and "." not in environment and environment not in known:
        rule = f"unknown; known are {', '.join(known)}; or give a dotted module, or a path that ends in .py"
        yield Problem("environment.name", environment, rule)


def _tool_time(config: Config) -> Iterator[Problem]:
    limit, seconds = config.reward.timeout_seconds, config.environment.kwargs.get("python_seconds")
    if config.environment.name == "tools" and isinstance(seconds, int | float) and seconds >= limit:
        rule = f"must be less than reward.timeout_seconds = {limit:g}, which is the limit of all calls of a reply"
        yield Problem("environment.kwargs.python_seconds", seconds, rule, ("reward.timeout_seconds",))


def notices(config: Config) -> Iterator[str]:
    """What is allowed, and worth a second look."""
    if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        yield f"algorithm.use_kl_in_reward and {_ACTOR}use_kl_loss are both on: the KL is counted twice"


def is_run_name(name: str) -> bool:
    """Whether a run may be called so on every file system."""
    if not _NAME.fullmatch(name) or ".." in name or name.endswith("."):
        return False
    return name.split(".")[0].lower() not in _RESERVED


# --- before a run starts ---


def not_yet(config: Config) -> list[Problem]:
    """What the config asks for that this release does not have."""
    return [*_roles_not_yet(config), *_methods_not_yet(config), *_correction_not_yet(config), *_keys_not_yet(config)]


def _roles_not_yet(config: Config) -> Iterator[Problem]:
    engine = config.actor_rollout_ref.rollout.name
    if engine != "embedded":
        rule = f"this engine comes in a later release; set {_ROLLOUT}name=embedded"
        yield Problem(_ROLLOUT + "name", engine, rule)
    if config.trainer.nnodes > 1:
        rule = "several machines come in a later release; set trainer.nnodes=1"
        yield Problem("trainer.nnodes", config.trainer.nnodes, rule)


def _methods_not_yet(config: Config) -> Iterator[Problem]:
    for path, name in (
        ("algorithm.name", config.algorithm.name),
        ("algorithm.adv_estimator", config.algorithm.adv_estimator),
        (_ACTOR + "policy_loss.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode),
    ):
        rule = _method_rule(name) if name else None
        if rule:
            yield Problem(path, name, rule)


def _correction_not_yet(config: Config) -> Iterator[Problem]:
    correction = config.algorithm.rollout_correction
    for name in ("rollout_is", "rollout_rs"):
        value = getattr(correction, name)
        if correction.bypass_mode and value not in ("auto", None):
            rule = (
                "compares with the trainer's own log-probs, which bypass_mode does not compute; leave one of them out"
            )
            yield Problem(f"algorithm.rollout_correction.{name}", value, rule)


def _method_rule(name: str) -> str | None:
    """What is wrong with the name of an algorithm or of a part of one: a file of ours, a module or a user's file."""
    known = [*extensions.known("algorithms"), *verl_keys.ALGORITHM_NAMES]
    if "." in name or name in known:
        return None
    listed = ", ".join(sorted(known))
    if name in verl_keys.ALGORITHMS_LATER:
        return f"comes in a later release; this one has {listed}"
    guess = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {guess[0]}? " if guess else ""
    return f"unknown; {meant}Known are {listed}; or give a dotted module, or a path that ends in .py"


def _keys_not_yet(config: Config) -> Iterator[Problem]:
    for reason, paths in verl_keys.groups_of(config.later):
        more = f" (and {len(paths) - 1} more of its keys)" if len(paths) > 1 else ""
        yield Problem(paths[0], config.later[paths[0]], reason + more)


def is_rewarded(config: Config) -> bool:
    """Whether anything says what an answer is worth."""
    return bool(config.reward.functions or config.environment.name) or config.reward_model.enable


def require_runnable(config: Config) -> None:
    """Raise ConfigError unless a run can start: a model, data and a reward are named, and all parts exist."""
    missing = []
    if not config.actor_rollout_ref.model.path:
        rule = "no model; give a Hugging Face folder, a GGUF file or a Hub id"
        missing.append(Problem("actor_rollout_ref.model.path", "", rule))
    if not config.data.train_files:
        missing.append(Problem("data.train_files", [], "no training data; give JSONL, parquet or a Hub id"))
    if not is_rewarded(config) and config.algorithm.name != SUPERVISED:
        rule = "no reward; give a built-in (reward=gsm8k) or your own file (reward=my_reward.py)"
        missing.append(Problem("reward.functions", [], rule))
    if config.reward_model.enable and not config.reward_model.model.path:
        rule = "no reward model; give a folder or a Hub id of a sequence classifier with one label"
        missing.append(Problem("reward_model.model.path", "", rule))
    cache, data = config.actor_rollout_ref.rollout.kv_cache_tokens, config.data
    longest = data.max_prompt_length + data.max_response_length
    if cache != "auto" and cache < longest:
        rule = f"must hold one whole sequence: max_prompt_length + max_response_length = {longest}; or set it to auto"
        missing.append(Problem(_ROLLOUT + "kv_cache_tokens", cache, rule))
    raise_if_any([*missing, *not_yet(config)], "the config", _REMEDY)


def require_known_algorithm(config: Config) -> None:
    """Raise ConfigError where a run would not know what to learn by."""
    raise_if_any([*_methods_not_yet(config)], "the config", _REMEDY)
