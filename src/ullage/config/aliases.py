"""verl's and the seeds' names for our keys: renamed ones, and the few whose values mean something else here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from ullage.config import verl_keys
from ullage.config.problems import Problem, shorten
from ullage.config.tree import Data, FilterGroups, Optim
from ullage.config.typed import coerce

_ACTOR = "actor_rollout_ref.actor."
_CRITIC = "critic."
_MODEL = "actor_rollout_ref.model."
_ROLLOUT = "actor_rollout_ref.rollout."

RENAMED = {
    _ACTOR + "grad_clip": _ACTOR + "optim.clip_grad",
    _ACTOR + "max_grad_norm": _ACTOR + "optim.clip_grad",
    _ACTOR + "learning_rate": _ACTOR + "optim.lr",
    _ACTOR + "clip_epsilon": _ACTOR + "clip_ratio",
    _ACTOR + "optim.warmup_style": _ACTOR + "optim.lr_scheduler_type",
    _ACTOR + "optim.lr_decay_style": _ACTOR + "optim.lr_scheduler_type",
    _ACTOR + "model_dtype": _MODEL + "dtype",
    _MODEL + "torch_dtype": _MODEL + "dtype",
    _MODEL + "model_dtype": _MODEL + "dtype",
    _ROLLOUT + "prompt_length": "data.max_prompt_length",
    _ROLLOUT + "response_length": "data.max_response_length",
    _CRITIC + "grad_clip": _CRITIC + "optim.clip_grad",
    _CRITIC + "max_grad_norm": _CRITIC + "optim.clip_grad",
    _CRITIC + "learning_rate": _CRITIC + "optim.lr",
    _CRITIC + "optim.warmup_style": _CRITIC + "optim.lr_scheduler_type",
    _CRITIC + "optim.lr_decay_style": _CRITIC + "optim.lr_scheduler_type",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward_model.model.input_tokenizer": "reward_model.model.tokenizer_path",
    "model.partial_pretrain": _MODEL + "path",
    "reward_model.num_workers": "reward.num_workers",
}
"""Old name: our name. A null leaves our default."""

UNSET_BY_NULL = frozenset(
    {*(role + "optim.lr_warmup_steps" for role in (_ACTOR, _CRITIC)), _ACTOR + "clip_ratio_c", "reward.num_workers"}
)
"""Keys that verl lets be null where ours have a default."""

OTHER_LOGGERS = frozenset({"mlflow", "swanlab", "vemlp_wandb", "clearml", "trackio", "file", "rl_insight"})
_OVERLONG = {"len": "length", "penalty_factor": "penalty_factor"}
_OPTIMIZERS = {
    **dict.fromkeys(("AdamW", "Adam", "adam"), "adamw"),
    **dict.fromkeys(("AdamW8bit", "_AdamW8bit", "PagedAdamW8bit", "adamw_bnb_8bit", "adamw_8bit"), "adamw_8bit"),
    "SGD": "sgd",
}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


@dataclass
class Translation:
    """A config on its way from the names it was given in to ours."""

    leaves: dict[str, Any]
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def move(self, old: str, new: str, value: object) -> None:
        """Give our key the value of another name; two names with two values are a problem."""
        if new in self.leaves and self.leaves[new] != value:
            rule = f"the same as {new}, which is given as {shorten(self.leaves[new])}; keep one of the two"
            self.problems.append(Problem(old, value, rule))
            return
        self.leaves[new] = value
        self.notices.append(f"{old} is read as {new} = {shorten(value)}")


def translate(translation: Translation) -> None:
    """Replace every alias in the leaves by our key."""
    for old, new in RENAMED.items():
        if old in translation.leaves:
            value = translation.leaves.pop(old)
            if value is not None:
                translation.move(old, new, value)
    for key in UNSET_BY_NULL:
        if key in translation.leaves and translation.leaves[key] is None:
            del translation.leaves[key]
    for step in _STEPS:
        step(translation)


def _overlong_prompts(translation: Translation) -> None:
    """Filtering wins over truncation, as it does in verl: what is filtered cannot be truncated."""
    leaves = translation.leaves
    filtered, truncation = "data.filter_overlong_prompts", "data.truncation"
    if filtered not in leaves and truncation not in leaves:
        return
    name = filtered if filtered in leaves else truncation
    filters, side = leaves.pop(filtered, False), leaves.pop(truncation, None)
    if isinstance(filters, bool):
        translation.move(name, "data.overlong_prompts", "drop" if filters else side or "error")
    else:
        translation.problems.append(Problem(filtered, filters, "must be true or false"))


def _columns(translation: Translation) -> None:
    """verl's own column names are found without a map."""
    for old, column, usual in (
        ("data.prompt_key", "prompt", "prompt"),
        ("data.messages_key", "prompt", "messages"),
        ("data.response_key", "completion", "completion"),
        ("data.reward_fn_key", "source", "data_source"),
    ):
        name = translation.leaves.pop(old, None)
        if name in (None, usual):
            continue
        columns = translation.leaves.get("data.columns")
        columns = dict(columns) if isinstance(columns, dict) else {}
        if columns.setdefault(column, name) != name:
            rule = f"the same as data.columns.{column}, which is given as {shorten(columns[column])}; keep one"
            translation.problems.append(Problem(old, name, rule))
            continue
        translation.leaves["data.columns"] = columns
        translation.notices.append(f"{old} is read as data.columns.{column} = {shorten(name)}")


def _kl_coefficient(translation: Translation) -> None:
    """`actor.kl_coef` is a weight of the KL loss, so a positive one also switches that loss on."""
    old = _ACTOR + "kl_coef"
    if old not in translation.leaves:
        return
    value = translation.leaves.pop(old)
    translation.move(old, _ACTOR + "kl_loss_coef", value)
    if isinstance(value, int | float) and value > 0 and _ACTOR + "use_kl_loss" not in translation.leaves:
        translation.move(old, _ACTOR + "use_kl_loss", True)


def _recompute(translation: Translation) -> None:
    """Hugging Face's and verl's switch for gradient checkpointing."""
    old = _MODEL + "enable_gradient_checkpointing"
    value = translation.leaves.pop(old, None)
    if isinstance(value, bool):
        translation.move(old, "memory.recompute", "full" if value else "none")
    elif value not in (None, "auto"):
        translation.problems.append(Problem(old, value, "must be true or false"))


def _switches(translation: Translation) -> None:
    """verl's switches for memory; each has a counterpart that keeps the numbers."""
    for old, new, meaning in (
        (_MODEL + "enable_activation_offload", "memory.activation_offload", "async"),
        (_MODEL + "use_liger", "memory.liger", True),
        (_ACTOR + "fsdp_config.optimizer_offload", "memory.optimizer_state", "streamed"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", "memory.offload_roles", True),
    ):
        if translation.leaves.get(old) is True:
            del translation.leaves[old]
            translation.move(old, new, meaning)


def _truncated_importance(translation: Translation) -> None:
    """verl's first correction: weights of tokens, truncated at this number; -1 was its way to say none."""
    old, new = _ACTOR + "tis_imp_ratio_cap", "algorithm.rollout_correction.rollout_is"
    cap = translation.leaves.pop(old, None)
    if cap is not None and coerce(float, cap) != -1:
        translation.move(old, new, "token")
        translation.move(old, new + "_threshold", cap)


def _greedy_evaluation(translation: Translation) -> None:
    old = _ROLLOUT + "val_kwargs.do_sample"
    sampled = translation.leaves.pop(old, None)
    if sampled is False:
        translation.leaves[_ROLLOUT + "val_kwargs.temperature"] = 0.0
        translation.notices.append(f"{old} = false is read as {_ROLLOUT}val_kwargs.temperature = 0.0")
    elif sampled not in (None, True):
        translation.problems.append(Problem(old, sampled, "must be true or false"))


def _custom_reward(translation: Translation) -> None:
    """verl has one reward function; here it is the first of the list."""
    for parent in ("custom_reward_function", "reward.custom_reward_function"):
        path = translation.leaves.pop(f"{parent}.path", None)
        name = translation.leaves.pop(f"{parent}.name", None)
        prefix = f"{parent}.reward_kwargs"
        kwargs = translation.leaves.pop(prefix, None)
        kwargs = dict(kwargs) if isinstance(kwargs, dict) else {}
        for leaf in [leaf for leaf in translation.leaves if leaf.startswith(prefix + ".")]:
            kwargs[leaf.removeprefix(prefix + ".")] = translation.leaves.pop(leaf)
        if path is None:
            continue
        function = {"path": path, "name": name or "compute_score", "kwargs": kwargs}
        translation.move(f"{parent}.path", "reward.functions", [function])


def _overlong_answers(translation: Translation) -> None:
    """verl's penalty on long answers, under the names of its generations; its limit is the length of an answer."""
    leaves = translation.leaves
    for parent, section in (
        ("reward_model.reward_kwargs", "overlong_buffer_cfg"),
        ("reward.reward_kwargs", "overlong_buffer_cfg"),
        ("reward_model", "overlong_buffer"),
    ):
        prefix = f"{parent}.{section}."
        enabled = leaves.get(prefix + "enable")
        if not isinstance(enabled, bool | None):
            translation.problems.append(Problem(prefix + "enable", enabled, "must be true or false"))
        if enabled is not True:
            continue
        given = {path.removeprefix(prefix): leaves.pop(path) for path in list(leaves) if path.startswith(prefix)}
        buffer = {new: given.pop(old) for old, new in _OVERLONG.items() if given.get(old) is not None}
        translation.move(prefix + "enable", "reward.overlong_buffer", buffer)
        unknown = set(given) - {"enable", "log", *_OVERLONG}
        translation.problems += [Problem(prefix + name, given[name], "unknown key") for name in sorted(unknown)]
        longest = leaves.get("data.max_response_length", Data().max_response_length)
        limit = leaves.pop(f"{parent}.max_resp_len", None)
        if limit not in (None, longest):
            rule = f"the penalty ends at data.max_response_length, which is {shorten(longest)}; leave this out"
            translation.problems.append(Problem(f"{parent}.max_resp_len", limit, rule))


def _generation_batches(translation: Translation) -> None:
    """verl draws gen_batch_size prompts at a time to fill a step; here it is train_batch_size, as often as needed."""
    # Its default of 0 batches is no limit; where nothing is filtered, that says nothing.
    leaves = translation.leaves
    given, limit = leaves.pop("data.gen_batch_size", None), "algorithm.filter_groups.max_num_gen_batches"
    prompts = coerce(int, leaves.get("data.train_batch_size", Data().train_batch_size))
    at_once = coerce(int, given)
    batches = coerce(int, leaves.get(limit, FilterGroups().max_num_gen_batches))
    filtering = verl_keys.filters_groups(leaves)
    if batches == 0 and not filtering:
        leaves.pop(limit)
    if at_once in (None, prompts):
        return
    if not filtering:
        rule = f"differs from data.train_batch_size = {shorten(prompts)}, though no groups are filtered; keep one"
        translation.problems.append(Problem("data.gen_batch_size", given, rule))
    elif not isinstance(at_once, int) or at_once < 1:
        translation.problems.append(Problem("data.gen_batch_size", given, "must be a whole number above 0"))
    elif isinstance(prompts, int) and isinstance(batches, int) and prompts > 0:
        leaves[limit] = -(-batches * at_once // prompts)
        translation.notices.append(
            f"data.gen_batch_size is read as {limit} = {leaves[limit]}: prompts are drawn {prompts} at a time"
        )


def _loggers(translation: Translation) -> None:
    given = translation.leaves.get("trainer.logger")
    loggers = [given] if isinstance(given, str) else given
    if not isinstance(loggers, list):
        return
    dropped = [name for name in loggers if isinstance(name, str) and name in OTHER_LOGGERS]
    if dropped:
        translation.leaves["trainer.logger"] = [name for name in loggers if name not in dropped] or ["console"]
        names = ", ".join(dropped)
        translation.notices.append(f"trainer.logger: {names} dropped; there are console, tensorboard and wandb")


def _sequence_parallel(translation: Translation) -> None:
    """verl multiplies a token limit by the GPUs that share a sequence; here a pass is never shared."""
    for role, key in (
        (_ACTOR, _ACTOR + "ppo_max_token_len_per_gpu"),
        (_ACTOR, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"),
        (_CRITIC, _CRITIC + "ppo_max_token_len_per_gpu"),
    ):
        size, limit = translation.leaves.get(role + "ulysses_sequence_parallel_size"), translation.leaves.get(key)
        if isinstance(size, int) and size > 1 and isinstance(limit, int):
            translation.leaves[key] = limit * size
            translation.notices.append(f"{key} = {limit} is read as {limit * size}: one pass of {size} GPUs in verl")


def _mini_batches_of_the_critic(translation: Translation) -> None:
    """verl can divide a step otherwise for the critic; what only repeats the actor's division needs no word."""
    leaves = translation.leaves
    prompts = leaves.get("data.train_batch_size", Data().train_batch_size)
    for name, default in (("ppo_mini_batch_size", prompts), ("ppo_epochs", 1), ("shuffle", False)):
        if _CRITIC + name in leaves and leaves[_CRITIC + name] in (None, leaves.get(_ACTOR + name) or default):
            del leaves[_CRITIC + name]


def _optimizers(translation: Translation) -> None:
    """Classes of torch, torchao and bitsandbytes; any other is kept for a later release."""
    for path in (_ACTOR + "optim.optimizer", _CRITIC + "optim.optimizer"):
        if path not in translation.leaves:
            continue
        given = translation.leaves.pop(path)
        name = _OPTIMIZERS.get(given, given) if isinstance(given, str) else given
        if name in get_args(Optim.model_fields["optimizer"].annotation):
            translation.leaves[path] = name
        elif name is not None:
            kept = translation.leaves.get("later")
            translation.leaves["later"] = {**(kept if isinstance(kept, dict) else {}), path: given}
            translation.notices.append(f"{verl_keys.OPTIMIZER} (a run does not start with it): {path}")


def _spellings(translation: Translation) -> None:
    """Short names of dtypes."""
    dtype = translation.leaves.get(_MODEL + "dtype")
    if isinstance(dtype, str):
        translation.leaves[_MODEL + "dtype"] = _DTYPES.get(dtype, dtype)


_STEPS: tuple[Callable[[Translation], None], ...] = (
    _overlong_prompts,
    _columns,
    _kl_coefficient,
    _truncated_importance,
    _recompute,
    _switches,
    _greedy_evaluation,
    _custom_reward,
    _overlong_answers,
    _generation_batches,
    _loggers,
    _sequence_parallel,
    _mini_batches_of_the_critic,
    _optimizers,
    _spellings,
)
