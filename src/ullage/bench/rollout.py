"""The rollout engine beside Hugging Face's `generate` and the roofline: same weights, same prompts, taking turns."""

from __future__ import annotations

import importlib.util
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ullage.base.garbage import settled_garbage
from ullage.base.seeds import derive
from ullage.bench.clock import free, synchronize
from ullage.bench.peers import trl_trainer, twin
from ullage.bench.report import GIB
from ullage.bench.roofline import H200, Ceiling, cache_bytes, decode_seconds, prefill_seconds
from ullage.bench.shapes import shape_config, shaped_model
from ullage.model.language_model import LanguageModel
from ullage.model.lora import Settings, new_adapter
from ullage.model.quantise import Quantisation
from ullage.model.random_weights import random_module
from ullage.model.target import Target
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sample, Sampling

WARM_CALLS, PEERS_WARM_CALLS = 1, 2
"""Calls that are not counted: kernels are compiled and graphs captured; peers plan attention for each new length."""
COMPARED = 16
"""Sequences whose log-probs are held against float32."""
SCORED = 32
"""Tokens of each, where a peer is asked for them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and how long their completions are."""

    shape: str
    prompts: tuple[int, ...]
    """Tokens of each."""
    responses: tuple[int, ...]
    """Tokens of the completions of each prompt."""
    samples: int = 1
    """Of each prompt."""
    peer: bool = False
    """Beside Hugging Face's `generate`, which needs equal lengths."""
    rank: int = 0
    """Of adapters on all linear layers."""
    quantization: Quantisation | None = None

    @property
    def engine(self) -> str:
        """What draws."""
        adapted = f", LoRA of rank {self.rank}" if self.rank else ""
        return f"ullage{adapted}{f' on {self.quantization}' if self.quantization else ''}"

    @property
    def drawn(self) -> int:
        return self.samples * sum(self.responses)


def batch(shape: str, count: int = 256, prompt: int = 128, response: int = 256) -> Workload:
    """Distinct prompts of one length, as a plain `generate` likes it best."""
    return Workload(shape=shape, prompts=(prompt,) * count, responses=(response,) * count, peer=True)


def ragged(shape: str, count: int = 256, least: int = 100, most: int = 1024) -> Workload:
    """nano-vllm's benchmark: prompts and completions of any length between two, all of them likely."""
    chance = random.Random(0)
    lengths = [(chance.randint(least, most), chance.randint(least, most)) for _ in range(count)]
    return Workload(shape=shape, prompts=tuple(p for p, _ in lengths), responses=tuple(r for _, r in lengths))


def groups(shape: str, count: int = 32, samples: int = 16, prompt: int = 512, response: int = 512) -> Workload:
    """What GRPO asks for."""
    return Workload(shape=shape, prompts=(prompt,) * count, responses=(response,) * count, samples=samples)


def adapted(work: Workload, rank: int, quantization: Quantisation | None = None) -> Workload:
    """With adapters that change nothing yet, alone."""
    return replace(work, peer=False, rank=rank, quantization=quantization)


WORKLOADS: dict[str, Callable[[], list[Workload]]] = {
    "batch": lambda: [batch(shape) for shape in ("0.5B", "1.5B", "7B")],
    "ragged": lambda: [ragged(shape) for shape in ("Qwen3-0.6B", "8B")],
    "groups": lambda: [groups("Qwen3-1.7B")],
    "adapters": lambda: [adapted(batch("1.5B"), 16), adapted(batch("7B"), 16), adapted(batch("7B"), 16, "nf4")],
    "tiny": lambda: [
        batch("tiny", 4, 8, 6),
        ragged("tiny", 4, 2, 12),
        groups("tiny", 2, 3, 20, 6),
        adapted(batch("tiny", 4, 8, 6), 4, "nf4"),
    ],
}
"""By part of the benchmark."""


def measured(
    work: Workload, target: Target, say: Callable[[str], None], *, ceiling: Ceiling = H200
) -> Iterator[dict[str, Any]]:
    """Rows of one workload: ours, and the peer where there is one; of each the last call, all of them taking turns."""
    free(target)
    model = shaped_model(work.shape, target, quantization=work.quantization)
    if work.rank:
        settings = Settings(rank=work.rank, alpha=2 * work.rank)
        model = model.adapted("actor", new_adapter(model.module, settings, ["all-linear"], seed=1))
    contest = Contest(work, model, target)
    contenders: dict[str, Callable[[], list[Sample]]] = {work.engine: contest.ours}
    if work.samples > 1:
        contenders["ullage, read apart"] = contest.read_apart
        contenders["ullage, prompts apart"] = contest.apart
    if work.peer:
        contenders["generate"] = contest.generate
        if importlib.util.find_spec("trl") is not None:
            contenders["trl"] = contest.trl
    times: dict[str, float] = {}
    peaks: dict[str, int] = {}
    caches: dict[str, int] = {}
    found: dict[str, list[Sample]] = {}
    warm = PEERS_WARM_CALLS if work.peer else WARM_CALLS
    for turn in range(warm + 1):
        for name, draw in contenders.items():
            with settled_garbage():  # as in a run; for all of them
                times[name], peaks[name], found[name] = contest.timed(draw)
            caches[name] = contest.cache_bytes
            say(f"{work.shape}, {contest.text}: {name}, call {turn + 1}: {times[name]:.2f} s")
    first, _, _ = contest.timed(contest.first_tokens)
    floor = None if work.rank or target.kind == "cpu" else contest.floor_seconds(ceiling)
    for name in contenders:
        taken = times[name]
        yield {
            "shape": work.shape,
            "workload": contest.text,
            "engine": name,
            "seconds": round(taken, 4),
            "tokens_per_s": round(work.drawn / taken),
            "of_roofline_percent": round(100 * floor / taken, 1) if floor else None,
            "first_tokens_s": round(first, 4) if name == work.engine else None,
            "times_as_fast": round(times["generate"] / taken, 2) if work.peer else None,
            "kv_bytes_a_token": cache_bytes(model.module.config),
            "cache_mib": round(1024 * caches[name] / GIB, 3) if name.startswith("ullage") else None,
            "graphs_mib": round(1024 * contest.engine.graphs.nbytes / GIB, 1) if name == work.engine else None,
            "peak_gib": round(peaks[name] / GIB, 2),
            "logprob_gap": None if work.rank else contest.gap(found[name]),
        }


class Contest:
    """One model, and everybody who generates with it."""

    def __init__(self, work: Workload, model: LanguageModel, target: Target) -> None:
        self.work, self.model, self.target = work, model, target
        vocabulary = model.module.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(1)
        self.prompts = [
            tuple(torch.randint(10, vocabulary, (length,), generator=generator).tolist()) for length in work.prompts
        ]
        longest = max(p + r for p, r in zip(work.prompts, work.responses, strict=True))
        slots = min(256 if work.samples == 1 else 512, len(self.prompts) * work.samples)
        self.engine = Engine(model, slots=slots, max_length=longest)
        # Hugging Face's attention, over the same weights.
        self.peer: Any = twin(model.module, "sdpa") if work.peer else None
        self._trl: Any = None
        self.cache_bytes = 0
        """Of the pages that our last call had in use at once, at most."""

    @cached_property
    def reads_apart(self) -> Engine:
        """In the same memory: they take turns."""
        mine, arena = self.engine, self.engine.pages.arena.flatten()
        return Engine(self.model, slots=mine.slots, max_length=mine.max_length, lent=arena, share_prefix=False)

    @property
    def text(self) -> str:
        p, r = self.work.prompts, self.work.responses
        lengths = f"{min(p)}-{max(p)} + {min(r)}-{max(r)}" if len({*p, *r}) > 2 else f"{p[0]} + {r[0]}"
        each = f" x {self.work.samples}" if self.work.samples > 1 else ""
        return f"{len(p)}{each} x ({lengths})"

    def ours(self) -> list[Sample]:
        return self._draw([(prompt, self.work.samples, length) for prompt, length in self._pairs()], self.engine)

    def read_apart(self) -> list[Sample]:
        """Prompts lie in the cache once, and every sample reads them for itself."""
        return self._draw([(prompt, self.work.samples, length) for prompt, length in self._pairs()], self.reads_apart)

    def apart(self) -> list[Sample]:
        """Every sample with a prompt of its own, as if nobody knew that they are the same."""
        wanted = [(prompt, 1, length) for prompt, length in self._pairs() for _ in range(self.work.samples)]
        return [replace(sample, group=sample.group // self.work.samples) for sample in self._draw(wanted, self.engine)]

    def first_tokens(self) -> list[Sample]:
        """The prompts, and one token of each sample."""
        return self._draw([(prompt, self.work.samples, 1) for prompt in self.prompts], self.engine)

    def trl(self) -> list[Sample]:
        """As its trainer generates where it has no vLLM; it gives no log-probs then."""
        length = self.work.responses[0]
        if self._trl is None:
            with tempfile.TemporaryDirectory() as folder:
                self._trl = trl_trainer(self.peer, folder, self.target, exact_length=length)
        completions, _ = self._trl._generate_single_turn([list(prompt) for prompt in self.prompts], None, {}, 1)
        return [_sample(i, tuple(row), ()) for i, row in enumerate(completions)]

    def generate(self) -> list[Sample]:
        return self._generate(self.prompts, self.work.responses[0], scored=False)

    def _generate(self, prompts: list[tuple[int, ...]], length: int, *, scored: bool) -> list[Sample]:
        assert self.peer is not None, "asked for"
        ids = torch.tensor(prompts, device=self.target.device)
        out: Any = self.peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=length,
            min_new_tokens=length,
            return_dict_in_generate=True,
            output_logits=scored,
            pad_token_id=0,
        )
        tokens = out.sequences[:, ids.shape[1] :]
        logprobs: list[list[float]] = [[] for _ in prompts]
        if scored:
            logits = torch.stack(out.logits, dim=1).float().log_softmax(-1)
            logprobs = logits.gather(-1, tokens[..., None])[..., 0].tolist()
        return [_sample(i, tuple(row), tuple(logprobs[i])) for i, row in enumerate(tokens.tolist())]

    def floor_seconds(self, ceiling: Ceiling) -> float:
        """All sequences at once; prompts of a group are computed once, and read once in each step."""
        config, work = self.model.module.config, self.work
        prompts = [length / work.samples for length in work.prompts for _ in range(work.samples)]
        responses = [length for length in work.responses for _ in range(work.samples)]
        return decode_seconds(config, prompts, responses, ceiling) + prefill_seconds(config, work.prompts, ceiling)

    def timed(self, draw: Callable[[], list[Sample]]) -> tuple[float, int, list[Sample]]:
        """Seconds, peak bytes on the device, and what was drawn."""
        on_device = self.target.kind == "cuda"
        if on_device:
            torch.cuda.reset_peak_memory_stats(self.target.device)
        began = time.perf_counter()
        samples = draw()
        synchronize(self.target)
        seconds = time.perf_counter() - began
        return seconds, int(torch.cuda.max_memory_allocated(self.target.device)) if on_device else 0, samples

    @torch.no_grad()
    def gap(self, samples: list[Sample]) -> float:
        """Mean distance of the log-probs that an engine gives to those of the same weights in float32."""
        known = samples[:COMPARED]
        if not known[0].logprobs:  # to ask for them would cost a peer time
            known = self._generate(self.prompts[:COMPARED], min(SCORED, self.work.responses[0]), scored=True)
        module = random_module(shape_config(self.work.shape), torch.float32, self.target.device, implementation="sdpa")
        for wide, narrow in zip(module.parameters(), self.model.module.parameters(), strict=True):
            wide.copy_(narrow)
        distances = [self._distance(module, sample) for sample in known]
        return round(float(torch.cat(distances).mean()), 6)

    def _distance(self, module: Any, sample: Sample) -> Tensor:  # noqa: ANN401 -- any architecture's
        prompt = self.prompts[sample.group % len(self.prompts)]
        ids = torch.tensor([*prompt, *sample.token_ids], device=self.target.device)
        logits = module(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        exact = logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0]
        distance: Tensor = (exact.cpu() - torch.tensor(sample.logprobs)).abs()
        return distance

    def _pairs(self) -> list[tuple[tuple[int, ...], int]]:
        return list(zip(self.prompts, self.work.responses, strict=True))

    def _draw(self, wanted: list[tuple[tuple[int, ...], int, int]], engine: Engine) -> list[Sample]:
        requests = [
            GroupRequest(prompt=prompt, seeds=tuple(derive(i, j) for j in range(samples)), max_tokens=length)
            for i, (prompt, samples, length) in enumerate(wanted)
        ]
        pages = engine.pages
        pages.most_used = 0
        samples = engine.generate(requests, Sampling(max_tokens=max(self.work.responses), ignore_eos=True))
        self.cache_bytes = pages.most_used * pages.arena[:, :, 0].nbytes
        return samples


def _sample(group: int, tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Sample:
    return Sample(group=group, index=0, token_ids=tokens, logprobs=logprobs, finish_reason="length")
