"""Finds a reward function and calls it the way it was written: plain, for verl, or for TRL."""

import difflib
import importlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from ullage.base.errors import ConfigError
from ullage.base.extensions import load_file
from ullage.base.user_code import printable, raised
from ullage.rewards.results import Result, UnusableResult, read_list_result, read_result

BUILT_IN = ("arithmetic", "format", "gsm8k", "length", "math", "reasoning_gym")
SERVICES = ("endpoint", "judge")
"""Rewards behind HTTP, which the run asks itself: rewards/panel.py."""
PLAIN = ("prompt", "response", "target", "source", "extra", "response_length")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids")
# Names under which TRL data sets keep what Ullage calls the target.
TARGET_COLUMNS = ("target", "answer", "solution", "ground_truth", "label")
ACCEPTED = (
    "accepted are score(prompt, response, target) with any of "
    f"{', '.join(PLAIN)}; verl's f(data_source, solution_str, ground_truth, extra_info=None); "
    "TRL's f(prompts, completions, **columns)"
)

Kind = Literal["plain", "verl", "TRL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a function takes its arguments."""

    kind: Kind | None
    accepts: tuple[str, ...]
    """Names of its parameters."""
    required: tuple[str, ...]
    """Those without a default that the config's kwargs do not give."""
    takes_any: bool
    """Whether it has `**kwargs`."""

    def wanted(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those of `values` that the function takes."""
        return values if self.takes_any else {name: value for name, value in values.items() if name in self.accepts}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedReward:
    """A loaded function that is called with a request, whatever its own signature."""

    function: Callable[..., Any]
    signature: Signature
    kwargs: dict[str, Any]
    label: str
    """Its name in metrics."""
    where: str
    """Its name in messages."""
    file: str | None
    """The user's file it comes from."""

    @property
    def description(self) -> str:
        """One line that the run prints."""
        origin = "built in" if self.where in BUILT_IN else self.where
        arguments = ", ".join([*self.signature.accepts, *(["**"] if self.signature.takes_any else [])])
        return f"{self.label}: {origin}, {self.signature.kind} signature ({arguments})"

    def score(self, request: dict[str, Any]) -> Result:
        """Call the function with a request's fields; raises what it raises, or `UnusableResult`."""
        match self.signature.kind:
            case "plain":
                arguments = {name: request[name] for name in PLAIN}
            case "verl":
                arguments = _verl_arguments(request)
            case "TRL":
                arguments = _trl_arguments(request)
        missing = [name for name in self.signature.required if name not in arguments]
        if missing:
            raise UnusableResult(
                f"needs the column '{missing[0]}'; the row has {printable(', '.join(request['extra']))}"
            )
        # The config's kwargs win over a column of the same name.
        value = self.function(**{**self.signature.wanted(arguments), **self.kwargs})
        if inspect.isawaitable(value):
            value = _awaited(value)
        return read_list_result(value) if self.signature.kind == "TRL" else read_result(value)


def _awaited(value: Awaitable[Any]) -> Any:  # noqa: ANN401
    import asyncio  # here, because it costs a third of a worker's start and few rewards need it

    async def wait() -> Any:  # noqa: ANN401
        return await value

    return asyncio.run(wait())


def _verl_arguments(request: dict[str, Any]) -> dict[str, Any]:
    extra = request["extra"]
    return {
        "data_source": request["source"],
        "solution_str": request["response"],
        "ground_truth": request["target"],
        "extra_info": extra["extra_info"] if isinstance(extra.get("extra_info"), dict) else extra,
    }


def _trl_arguments(request: dict[str, Any]) -> dict[str, Any]:
    prompt, response = request["prompt"], request["response"]
    # TRL hands over conversations where the prompt is one.
    completion = [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response
    columns = {name: request["target"] for name in TARGET_COLUMNS}
    columns |= {"source": request["source"], "response_length": request["response_length"]} | request["extra"]
    columns |= {"prompts": prompt, "completions": completion}
    if request.get("response_ids") is not None:
        columns["completion_ids"] = request["response_ids"]
    return {name: [value] for name, value in columns.items()}


def load(path: str | None, name: str, kwargs: dict[str, Any]) -> LoadedReward:
    """The reward that `path`, `name` and `kwargs` of the config describe."""
    if path is not None:
        return _from_file(path, name, kwargs)
    if not name:
        raise ConfigError("a reward function has neither path nor name", f"name one of: {', '.join(BUILT_IN)}")
    if name in BUILT_IN:
        module = importlib.import_module(f"ullage.rewards.{name}")
        return _loaded(module.score, kwargs, label=name, where=name, file=None)
    return _from_module(name, kwargs)


def _from_file(path: str, name: str, kwargs: dict[str, Any]) -> LoadedReward:
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py":
        raise ConfigError(f"a reward function's path is not a Python file: {path}", "give a path that ends in .py")
    try:
        module = load_file(file)
    except ConfigError:
        raise
    except BaseException as error:  # user code at import: anything, SystemExit included
        raise ConfigError(
            f"the reward file {path} cannot be imported: it {raised(error, str(file))}",
            "correct it; it must import on its own",
        ) from error
    function, found = _chosen(module, name, path)
    label = file.stem if found in ("score", "compute_score") else found
    return _loaded(function, kwargs, label=label, where=f"{found} in {file.name}", file=str(file))


def _chosen(module: ModuleType, name: str, path: str) -> tuple[Callable[..., Any], str]:
    """The function called `name`; without a name `score`, `compute_score`, or the only public function of the file."""
    public = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    candidates = [name] if name else ["score", "compute_score", *(public if len(public) == 1 else [])]
    for candidate in candidates:
        function = getattr(module, candidate, None)
        if callable(function):
            return function, candidate
    found = f"the functions in it are: {', '.join(public) or 'none'}"
    if name:
        raise ConfigError(f"the reward file {path} has no function called '{name}'", found)
    raise ConfigError(f"the reward file {path} does not say which function scores", f"set name; {found}")


def _from_module(name: str, kwargs: dict[str, Any]) -> LoadedReward:
    module_name, _, function_name = name.rpartition(".")
    if not module_name or name.endswith(".py"):
        known = (*BUILT_IN, *SERVICES)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"no reward called '{name}'",
            f"{hint}known: {', '.join(known)}; a Python file goes under path; otherwise package.module.function",
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ConfigError:
        raise
    except BaseException as error:  # user code at import
        raise ConfigError(
            f"the reward {name} cannot be imported: it {raised(error, None)}",
            "give package.module.function, importable from the current folder",
        ) from error
    return _loaded(function, kwargs, label=function_name, where=name, file=None)


def _loaded(
    function: Callable[..., Any], kwargs: dict[str, Any], *, label: str, where: str, file: str | None
) -> LoadedReward:
    signature = detect(function, kwargs, where)
    return LoadedReward(function=function, signature=signature, kwargs=kwargs, label=label, where=where, file=file)


def detect(function: Callable[..., Any], kwargs: dict[str, Any], where: str) -> Signature:
    """Which of the three signatures a function has; ConfigError for any other, or for kwargs that do not fit it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"the reward {where} is not a function whose arguments can be read", ACCEPTED) from None
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    signature = Signature(
        kind=_kind(frozenset(named)),
        accepts=tuple(named),
        required=tuple(name for name, p in named.items() if p.default is p.empty and name not in kwargs),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
    if signature.kind is None or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        arguments = ", ".join(str(p) for p in parameters)
        raise ConfigError(f"the reward {where} has an unknown signature: ({arguments})", ACCEPTED)
    _check_arguments(signature, kwargs, where)
    return signature


def _kind(names: frozenset[str]) -> Kind | None:
    if names & {"completions", "completion_ids"}:
        return "TRL"
    if "solution_str" in names:
        return "verl"
    return "plain" if names & {"response", "response_length"} else None


def _check_arguments(signature: Signature, kwargs: dict[str, Any], where: str) -> None:
    """Refuse kwargs that the function cannot take, and arguments that nobody gives."""
    given = {"plain": PLAIN, "verl": VERL, "TRL": TRL, None: ()}[signature.kind]
    own = ", ".join(name for name in signature.accepts if name not in given) or "none"
    for key in kwargs:
        if key in given:
            raise ConfigError(
                f"the reward {where} cannot be given kwargs.{key}: every call sets it", f"remove kwargs.{key}"
            )
        if key not in signature.accepts and not signature.takes_any:
            raise ConfigError(f"the reward {where} has no argument '{key}', which kwargs gives", f"it takes: {own}")
    missing = [name for name in signature.required if name not in given]
    if missing and signature.kind != "TRL":  # TRL's other arguments are columns of the data
        raise ConfigError(
            f"the reward {where} needs the argument '{missing[0]}', which no call gives",
            f"set kwargs.{missing[0]}; {ACCEPTED}",
        )
