import pytest

from ullage.base.errors import ConfigError, DataError
from ullage.config.tree import Data
from ullage.data.chat import PROMPTS_AT_ONCE, tokenise

USER = {"role": "user", "content": "hi"}


def ids(prompts, tokenizer, **config):
    places = [f"train.jsonl:{number}" for number in range(1, len(prompts) + 1)]
    return tokenise(prompts, Data(**config), tokenizer, places=places)


def text(prompt, tokenizer, **config):
    return tokenizer.decode(ids([prompt], tokenizer, **config)[0])


def test_ids_are_those_of_the_tokenizer_itself(tokenizer):
    plain, chat = ids(["ab", [USER]], tokenizer)
    # <s>, which the tokenizer puts before plain text; then three special tokens, and bytes from "!" (33) on
    assert plain == (0, 3 + ord("a") - ord("!"), 3 + ord("b") - ord("!"))
    assert plain == tuple(tokenizer.encode("ab"))
    assert chat == tuple(tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False))
    assert chat[0] == 1  # the template writes its own special tokens


def test_rendered_text(tokenizer):
    system = {"role": "system", "content": "be kind"}
    opened = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text([USER], tokenizer) == opened
    assert text("hi", tokenizer, apply_chat_template="always") == opened
    assert text("hi", tokenizer) == text("hi", tokenizer, apply_chat_template="never") == "<s>hi"
    assert text([USER], tokenizer, system_prompt="be brief") == "<|im_start|>system\nbe brief<|im_end|>\n" + opened
    assert text([system, USER], tokenizer, system_prompt="be brief") == text([system, USER], tokenizer)
    assert text([USER], tokenizer, apply_chat_template_kwargs={"think": True}) == opened + "<think>"


def test_text_parts_are_joined(tokenizer):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert text([{"role": "user", "content": parts}], tokenizer) == text([USER], tokenizer)


def test_chat_that_ends_with_the_assistant_is_continued(tokenizer):
    prefilled = text([USER, {"role": "assistant", "content": "Well,"}], tokenizer)
    assert prefilled == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell,"


def test_many_mixed_prompts_keep_their_order(tokenizer):
    prompts = [str(number) if number % 3 else [{"role": "user", "content": str(number)}] for number in range(2500)]
    seen = []
    places = [""] * len(prompts)
    result = tokenise(
        prompts, Data(), tokenizer, places=places, progress=lambda done, total: seen.append((done, total))
    )
    assert PROMPTS_AT_ONCE == 1024
    assert seen == [(1024, 2500), (2048, 2500), (2500, 2500)]
    for number in range(2500):
        expected = f"<s>{number}" if number % 3 else f"<|im_start|>user\n{number}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(result[number]) == expected


def test_messages_refused_without_template(tokenizer):
    with pytest.raises(DataError, match=r"train.jsonl:2: the prompt is a list of messages, but .*=never"):
        ids(["hi", [USER]], tokenizer, apply_chat_template="never")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="the tokenizer has no chat template") as caught:
        ids([[USER]], tokenizer)
    assert "actor_rollout_ref.model.custom_chat_template" in caught.value.remedy
    assert tokenizer.decode(ids(["hi"], tokenizer)[0]) == "<s>hi"


def test_template_that_raises(tokenizer):
    with pytest.raises(DataError) as caught:
        ids([[USER], [USER, {"role": "tool", "content": "x"}]], tokenizer)
    assert (
        caught.value.cause == "train.jsonl:2: the chat template refuses this prompt (roles: user, tool): no such role"
    )


def test_settings_that_would_be_ignored_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template_kwargs\.tokenize: set by Ullage itself"):
        ids([[USER]], tokenizer, apply_chat_template_kwargs={"tokenize": False})
    with pytest.raises(ConfigError, match=r"data\.system_prompt is set, but no prompt goes through"):
        ids(["hi"], tokenizer, system_prompt="be brief")
