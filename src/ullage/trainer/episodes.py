"""Episodes: turns of the model and of an environment, token in, token out.

What the model sampled is never decoded and encoded again: an episode's context is its prompt, then the sampled tokens
of its turns with the environment's tokens between them. Those are attended to and carry no loss.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ullage.base.errors import ConfigError
from ullage.base.seeds import derive
from ullage.config.tree import Data
from ullage.data.chat import Tokenizer
from ullage.data.prompts import Prompt
from ullage.data.values import one_line
from ullage.environments import Message, Row, Turn
from ullage.environments._pool import EnvironmentPool
from ullage.rewards.panel import summed
from ullage.rewards.pool import Score, distinct
from ullage.rollout.sampling import GroupRequest, Sample, Sampling
from ullage.trainer.generate import Generator, Phases

MARK = "9f2cANSWERc2f9"
"""Stands for an answer in a chat that is rendered only to see what comes after one."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """One sample in the making."""

    group: int
    index: int
    seed: int
    shared_seed: int
    """All samples of a prompt meet the same environment: their rewards are compared."""
    prompt: Prompt
    number: int = 0
    """Under which the pool knows it, once it has begun."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    supports: list[Tensor] = field(default_factory=list)
    turns: list[Sample] = field(default_factory=list)
    """What the model said, turn by turn."""
    last_text: str = ""
    """Of the last one."""
    texts: list[str] = field(default_factory=list)
    """The transcript, for people to read."""
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    answer: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    """None while it goes on."""

    def say(self, sample: Sample, text: str) -> None:
        """The model's turn."""
        self._extend(sample.token_ids, sample.logprobs, sampled=True, supports=sample.supports)
        self.turns.append(sample)
        self.last_text = text
        self.texts.append(text)

    def hear(self, token_ids: Sequence[int], text: str) -> None:
        """The environment's."""
        single = [torch.tensor([token], dtype=torch.int32) for token in token_ids] if self.supports else None
        self._extend(token_ids, [0.0] * len(token_ids), sampled=False, supports=single)
        self.texts.append(text)

    def _extend(
        self, token_ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool, supports: Sequence[Tensor] | None
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.mask += [sampled] * len(token_ids)
        self.supports += supports or ()

    def sample(self) -> Sample:
        assert self.finish_reason is not None, "it has ended"
        return Sample(
            group=self.group,
            index=self.index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            mask=None if all(self.mask) else tuple(self.mask),
            supports=tuple(self.supports) or None,
        )


class Episodes:
    """A generator whose samples are episodes with an environment: it is used in the same way."""

    def __init__(self, generator: Generator, pool: EnvironmentPool, follow_up: FollowUp, *, max_turns: int) -> None:
        self.generator = generator
        self.pool = pool
        self.follow_up = follow_up
        self.max_turns = max_turns
        self.reward_names = distinct([*generator.reward_names, "environment"])
        """The parts of a score, the environment's own reward last."""

    def run(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling, phases: Phases
    ) -> tuple[list[Sample], list[Score], list[str]]:
        """Samples with their scores and transcripts, ordered by prompt and sample index."""
        with self.generator.recorder.phase(phases.generate):
            self.follow_up.check(prompts)
            episodes = [
                Episode(group=group, index=index, seed=seed, shared_seed=own[0], prompt=prompt)
                for group, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))
                for index, seed in enumerate(own)
            ]
            for wave in _waves(episodes, self.pool.max_episodes):
                self._play(wave, sampling, phases)
        with self.generator.recorder.phase(phases.score):
            scores = self._scores(episodes)
        return [episode.sample() for episode in episodes], scores, ["\n".join(episode.texts) for episode in episodes]

    def _play(self, episodes: Sequence[Episode], sampling: Sampling, phases: Phases) -> None:
        """From their beginning to their end, turn by turn in all of them."""
        for episode in episodes:
            self._begin(episode)
        by_number = {episode.number: episode for episode in episodes}
        going = episodes
        for turn in range(self.max_turns):
            if not going:
                break
            self._answer(going, turn, sampling, phases)
            for number, result, error in self.pool.collect():
                self._continue(by_number[number], result, error, sampling.max_tokens)
            going = [episode for episode in going if episode.finish_reason is None]
        self.pool.collect()  # of those that ended in the last turn

    def _begin(self, episode: Episode) -> None:
        prompt, seed = episode.prompt, episode.shared_seed
        row = Row(prompt=prompt.prompt, target=prompt.target, source=prompt.source, extra=prompt.extra, seed=seed)
        episode.number = self.pool.reset(row)

    def _answer(self, episodes: Sequence[Episode], turn: int, sampling: Sampling, phases: Phases) -> None:
        """The model's turn in all of them; the environment works on each as soon as it is through."""
        sharing: dict[tuple[tuple[int, ...], int], list[Episode]] = defaultdict(list)
        for episode in episodes:
            left = sampling.max_tokens - len(episode.token_ids)
            sharing[episode.prompt.token_ids + tuple(episode.token_ids), left].append(episode)
        requests = [
            # The seeds of the first turn are the ones given: an episode of one turn is what a plain sample would be.
            GroupRequest(
                prompt=context,
                seeds=tuple(derive(episode.seed, turn) if turn else episode.seed for episode in members),
                max_tokens=left,
            )
            for (context, left), members in sharing.items()
        ]
        members_of = list(sharing.values())

        def submit(sample: Sample) -> None:
            episode = members_of[sample.group][sample.index]
            text = self.generator.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            episode.say(sample, text)
            self.pool.step(episode.number, text)

        def progress(tokens: int, done: int) -> None:
            self.generator.poll()
            self.generator.recorder.progress(done, len(episodes), f"turn {turn + 1}, {tokens} tokens")

        self.generator.generate(phases, requests, sampling, on_finish=submit, on_progress=progress)

    def _continue(self, episode: Episode, turn: Turn | None, error: str | None, max_tokens: int) -> None:
        """The environment's turn: what it said becomes part of the episode, or ends it."""
        if episode.finish_reason is not None:
            return
        if error is not None:
            episode.error, episode.finish_reason = error, episode.turns[-1].finish_reason
        if turn is None:  # it began, or was lost
            return
        episode.reward += turn.reward
        for name, value in turn.metrics.items():
            episode.metrics[name] += value
        episode.answer = episode.answer if turn.answer is None else turn.answer
        if turn.done:
            episode.finish_reason = episode.turns[-1].finish_reason
            return
        episode.finish_reason = self._heard(episode, turn, max_tokens)
        if episode.finish_reason is not None:
            self.pool.end(episode.number)

    def _heard(self, episode: Episode, turn: Turn, max_tokens: int) -> str | None:
        """Hand the observation over; or why the episode ends here."""
        if len(episode.token_ids) == max_tokens:
            return "length"
        if len(episode.turns) == self.max_turns:
            return "turns"
        assert turn.observation, "a turn that is not the last has one"
        try:
            token_ids = self.follow_up.token_ids(episode.prompt, turn.observation, episode.token_ids[-1])
        except ConfigError as problem:  # a role that the template does not know, for one
            episode.error = problem.cause
            return episode.turns[-1].finish_reason
        if len(episode.token_ids) + len(token_ids) >= max_tokens:  # no room for an answer to it
            return "length"
        episode.hear(token_ids, readable(turn.observation))
        return None

    def _scores(self, episodes: Sequence[Episode]) -> list[Score]:
        """The environment's rewards, and what reward functions make of the last answers."""
        prompts = [episode.prompt for episode in episodes]
        last = [episode.turns[-1] for episode in episodes]
        judged = self.generator.score(prompts, last, [episode.last_text for episode in episodes])
        scores = [summed([self._own(episode), score]) for episode, score in zip(episodes, judged, strict=True)]
        self.generator.check_budget(scores)
        return scores

    def _own(self, episode: Episode) -> Score:
        name = self.reward_names[-1]
        metrics = {"turns": float(len(episode.turns)), **episode.metrics}
        parts = {name: episode.reward, **{f"{name}/{key}": value for key, value in metrics.items()}}
        if episode.error is not None:
            error = f"environment {self.pool.name}: {episode.error}"
            return Score(None, {}, error, remedy="correct the environment or what it depends on")
        return Score(episode.reward, parts, None, episode.answer)


class FollowUp:
    """What an environment says as token ids, just as the model's chat template continues after an answer."""

    def __init__(self, tokenizer: Tokenizer, data: Data) -> None:
        self.tokenizer: Any = tokenizer
        self.data = data

    def check(self, prompts: Sequence[Prompt]) -> None:
        """ConfigError where a chat cannot be continued."""
        if any(self._is_chat(prompt) for prompt in prompts):
            self._after_answer([{"role": "user", "content": "?"}])

    def token_ids(self, prompt: Prompt, observation: str | list[Message], end: int) -> list[int]:
        """The tokens between an answer, whose last token is `end`, and the next one."""
        if not self._is_chat(prompt):
            return self._encoded(readable(observation))
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        text = self._after_answer(messages)
        # The template closes an answer with an end token, which the model has already sampled.
        before, found, rest = text.partition(self.tokenizer.decode([end]))
        return self._encoded(rest if found and self._closing.startswith(before + found) else text)

    @functools.cached_property
    def _closing(self) -> str:
        return self._after_answer([])

    def _is_chat(self, prompt: Prompt) -> bool:
        return not isinstance(prompt.prompt, str) or self.data.apply_chat_template == "always"

    def _after_answer(self, messages: list[Message]) -> str:
        """How the template goes on after an answer: the messages, and the opening of the next answer."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}, *messages]
        remedy = "give another one with actor_rollout_ref.model.custom_chat_template"
        try:
            text = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=bool(messages), **self.data.apply_chat_template_kwargs
            )
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            roles = ", ".join(message["role"] for message in chat)
            raise ConfigError(f"the chat template refuses a chat of {roles}: {one_line(error)}", remedy) from error
        _, found, after = str(text).partition(MARK)
        if not found:
            raise ConfigError("the chat template leaves out an earlier answer, so a chat cannot go on", remedy)
        return after

    def _encoded(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids


def _waves(episodes: Sequence[Episode], largest: int) -> Iterator[Sequence[Episode]]:
    """As few as can be, and of equal size."""
    count = math.ceil(len(episodes) / largest)
    for wave in range(count):
        yield episodes[wave * len(episodes) // count : (wave + 1) * len(episodes) // count]


def readable(observation: str | list[Message]) -> str:
    """An observation as plain text."""
    if isinstance(observation, str):
        return observation
    return "\n".join(message["content"] for message in observation)
