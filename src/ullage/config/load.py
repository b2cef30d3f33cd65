"""From a YAML file, a mapping and overrides to one typed, frozen Config, or to a list of everything that is wrong."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.base.errors import ConfigError
from ullage.config import aliases, check, verl_keys, yaml_reader
from ullage.config.aliases import Translation
from ullage.config.keys import fields_by_path, nearest, sections_by_path
from ullage.config.overrides import apply_override
from ullage.config.problems import Problem, looks_secret, raise_if_any
from ullage.config.tree import Config
from ullage.config.typed import typed

REMEDY = "correct these keys; `ullage init` writes a config that works"
SECRET_RULE = "looks like a secret, and a config is written to the run's folder; set it in the environment instead"

_INTERPOLATION = re.compile(r"\$\{[\w.:,/~ -]*\}|^\$\w+(/|$)")
_FREE_TEXT = {"data.system_prompt", "data.apply_chat_template_kwargs", "actor_rollout_ref.model.custom_chat_template"}
"""Where a dollar sign is the user's own."""


@dataclass(frozen=True)
class Loaded:
    """A config, what was said about its keys, and the mapping it came from."""

    config: Config
    notices: list[str]
    given: dict[str, Any]


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read a YAML file (None: only defaults) and apply `a.b=c` overrides."""
    mapping = {} if path is None else yaml_reader.read_file(path)
    if mapping is None:  # an empty file
        mapping = {}
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}:1: a config is sections of keys, this is {type(mapping).__name__}", REMEDY)
    return load_mapping(mapping, overrides, source="the config" if path is None else str(path))


def load_mapping(mapping: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "the config") -> Loaded:
    """The same from a Python mapping, in our names, verl's or the seeds'."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"a config is a mapping of keys, not {type(mapping).__name__}", REMEDY)
    given = {name: _plain(value) for name, value in mapping.items()}
    _expand_shorthands(given, {})
    for item in overrides:
        before = dict(given)
        apply_override(given, item)
        _expand_shorthands(given, before)
    translation = Translation({})
    _flatten(given, "", translation)
    _check_values(translation)
    aliases.translate(translation)
    later = _classify(translation)
    if later:
        kept = translation.leaves.get("later")
        translation.leaves["later"] = {**(kept if isinstance(kept, dict) else {}), **later}
    config, problems = typed(translation.leaves)
    wrong = {problem.path for problem in [*translation.problems, *problems]}
    crossed = [
        problem for problem in check.problems(config) if problem.path not in wrong and wrong.isdisjoint(problem.also)
    ]
    raise_if_any([*translation.problems, *problems, *crossed], source, REMEDY)
    return Loaded(config, list(dict.fromkeys([*translation.notices, *check.notices(config)])), given)


def resolved_yaml(config: Config) -> str:
    """Every key with its value; loads back to an equal config."""
    return yaml_reader.write_text(config.model_dump(mode="json"))


# --- the mapping as given ---


def _plain(value: object) -> object:
    """A copy in plain dicts and lists, so that overrides never reach into the caller's own objects."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, Path) else value


def _expand_shorthands(given: dict[str, Any], before: Mapping[str, Any]) -> None:
    """`algorithm: grpo` and `reward: gsm8k` (or a file, or a list of them) name the section's main key.

    As an override they leave the section's other keys as they were `before`.
    """
    for section, key, kinds in (("algorithm", "name", str), ("reward", "functions", str | list)):
        if isinstance(given.get(section), kinds):
            kept = before.get(section)
            given[section] = {**(kept if isinstance(kept, dict) else {}), key: given[section]}
    reward = given.get("reward")
    if isinstance(reward, dict) and "functions" in reward:
        functions = reward["functions"]
        functions = [functions] if isinstance(functions, str | dict) else functions
        if isinstance(functions, list):
            reward["functions"] = [_reward_function(item) if isinstance(item, str) else item for item in functions]


def _reward_function(text: str) -> dict[str, str]:
    """`file.py`, `file.py:function`, a built-in name or package.module.function."""
    if text.endswith(".py"):
        return {"path": text}
    path, separator, name = text.rpartition(".py:")
    return {"path": path + ".py", "name": name} if separator else {"name": text}


def _flatten(mapping: Mapping[Any, Any], prefix: str, translation: Translation) -> None:
    """Leaves by key path. A key that holds a mapping of its own (`columns`, `kwargs`) is a leaf; a section is not."""
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        if name == "_target_":  # the class of verl's that hydra would build from a section
            continue
        if not isinstance(name, str):
            translation.problems.append(Problem(path, value, "a key must be text"))
        elif path in fields_by_path():
            _set_leaf(translation, path, value)
        elif isinstance(value, Mapping) and (value or path in sections_by_path()):
            _flatten(value, path + ".", translation)
        elif path not in sections_by_path():
            _set_leaf(translation, path, value)
        elif value is not None:  # `critic:` with nothing under it leaves the defaults
            translation.problems.append(Problem(path, value, "must be a section of keys"))


def _set_leaf(translation: Translation, path: str, value: object) -> None:
    if path in translation.leaves:
        translation.problems.append(Problem(path, value, "given twice, once with dots in its name; keep one"))
    translation.leaves[path] = value


def _check_values(translation: Translation) -> None:
    """Refuse values that can only be a mistake, wherever in a key's value they are."""
    for path, value in list(translation.leaves.items()):
        rule = _value_rule(value, free=path in _FREE_TEXT)
        if rule:
            translation.problems.append(Problem(path, value, rule))
            del translation.leaves[path]


def _value_rule(value: object, free: bool) -> str | None:
    if isinstance(value, str):
        return _text_rule(value, free)
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            return "a key must be text"
        return next(filter(None, (_value_rule(inner, free) for item in value.items() for inner in item)), None)
    if isinstance(value, list):
        return next(filter(None, (_value_rule(inner, free) for inner in value)), None)
    if value is None or isinstance(value, bool | int | float):
        return None
    return "must be plain: text, numbers, true or false, null, lists and mappings of these"


def _text_rule(text: str, free: bool) -> str | None:
    if not free and _INTERPOLATION.search(text):
        return "a variable that nothing expands here; write the value itself"
    if "\0" in text:
        return "contains a NUL character"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "contains bytes that are not UTF-8"
    return None


# --- keys that are not ours ---


def _classify(translation: Translation) -> dict[str, object]:
    """Take out every key that is not in the tree, each with its verdict; returns those of a later release."""
    later: dict[str, object] = {}
    unused: dict[str, list[str]] = {}
    leaves = dict(translation.leaves)
    for path, value in leaves.items():
        if _holds_secret(path, value):
            translation.problems.append(Problem(path, "***", SECRET_RULE))
            del translation.leaves[path]
        elif path not in fields_by_path():
            del translation.leaves[path]
            _judge(path, value, leaves, translation, later, unused)
    translation.notices += [
        f"{reason} (a run does not start with it): {_listed(paths)}" for reason, paths in verl_keys.groups_of(later)
    ]
    translation.notices += [f"no effect here ({reason}): {_listed(paths)}" for reason, paths in unused.items()]
    return later


def _judge(
    path: str,
    value: object,
    leaves: verl_keys.Leaves,
    translation: Translation,
    later: dict[str, object],
    unused: dict[str, list[str]],
) -> None:
    """The first table with a rule for the key and its value decides; a value that means "off" needs no word."""
    refused, coming, idle = (
        verl_keys.rule_for(path, leaves, table) for table in (verl_keys.REFUSED, verl_keys.LATER, verl_keys.NO_EFFECT)
    )
    if refused and value not in refused.unless:
        translation.problems.append(Problem(path, value, refused.reason))
    elif coming and value not in coming.unless:
        later[path] = value
    elif idle and value is not None and value not in idle.unless:
        unused.setdefault(idle.reason, []).append(path)
    elif not (refused or coming or idle):
        guess = nearest(path, tuple(aliases.RENAMED))
        guess = aliases.RENAMED.get(guess, guess) if guess else None
        rule = f"unknown key; did you mean {guess}?" if guess else "unknown key"
        translation.problems.append(Problem(path, value, rule))


def _listed(paths: list[str]) -> str:
    """Some keys of a family, so that a long config does not bury its notices."""
    shown = ", ".join(paths[:4])
    return shown if len(paths) <= 4 else f"{shown} and {len(paths) - 4} more"


def _holds_secret(path: str, value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_secret(str(name), inner) for name, inner in value.items())
    if isinstance(value, list):
        return any(_holds_secret("", inner) for inner in value)
    return value is not None and looks_secret(path)
