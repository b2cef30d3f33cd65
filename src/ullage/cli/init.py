"""`ullage init`: a commented starter config, and on request a reward function to go with it."""

import argparse
import re
import sys
from pathlib import Path

import ullage
from ullage.base.errors import UsageError, WriteError
from ullage.telemetry.run_directory import write_atomically

HELP = "print or write a commented starter config"
_TEMPLATES = Path(ullage.__file__).parent / "config" / "templates"  # by path: importing the room takes 0.3 s
_REWARD_SECTION = re.compile(r"^reward:.*\n(?:(?: .*)?\n)*", re.MULTILINE)
_REWARD_FUNCTION = '''\
"""Scores one response. `target` is the answer column of the data; a higher score is better."""

import re


def score(prompt: str, response: str, target: str) -> float:
    """1 where the last number of the response is the target, else 0."""
    numbers = re.findall(r"-?\\d+(?:\\.\\d+)?", response.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(target))
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = template_names()
    parser.add_argument("template", nargs="?", default="grpo", choices=names, help=f"one of: {', '.join(names)}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there instead of printing; never overwrites")
    parser.add_argument(
        "--with-reward", type=Path, metavar="FILE", help="also write a reward function, and let the config use it"
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    del overrides
    reward: Path | None = arguments.with_reward
    text = (_TEMPLATES / f"{arguments.template}.yaml").read_text(encoding="utf-8")
    if reward is not None:
        if reward.suffix != ".py":
            raise UsageError(f"--with-reward {reward}: not a Python file", "give a name that ends in .py")
        text = with_reward(text, reward)
    for path in filter(None, (arguments.out, reward)):
        _check_new(path)
    if reward is not None:
        write_atomically(reward, _REWARD_FUNCTION)
        print(f"wrote {reward}", file=sys.stderr)
    if arguments.out is None:
        sys.stdout.write(text)
        return 0
    write_atomically(arguments.out, text)
    print(f"wrote {arguments.out}; next: edit it, then `ullage train {arguments.out}`", file=sys.stderr)
    return 0


def template_names() -> list[str]:
    return sorted(path.stem for path in _TEMPLATES.glob("*.yaml"))


def with_reward(template: str, path: Path) -> str:
    """The template with its reward section replaced by the function `score` of a file."""
    quoted = str(path).replace("'", "''")
    section = f"reward:\n  functions:\n    - path: '{quoted}'  # your file\n      name: score\n\n"
    text, count = _REWARD_SECTION.subn(lambda _: section, template, count=1)
    return text if count else f"{template.rstrip()}\n\n{section}"


def _check_new(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise WriteError(f"{path} already exists", "give another name, or remove it first")
    if not path.parent.is_dir():
        raise WriteError(f"{path.parent} is not a folder", "make it first, or give another path")
