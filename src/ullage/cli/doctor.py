"""`ullage doctor`: is everything here, and does this model keep the promises training relies on?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from ullage.base.errors import ConfigError, ModelError, NumericsError

if TYPE_CHECKING:
    from ullage.run.installation import Check

HELP = "check the installation and, given a model, its invariants"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="also check a run, a model folder, a GGUF file or a Hub id")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    del overrides
    from ullage.run.installation import check_installation

    codes: list[int] = []
    told: list[dict[str, object]] = []
    for section, checks, code in (
        ("installation", check_installation(), ConfigError.code),
        ("model", _model_checks(arguments.model), NumericsError.code),
    ):
        for check in checks:
            told.append({"section": section, **asdict(check)})
            if check.status == "fail":
                codes.append(ModelError.code if check.name == "loads" else code)
            if not arguments.json:
                _show(check)
    if arguments.json:
        print(json.dumps({"ok": not codes, "checks": told}, indent=2))
    return codes[0] if codes else 0


def _model_checks(given: str | None) -> Iterator[Check]:
    if given is None:
        return
    from ullage.run.installation import Check
    from ullage.run.locate import locate

    try:
        found = locate(given)
        print(f"loading {found.weights}", file=sys.stderr)
        config = found.config
        from ullage.run.model_checks import check_model

        dtype = "auto" if config is None else config.actor_rollout_ref.model.dtype
        yield from check_model(found.weights, dtype=dtype)
    except ModelError as error:
        yield Check(name="loads", status="fail", detail=error.cause, remedy=error.remedy)


def _show(check: Check) -> None:
    from ullage.telemetry.view import encodable, printable

    text = f"{check.status:<4}  {check.name:<26}  {check.detail}"
    if check.remedy:
        text += f"\n{'':34}-> {check.remedy}"
    print(encodable(printable(text), sys.stdout), flush=True)
