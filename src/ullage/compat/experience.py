"""`ExperienceBatch`: responses with all that is known of them, under the names that user code expects.

Shape letters: N responses, T response tokens (padded to the longest).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ullage.base.errors import DataError, UsageError
from ullage.batch.stages import Experience, TrainBatch, pad_rows


class ExperienceBatch:
    """A stage of a training step (ullage/batch/stages.py) that can be read, and in part written, by name."""

    def __init__(self, stage: Experience, tokenizer: Any, *, texts: Sequence[str] = (), step: int = 1) -> None:  # noqa: ANN401
        self.stage = stage
        """The frozen record; a new one replaces it when something is set here."""
        self.step = step
        """Which collection it is: the order of mini-batches derives from it."""
        self._tokenizer = tokenizer
        self._texts = tuple(texts)

    def __len__(self) -> int:
        return len(self.stage.responses)

    # --- texts and tokens ---

    @property
    def prompts(self) -> list[str]:
        """[N] the prompt that each response answers."""
        texts = self._texts or tuple(self._tokenizer.decode(ids) for ids in self.stage.prompts)
        return [texts[group] for group in self.stage.group_N.tolist()]

    @property
    def responses(self) -> list[str]:
        """[N] without end-of-text tokens."""
        return [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in self.stage.responses]

    @property
    def prompt_ids(self) -> list[tuple[int, ...]]:
        return [self.stage.prompts[group] for group in self.stage.group_N.tolist()]

    @property
    def response_ids(self) -> list[tuple[int, ...]]:
        return list(self.stage.responses)

    @property
    def input_ids(self) -> Tensor:
        """[N, longest] prompt and response in a row, zeros to the right."""
        return self._rows([(*ids, *own) for ids, own in self._sequences()])

    @property
    def attention_mask(self) -> Tensor:
        """[N, longest] 1 on every token, 0 on padding."""
        return self._rows([(1,) * (len(ids) + len(own)) for ids, own in self._sequences()])

    @property
    def response_mask(self) -> Tensor:
        """[N, T] True on tokens the policy sampled."""
        return self.stage.mask_NT

    # --- what the models think ---

    @property
    def old_log_probs(self) -> Tensor | None:
        """[N, T] log-probs under the policy that sampled, by the trainer."""
        return self.stage.old_logprobs_NT

    log_probs = old_log_probs

    @property
    def ref_log_probs(self) -> Tensor | None:
        """[N, T] log-probs under the reference, where there is one."""
        return self.stage.ref_logprobs_NT

    @property
    def values(self) -> Tensor | None:
        """[N, T] what the critic expects before each token; set them where a critic of yours has computed them."""
        return self.stage.values_NT

    @values.setter
    def values(self, given: Any) -> None:  # noqa: ANN401 -- what a tensor can be made of
        self.stage = dataclasses.replace(self._uncredited(), values_NT=self._per_token("values", given))

    # --- rewards and credit ---

    @property
    def rewards(self) -> Tensor:
        """[N] what each response is worth; NaN until a reward function has scored it or you have set it."""
        return self.stage.rewards_N

    @rewards.setter
    def rewards(self, given: Any) -> None:  # noqa: ANN401 -- what a tensor can be made of
        rewards = torch.as_tensor(given, dtype=torch.float64).detach().clone()
        if rewards.shape != (len(self),):
            raise UsageError(f"rewards of shape {tuple(rewards.shape)} for {len(self)} responses", "give one for each")
        stage = self._uncredited()
        self.stage = dataclasses.replace(stage, rewards_N=rewards, reward_parts_NK=rewards[:, None])

    @property
    def advantages(self) -> Tensor | None:
        """[N, T]; None until credit is assigned or you set them, for each token or for each response."""
        return self.stage.advantages_NT if isinstance(self.stage, TrainBatch) else None

    @advantages.setter
    def advantages(self, given: Any) -> None:  # noqa: ANN401 -- what a tensor can be made of
        self.stage = self.stage_credited(self._per_token("advantages", given), self.returns)

    @property
    def returns(self) -> Tensor | None:
        """[N, T] what a critic learns from; None where the algorithm has none."""
        return self.stage.returns_NT if isinstance(self.stage, TrainBatch) else None

    @returns.setter
    def returns(self, given: Any) -> None:  # noqa: ANN401 -- what a tensor can be made of
        advantages = self.advantages
        zeros = torch.zeros(self.stage.mask_NT.shape, dtype=torch.float64)
        self.stage = self.stage_credited(zeros if advantages is None else advantages, self._per_token("returns", given))

    def stage_credited(self, advantages_NT: Tensor, returns_NT: Tensor | None) -> TrainBatch:
        """The stage with this credit."""
        return self._uncredited().credited(advantages_NT=advantages_NT, returns_NT=returns_NT)

    def require_rewards(self) -> None:
        """DataError where a response has no reward yet."""
        if bool(self.stage.rewards_N.isnan().any()):
            missing = int(self.stage.rewards_N.isnan().sum())
            raise DataError(
                f"{missing} of {len(self)} responses have no reward",
                "name a reward function in the config (reward.functions), or set batch.rewards",
            )

    def _uncredited(self) -> Experience:
        """Other rewards or values make earlier credit wrong."""
        names = [field.name for field in dataclasses.fields(Experience)]
        return Experience(**{name: getattr(self.stage, name) for name in names})

    def _sequences(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return list(zip(self.prompt_ids, self.stage.responses, strict=True))

    def _rows(self, rows: list[tuple[int, ...]]) -> Tensor:
        return pad_rows(rows, width=max(map(len, rows), default=0), dtype=torch.long)

    def _per_token(self, name: str, given: Any) -> Tensor:  # noqa: ANN401 -- what a tensor can be made of
        """[N, T] from numbers for each token or for each response; 0 where a token carries no loss."""
        numbers = torch.as_tensor(given).detach().to("cpu")
        mask = self.stage.mask_NT
        if numbers.shape == mask.shape[:1]:
            numbers = numbers[:, None].expand(mask.shape)
        if numbers.shape != mask.shape:
            shape = tuple(numbers.shape)
            raise UsageError(
                f"{name} of shape {shape} for responses of shape {tuple(mask.shape)}",
                "give one number for each response token, or one for each response",
            )
        return numbers * mask
