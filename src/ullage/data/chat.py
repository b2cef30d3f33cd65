"""Prompts to token ids: plain text as it is, messages through the model's chat template."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ullage.base.errors import ConfigError, DataError
from ullage.config.tree import Data
from ullage.data.columns import Given
from ullage.data.values import one_line

PROMPTS_AT_ONCE = 1024
OURS = ("conversation", "tokenize", "return_dict", "add_generation_prompt", "continue_final_message")

Progress = Callable[[int, int], None]
"""Called with prompts done and prompts in all."""


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that is used here."""

    chat_template: Any

    def __call__(self, text: Any, **options: Any) -> Any: ...  # noqa: ANN401 -- transformers' own signature

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...  # noqa: ANN401


def tokenise(
    prompts: Sequence[Given],
    config: Data,
    tokenizer: Tokenizer,
    *,
    places: Sequence[str],
    progress: Progress | None = None,
) -> list[tuple[int, ...]]:
    """Token ids of every prompt; `places` says where each stands, for error messages."""
    chats = [as_chat(prompt, config, place) for prompt, place in zip(prompts, places, strict=True)]
    _check(chats, config, tokenizer)
    shared: dict[int, int] = {}  # one object per token id, not per token: a quarter of the memory
    result: list[tuple[int, ...]] = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        stop = min(start + PROMPTS_AT_ONCE, len(prompts))
        texts = [
            str(prompt) if chat is None else render(chat, config, tokenizer, place)
            for prompt, chat, place in zip(prompts[start:stop], chats[start:stop], places[start:stop], strict=True)
        ]
        for ids in _encode(texts, [chat is not None for chat in chats[start:stop]], tokenizer):
            result.append(tuple(map(shared.setdefault, ids, ids)))
        if progress is not None:
            progress(stop, len(prompts))
    return result


def as_chat(prompt: Given, config: Data, place: str) -> list[dict[str, Any]] | None:
    """The messages to render, or None for text that is used as it is."""
    policy = config.apply_chat_template
    if isinstance(prompt, str):
        if policy != "always":
            return None
        messages = [{"role": "user", "content": prompt}]
    elif policy == "never":
        raise DataError(
            f"{place}: the prompt is a list of messages, but data.apply_chat_template=never",
            "set data.apply_chat_template=auto, or give prompts as text",
        )
    else:
        messages = [{**message, "content": _content(message.get("content"))} for message in prompt]
    if config.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return messages


def _content(content: Any) -> Any:  # noqa: ANN401 -- text, or a list of text parts, or null beside tool calls
    """Text parts joined: a text model's template would print a list as Python source."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _check(chats: Sequence[list[dict[str, Any]] | None], config: Data, tokenizer: Tokenizer) -> None:
    """Refuse settings that cannot work, or would be ignored, before any work is done."""
    taken = [key for key in config.apply_chat_template_kwargs if key in OURS]
    if taken:
        raise ConfigError(f"data.apply_chat_template_kwargs.{taken[0]}: set by Ullage itself", "remove the key")
    any_chat = any(chat is not None for chat in chats)
    if any_chat and not tokenizer.chat_template:
        raise ConfigError(
            "the prompts are chats, but the tokenizer has no chat template",
            "set actor_rollout_ref.model.custom_chat_template, use the instruct version of the model, "
            "or give prompts as text with data.apply_chat_template=auto",
        )
    if chats and not any_chat and config.system_prompt is not None:
        raise ConfigError(
            "data.system_prompt is set, but no prompt goes through the chat template",
            "set data.apply_chat_template=always, or write the text into the prompts and unset data.system_prompt",
        )


def render(
    messages: list[dict[str, Any]], config: Data, tokenizer: Tokenizer, place: str, *, open_end: bool = True
) -> str:
    """The text of a chat, open for the reply; a chat that ends in the assistant's words is continued, as TRL does.

    Without `open_end`, those words are the reply, and the template closes it.
    """
    continued = open_end and messages[-1]["role"] == "assistant"
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=open_end and not continued,
                continue_final_message=continued,
                **config.apply_chat_template_kwargs,
            )
        )
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{place}: the chat template refuses this prompt (roles: {roles}): {one_line(error)}",
            "change the messages, or give another template with actor_rollout_ref.model.custom_chat_template",
        ) from error


def _encode(texts: Sequence[str], templated: Sequence[bool], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every text. A template writes its own special tokens; plain text gets the tokenizer's usual ones."""
    result: list[list[int]] = [[] for _ in texts]
    for kind in (False, True):
        indices = [index for index, is_templated in enumerate(templated) if is_templated is kind]
        if not indices:
            continue
        encoded: Mapping[str, list[list[int]]] = tokenizer(
            [texts[index] for index in indices],
            add_special_tokens=not kind,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # overlong prompts are handled, and counted, by us
        )
        for index, ids in zip(indices, encoded["input_ids"], strict=True):
            result[index] = ids
    return result
