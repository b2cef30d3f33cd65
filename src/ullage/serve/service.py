"""The core of serving: prompts are read, checked against the engine's room, and handed to the worker."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from ullage.base.errors import UllageError
from ullage.config.tree import Data
from ullage.data.chat import OURS, tokenise
from ullage.model.language_model import LanguageModel
from ullage.rollout.sampling import Sampling
from ullage.serve.answer import Order
from ullage.serve.request import Body, ChatBody, CompletionBody, RefusalError
from ullage.serve.worker import Worker

RETRY_SECONDS = 1


class Service:
    """One model under one name."""

    def __init__(
        self, model: LanguageModel, worker: Worker, *, name: str, max_length: int, max_waiting: int, data: Data
    ) -> None:
        """`data`: how the run that trained the model wrote its prompts (system prompt, template options)."""
        self.model = model
        self.worker = worker
        self.name = name
        self.max_length = max_length
        self.max_waiting = max_waiting
        self.data = data.model_copy(update={"apply_chat_template": "auto"})
        self.created = int(time.time())
        self._plain = Data(apply_chat_template="never")
        self._vocabulary = model.head.weight.shape[0]

    def order(self, body: Body) -> Order:
        """What the request asks for, in token ids; RefusalError where it cannot be had."""
        if body.model is not None:
            self.check_model(body.model)
        prompts = self._prompts(body)
        self._check_room(prompts, body)
        longest = max(len(prompt) for prompt in prompts)
        sampling = Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=min(body.top_k, self._vocabulary) or -1,
            max_tokens=body.wanted_tokens or self.max_length - longest,
            ignore_eos=body.ignore_eos,
        )
        seed = secrets.randbits(62) if body.seed is None else body.seed
        return Order(prompts=prompts, samples=body.n, sampling=sampling, seed=seed, stops=body.stops)

    def check_queue(self, order: Order) -> None:
        """RefusalError where the order would wait behind too many others, or is too many by itself."""
        if order.num_choices > self.max_waiting:
            message = f"{order.num_choices} choices in one request: at most {self.max_waiting}"
            raise RefusalError(400, message, param="n")
        waiting = self.worker.status.waiting
        if waiting + order.num_choices > self.max_waiting:
            raise RefusalError(
                429,
                f"{waiting} choices wait already, at most {self.max_waiting} may: ask again later",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise RefusalError(
                404, f"no model {name!r}: this server has {self.name!r}", param="model", code="model_not_found"
            )

    def _prompts(self, body: Body) -> tuple[tuple[int, ...], ...]:
        if isinstance(body, ChatBody):
            return (self._read_messages(body),)
        assert isinstance(body, CompletionBody), "one of the two endpoints"
        given: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if given and isinstance(given[0], int):
            given = [given]
        prompts = tuple(self._read_text(one) if isinstance(one, str) else tuple(one) for one in given)
        if not prompts or not all(prompts):
            raise RefusalError(400, "prompt: must not be empty", param="prompt")
        highest = max(map(max, prompts))
        if highest >= self._vocabulary:
            raise RefusalError(400, f"prompt: token id {highest} of {self._vocabulary}", param="prompt")
        return prompts

    def _read_text(self, text: str) -> tuple[int, ...]:
        [ids] = tokenise([text], self._plain, self.model.tokenizer, places=["prompt"])
        return ids

    def _read_messages(self, body: ChatBody) -> tuple[int, ...]:
        if not self.model.tokenizer.chat_template:
            raise RefusalError(400, "this model has no chat template: use /v1/completions", param="messages")
        taken = sorted(set(body.chat_template_kwargs) & {*OURS, "messages"})
        if taken:
            raise RefusalError(400, f"chat_template_kwargs.{taken[0]}: set by the server", param="chat_template_kwargs")
        options = {**self.data.apply_chat_template_kwargs, **body.chat_template_kwargs}
        data = self.data.model_copy(update={"apply_chat_template_kwargs": options})
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        try:
            [ids] = tokenise([messages], data, self.model.tokenizer, places=["messages"])
        except UllageError as error:
            raise RefusalError(400, error.cause, param="messages") from None
        return ids

    def _check_room(self, prompts: tuple[tuple[int, ...], ...], body: Body) -> None:
        longest = max(len(prompt) for prompt in prompts)
        wanted = body.wanted_tokens or 1
        if longest + wanted > self.max_length:
            asked = f" and max_tokens is {wanted}" if body.wanted_tokens else ""
            raise RefusalError(
                400,
                f"the context is {self.max_length} tokens: the prompt has {longest}{asked}",
                param="messages" if isinstance(body, ChatBody) else "prompt",
                code="context_length_exceeded",
            )
