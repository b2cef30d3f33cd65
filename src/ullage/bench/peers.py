"""The update beside others': a plain padded Hugging Face step and TRL's, on one batch, in one process, over one model.

All contenders train the same weights and add to the same gradients, so any of them can run at any time: what is timed
is forward and backward alone. Each peer is first tried with many settings; then the best ones and ours take turns.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ullage.algorithms import Algorithm
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.batch.stages import TrainBatch, pad_rows
from ullage.bench.batches import PROMPT, random_batch
from ullage.bench.clock import Measured, free, measure
from ullage.bench.report import GIB
from ullage.bench.shapes import shape_config, training_flops
from ullage.bench.update import PEAK_TFLOPS, Workload, bench_config, lengths_of
from ullage.engine.replay import free as empty_cache
from ullage.engine.replay import is_out_of_memory
from ullage.model import attention
from ullage.model.language_model import LanguageModel
from ullage.model.random_weights import language_model, random_module
from ullage.model.target import Target
from ullage.run.levers import optimizer_levers, prepare_layers
from ullage.workers.actor import Actor

SEQUENCES = (2, 4, 8, 16)
"""Of a peer's micro-batch."""
SLOWER = 1.08
"""Than the best so far: a larger micro-batch that is, with its padding, is the last that is tried."""
LEAST_GENERATED = 2
"""TRL's smallest generation batch: a group has at least two samples."""
COMMON_GROUP = 8
"""TRL's default group."""

# An optimizer without state: it is not timed here, and there is room for activations.
STATELESS = {"actor_rollout_ref.actor.optim.optimizer": "sgd", "memory.rounding": "stochastic"}
Say = Callable[[str], None]


@dataclass(slots=True)
class Contender:
    """One way to compute the batch's gradient."""

    name: str
    settings: str
    work: Callable[[], None]
    """Forward and backward over the whole batch, added to the gradients that are there."""
    prepare: Callable[[], None] = lambda: None
    """Before it works, and not timed."""
    measured: list[Measured] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(each.seconds for each in self.measured)


class Trial(NamedTuple):
    """Settings of a peer."""

    sequences: int
    """Of a micro-batch."""
    padded: int
    """Sequences that are padded to the longest of them."""
    recompute: bool
    autocast: bool = False

    def __str__(self) -> str:
        words = [f"micro_batch={self.sequences}", f"padded_over={self.padded}"]
        words += ["checkpointing"] * self.recompute + ["autocast"] * self.autocast
        return ", ".join(words)


def peers(
    workload: Workload, target: Target, *, rounds: int = 1, repeat: int = 2, say: Say = lambda line: None
) -> Iterator[dict[str, Any]]:
    """Rows of one shape: ours, the plain step and TRL's, each at its best, and others of TRL's settings beside it."""
    free(target)  # what the shape before held
    arena = Arena(workload, target, say)
    chosen = [*arena.ours(), *arena.plain(), *arena.trl()]
    for contender in chosen:
        contender.measured.clear()
    for _ in range(rounds):
        for contender in chosen:
            arena.time(contender, repeat)
    theirs = [contender for contender in chosen if contender.name == "trl"]
    best = min(theirs, key=lambda contender: contender.seconds, default=None)
    for contender in chosen:
        yield arena.row(contender, best)


class Arena:
    """The batch, the weights, and everyone who computes a gradient with them."""

    def __init__(self, workload: Workload, target: Target, say: Say) -> None:
        config = bench_config(workload, STATELESS)
        self.workload, self.target, self.say = workload, target, say
        self.lengths = lengths_of(workload)
        self.module = random_module(
            shape_config(workload.shape), target.default_dtype, target.device, implementation="sdpa"
        )
        self.algorithm: Algorithm = compose(config)
        self.batch = random_batch(self.lengths, config, self.algorithm, seed=workload.seed)
        self.actor = Actor(
            self._model(compiled=False),
            config.actor_rollout_ref.actor,
            Limits(max_tokens=workload.micro_batch, share_prefix=False),
            Solo(),
            temperature=1.0,
            levers=optimizer_levers(config),
        )

    def ours(self) -> list[Contender]:
        """Blocks as they are, and on CUDA compiled: for a CPU that takes a minute and says nothing."""
        budget = f"micro_batch={self.workload.micro_batch} tokens"
        models = {"eager": self.actor.model}
        if self.target.kind == "cuda":
            models["compiled"] = self._model(compiled=True)

        def work() -> None:
            for loss, _ in self.actor.losses(self.batch, self.algorithm):
                loss.backward()

        contenders = [
            Contender("ullage", f"{budget}, {name}", work, partial(setattr, self.actor, "model", model))
            for name, model in models.items()
        ]
        return [contender for contender in contenders if self.tried(contender)]

    def plain(self) -> list[Contender]:
        """All logits of a padded micro-batch at once; the best of all settings."""
        module = twin(self.module, "sdpa")
        found = self._fitting(lambda size: size, partial(self._plain, module))
        return [found[best]] if (best := _fastest(found)) else []

    def trl(self) -> list[Contender]:
        """Its own loss over batches as its own generation would hand them on.

        It pads a generation batch to its longest sample and then cuts it into micro-batches. The smallest generation
        batches pad least, though nobody would sample so: the best of all settings with those, then how it does with
        generation batches of a common group and of the whole batch, and under autocast.
        """
        if importlib.util.find_spec("trl") is None:
            self.say("trl is not installed: its rows are left out")
            return []
        with tempfile.TemporaryDirectory() as folder:
            trainer = trl_trainer(twin(self.module, "sdpa"), folder, self.target)
        found = self._fitting(lambda size: max(size, LEAST_GENERATED), partial(self._trl, trainer))
        best = _fastest(found)
        if best is None:
            return []
        count = len(self.lengths)
        others = [best._replace(padded=min(max(best.sequences, size), count)) for size in (COMMON_GROUP, count)]
        if self.target.kind == "cuda":
            others.append(best._replace(autocast=True))
        varied = [self._trl(trainer, trial) for trial in dict.fromkeys(others) if trial not in found]
        return [found[best], *(contender for contender in varied if self.tried(contender))]

    def _fitting(self, padded: Callable[[int], int], make: Callable[[Trial], Contender]) -> dict[Trial, Contender]:
        """Ever larger micro-batches until they get slower; recomputing, which only costs time, where one needs it."""
        found: dict[Trial, Contender] = {}
        for size in self._sizes():
            for recompute in (False, True):
                trial = Trial(size, padded(size), recompute)
                contender = make(trial)
                if self.tried(contender):
                    found[trial] = contender
                    break
            best = min((contender.seconds for contender in found.values()), default=0.0)
            if found and contender.measured and contender.seconds > SLOWER * best:
                break
        return found

    def tried(self, contender: Contender) -> bool:
        """Whether it fits; if so it has been timed once."""
        try:
            self.time(contender, 1)
        except RuntimeError as error:  # a library's workspace may be what does not fit
            if not is_out_of_memory(error):
                raise
            self.say(f"{contender.name} ({contender.settings}): out of memory")
            return False
        self.say(f"{contender.name} ({contender.settings}): {contender.seconds:.4f} s")
        return True

    def time(self, contender: Contender, repeat: int) -> None:
        """Each begins with an empty allocator and a pass that does not count."""
        self.actor.optimizer.zero_grad()
        empty_cache()
        contender.prepare()
        contender.measured.append(measure(contender.work, self.target, repeat=repeat))

    def row(self, contender: Contender, best: Contender | None) -> dict[str, Any]:
        """`ratio`: tokens a second against TRL's best."""
        tokens, seconds = sum(self.lengths), contender.seconds
        flops = training_flops(self.module, self.lengths, tokens - PROMPT * len(self.lengths))
        return {
            "shape": self.workload.shape,
            "contender": contender.name,
            "settings": contender.settings,
            "tokens": tokens,
            "sequences": len(self.lengths),
            "seed": self.workload.seed,
            "update_s": round(seconds, 4),
            "tokens_per_s": round(tokens / seconds),
            "mfu_percent": round(100 * flops / seconds / (PEAK_TFLOPS * 1e12), 1),
            "peak_gib": round(max(each.peak_bytes for each in contender.measured) / GIB, 2),
            "ratio": None if best is None else round(best.seconds / seconds, 3),
        }

    def _sizes(self) -> list[int]:
        return [size for size in SEQUENCES if size <= len(self.lengths)]

    def _model(self, *, compiled: bool) -> LanguageModel:
        model = language_model(twin(self.module, attention.NAME), self.target, self.target.default_dtype)
        keys = {"memory.recompute": "none", "memory.compile": compiled}
        prepare_layers(model, bench_config(self.workload, keys))
        return model

    def _plain(self, module: PreTrainedModel, trial: Trial) -> Contender:
        parts = padded_batches(self.batch, trial, self.target)
        total = sum(self.lengths) - PROMPT * len(self.lengths)

        def work() -> None:
            for part in parts:
                plain_loss(module, part, total).backward()

        return Contender("hugging face", str(trial), work, partial(checkpoint, module, trial.recompute))

    def _trl(self, trainer: Any, trial: Trial) -> Contender:  # noqa: ANN401 -- trl's own
        parts = padded_batches(self.batch, trial, self.target)
        total = torch.tensor(sum(self.lengths) - PROMPT * len(self.lengths), device=self.target.device)
        inputs = [part._asdict() | {"num_items_in_batch": total} for part in parts]
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation

        def work() -> None:
            for each in inputs:
                with torch.autocast(self.target.kind, torch.bfloat16, enabled=trial.autocast):
                    loss = trainer.compute_loss(trainer.model, each)
                trainer.accelerator.backward(loss)

        return Contender("trl", str(trial), work, partial(checkpoint, trainer.model, trial.recompute))


class Padded(NamedTuple):
    """A micro-batch of B sequences, under the names that TRL gives them; prompts are equally long."""

    prompt_ids: Tensor
    """[B, P]"""
    prompt_mask: Tensor
    completion_ids: Tensor
    """[B, T]"""
    completion_mask: Tensor
    advantages: Tensor
    """[B]"""


def padded_batches(batch: TrainBatch, trial: Trial, target: Target) -> list[Padded]:
    """The batch in its own order, padded over so many sequences, then cut into micro-batches."""
    parts = []
    count = len(batch.responses)
    for start in range(0, count, trial.padded):
        whole = range(start, min(start + trial.padded, count))
        width = max(len(batch.responses[i]) for i in whole)
        parts += [
            _padded(batch, whole[first : first + trial.sequences], width, target)
            for first in range(0, len(whole), trial.sequences)
        ]
    return parts


def _padded(batch: TrainBatch, members: Sequence[int], width: int, target: Target) -> Padded:
    prompts = [batch.prompts[int(batch.group_N[i])] for i in members]
    responses = [batch.responses[i] for i in members]
    ids = torch.tensor(prompts)
    parts = Padded(
        prompt_ids=ids,
        prompt_mask=torch.ones_like(ids),
        completion_ids=pad_rows(responses, width=width, dtype=torch.long),
        completion_mask=pad_rows([[1] * len(row) for row in responses], width=width, dtype=torch.long),
        advantages=batch.advantages_NT[list(members), 0].float(),
    )
    return Padded(*(part.to(target.device) for part in parts))


def plain_loss(module: PreTrainedModel, part: Padded, total: int) -> Tensor:
    """Policy gradient by the book: all logits, a float32 log-softmax, and the token's own."""
    ids = torch.cat([part.prompt_ids, part.completion_ids], dim=1)
    seen = torch.cat([part.prompt_mask, part.completion_mask], dim=1)
    logits: Tensor = module(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    responses = logprobs[:, part.prompt_ids.shape[1] - 1 :]
    return -(responses * part.advantages[:, None] * part.completion_mask).sum() / total


def _fastest(found: dict[Trial, Contender]) -> Trial | None:
    return min(found, key=lambda trial: found[trial].seconds, default=None)


def twin(module: PreTrainedModel, implementation: str) -> PreTrainedModel:
    """A second module with the very same parameters, whose layers and attention can be changed by themselves."""
    other = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    other.set_attn_implementation(implementation)
    return other


def checkpoint(module: PreTrainedModel, recompute: bool) -> None:
    """Hugging Face's own recomputation, which only a module in training mode does."""
    module.train()
    if recompute:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        module.gradient_checkpointing_disable()


def trl_trainer(module: PreTrainedModel, folder: str, target: Target, exact_length: int | None = None) -> Any:  # noqa: ANN401 -- trl's own
    """TRL's GRPO with all else at its defaults, over a model that is already there.

    `exact_length`: of what it samples, where it does.
    """
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
    arguments = trl.GRPOConfig(
        output_dir=folder,
        report_to="none",
        bf16=False,  # the weights are: autocast is a trial of its own
        use_cpu=target.kind == "cpu",
        per_device_train_batch_size=COMMON_GROUP,
        num_generations=COMMON_GROUP,
        max_completion_length=exact_length or 256,  # its default
        generation_kwargs={"min_new_tokens": exact_length} if exact_length else None,
    )
    return trl.GRPOTrainer(
        model=module,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * COMMON_GROUP}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>"),
    )
