"""Whole GRPO steps beside TRL's: the same model, prompts, lengths and recipe, seconds and peak of each.

Ours gets TRL's peak as its budget; how it uses that, the planner chooses.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, TrainerCallback

from ullage.base.garbage import settled_garbage
from ullage.bench.budget import planned
from ullage.bench.clock import free, synchronize
from ullage.bench.fit import Phases, capped
from ullage.bench.report import GIB
from ullage.bench.shapes import shape_config
from ullage.config.settle import PATHS, value_of
from ullage.config.tree import Config
from ullage.model.random_weights import random_module
from ullage.model.target import Target
from ullage.planner.components import CONTEXT
from ullage.run.rehearsal import Rehearsal

OUR_WARM_STEPS = 1
"""Before the one that is measured: kernels are compiled and graphs captured. A row has the seconds of all."""
WORDS = 1000
"""Of a made-up language, a token each: a prompt of so many words has that many tokens."""
PADDING, END = "<pad>", "<end>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A workload; lengths in tokens."""

    shape: str
    micro_batch: int
    """Sequences of TRL's, as large as its memory at this size is known to allow."""
    warm: int = 2
    """Steps of TRL before the one that is measured; a row has the seconds of all."""
    prompts: int = 32
    samples: int = 8
    prompt: int = 128
    response: int = 256


RACES = {
    "0.5B": Race(shape="0.5B", micro_batch=32),
    "1.5B": Race(shape="1.5B", micro_batch=32),
    "7B": Race(shape="7B", micro_batch=8, warm=1),  # each takes twenty seconds
    "tiny": Race(shape="tiny", micro_batch=4, prompts=2, samples=2, prompt=8, response=6),
}
RECIPES: dict[str, Mapping[str, Any]] = {
    "float32 master": {"memory.rounding": "master"},
    "all bf16": {"memory.rounding": "stochastic"},
}
"""What TRL does, and our keys for it: float32 weights under autocast beside a master; bf16 weights and moments, which
lose small updates, beside weights that are rounded stochastically."""


def step(
    race: Race, recipe: str, target: Target, say: Callable[[str], None] = lambda line: None
) -> Iterator[dict[str, Any]]:
    """Rows: TRL's step, where it is installed, and ours; on a GPU, with compiled blocks too."""
    theirs = None
    if importlib.util.find_spec("trl") is None:
        say("trl is not installed: its row is left out")
    else:
        theirs = _row(race, recipe, "trl", *trl_steps(race, target, wide=recipe == "float32 master"))
        yield theirs
    free(target)
    for compiled in (False, True) if target.kind == "cuda" else (False,):
        yield our_row(race, recipe, target, {**RECIPES[recipe], "memory.compile": compiled}, theirs)
        free(target)


def _row(race: Race, recipe: str, name: str, seconds: list[float], peak: int) -> dict[str, Any]:
    return {
        "shape": race.shape,
        "recipe": recipe,
        "contender": name,
        "step_s": round(seconds[-1], 3),
        "steps_s": [round(each, 3) for each in seconds],
        "peak_gib": round(peak / GIB, 2),
        "sequences": race.prompts * race.samples,
    }


def our_row(
    race: Race, recipe: str, target: Target, keys: Mapping[str, Any], theirs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Ours; torch gets no more memory than theirs had allocated."""
    given = {
        "algorithm.name": "grpo",
        "data.train_batch_size": race.prompts,
        "data.max_prompt_length": race.prompt,
        "data.max_response_length": race.response,
        "actor_rollout_ref.rollout.n": race.samples,
        **keys,
    }
    limit = None if theirs is None else theirs["peak_gib"]
    if limit and target.kind == "cuda":
        given["memory.budget"] = f"{int(1024 * limit) + (CONTEXT >> 20)}MiB"
    with tempfile.TemporaryDirectory() as folder:
        made = planned(race.shape, target, folder, given).plan
    with capped(limit, target):
        seconds, phases = our_steps(race, target, made.config)
    name = "ullage, compiled" if keys["memory.compile"] else "ullage"
    row = _row(race, recipe, name, seconds, max(phases.peaks.values()))
    row["phases_s"] = {phase: round(phases.seconds[phase], 3) for phase in ("rollout", "update")}
    row["planned_step_s"] = round(made.step_seconds, 3)
    row["chosen"] = {name: value_of(made.config, path) for name, path in PATHS.items()}
    if theirs is not None:
        row["ratio"] = round(theirs["step_s"] / row["step_s"], 2)
    return row


@settled_garbage()
def our_steps(race: Race, target: Target, config: Config) -> tuple[list[float], Phases]:
    """Seconds of every step, and what its phases took."""
    phases = Phases(target)
    run = Rehearsal(config, shape_config(race.shape), target, phases, every_phase=False)
    seconds = []
    for number in range(1, OUR_WARM_STEPS + 2):
        began = time.perf_counter()
        run.step(number)
        synchronize(target)
        seconds.append(time.perf_counter() - began)
    return seconds, phases


class Clock(TrainerCallback):
    """Seconds of a trainer's steps."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 -- whatever the trainer hands out
        synchronize(self.target)
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        synchronize(self.target)
        self.seconds.append(time.perf_counter() - self._began)


def trl_steps(race: Race, target: Target, *, wide: bool) -> tuple[list[float], int]:
    """The same of TRL's own trainer, sampling with transformers; a step holds its generation and its one update."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    clock, sequences = Clock(target), race.prompts * race.samples
    module = random_module(
        shape_config(race.shape), torch.float32 if wide else target.default_dtype, target.device, implementation="sdpa"
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            max_steps=race.warm + 1,
            bf16=wide and target.kind == "cuda",
            use_cpu=target.kind == "cpu",
            per_device_train_batch_size=race.micro_batch,
            gradient_accumulation_steps=sequences // race.micro_batch,
            num_generations=race.samples,
            max_completion_length=race.response,
            generation_kwargs={"min_new_tokens": race.response},
            gradient_checkpointing=True,
            beta=0.0,
            learning_rate=1e-6,
        )
        prompts = [
            " ".join(f"w{(17 * i + j) % WORDS}" for j in range(race.prompt))
            for i in range(race.prompts * (race.warm + 1))
        ]
        trainer = trl.GRPOTrainer(
            model=module,
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=_tokenizer(),
            callbacks=[clock],
        )
        if target.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(target.device)
        # It prints a summary, and stdout is for results. Garbage is treated as in our own runs.
        with contextlib.redirect_stdout(io.StringIO()), settled_garbage():
            trainer.train()
    peak = torch.cuda.max_memory_allocated(target.device) if target.kind == "cuda" else 0
    return clock.seconds, int(peak)


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    known = {PADDING: 0, END: 1} | {f"w{i}": i + 2 for i in range(WORDS)}
    words = Tokenizer(WordLevel(known, unk_token=PADDING))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=PADDING)
