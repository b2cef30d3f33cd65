"""Given answers as token ids: what a chat template puts around them, where they end, and what is refused."""

import json

import pytest

from ullage.base.errors import DataError
from ullage.config.tree import Data
from ullage.data.completions import demonstrations_of
from ullage.data.prompts import fingerprint, load_prompts

USER = {"role": "user", "content": "hi"}
END = 2
"""The id of <|im_end|>."""


def learn(rows, tmp_path, tokenizer, *, stop_ids=frozenset({END}), **settings):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Data(**settings)
    prompts = load_prompts([str(path)], config, tokenizer).prompts
    return demonstrations_of(prompts, config, tokenizer, stop_ids)


def texts(rows, tmp_path, tokenizer, **settings):
    found = learn(rows, tmp_path, tokenizer, **settings).demonstrations
    return [tokenizer.decode(demonstration.response) for demonstration in found]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "completion": "yes"},
        {"prompt": "hi", "response": "yes"},
        {"prompt": [USER], "completion": "yes"},
        {"prompt": [USER], "completion": [{"role": "assistant", "content": "yes"}]},
        {"messages": [USER, {"role": "assistant", "content": "yes"}]},
    ],
)
def test_every_format_ends_where_the_model_would_end(row, tmp_path, tokenizer):
    (demonstration,) = learn([row], tmp_path, tokenizer).demonstrations
    assert demonstration.response == (*tokenizer("yes", add_special_tokens=False)["input_ids"], END)


def test_prompt_and_answer_together_are_the_conversation(tmp_path, tokenizer):
    messages = [USER, {"role": "assistant", "content": "yes"}]
    (demonstration,) = learn([{"messages": messages}], tmp_path, tokenizer).demonstrations
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    ids = [*demonstration.prompt.token_ids, *demonstration.response]
    assert ids == whole[: len(ids)]
    assert tokenizer.decode(whole[len(ids) :]) == "\n", "what the template writes after the end is never sampled"


def test_a_mapped_column(tmp_path, tokenizer):
    rows = [{"question": "hi", "answer": "4", "solution": "2+2=4"}]
    assert texts(rows, tmp_path, tokenizer, columns={"completion": "solution"}) == ["2+2=4<|im_end|>"]


def test_without_an_end_token_of_its_own_the_first_that_ends_is_taken(tmp_path, tokenizer):
    tokenizer.eos_token = None
    (demonstration,) = learn(
        [{"prompt": "hi", "completion": "a"}], tmp_path, tokenizer, stop_ids=frozenset({250, 240})
    ).demonstrations
    assert demonstration.response[-1] == 240


def test_overlong_answers(tmp_path, tokenizer):
    rows = [{"prompt": "a", "completion": "12345"}, {"prompt": "b", "completion": "12"}]
    dropped = learn(rows, tmp_path, tokenizer, max_response_length=4)
    assert [d.prompt.prompt for d in dropped.demonstrations] == ["b"]
    assert dropped.num_overlong == 1
    cut = texts(rows, tmp_path, tokenizer, max_response_length=4, overlong_prompts="right")
    assert cut == ["1234", "12<|im_end|>"]
    with pytest.raises(
        DataError, match=r"/train.jsonl:1: its completion has 6 tokens, over data.max_response_length=4"
    ):
        learn(rows, tmp_path, tokenizer, max_response_length=4, overlong_prompts="error")
    with pytest.raises(DataError, match="all 2 completions are longer"):
        learn(rows, tmp_path, tokenizer, max_response_length=2)


def test_a_row_without_an_answer_is_named(tmp_path, tokenizer):
    rows = [{"prompt": "a", "completion": "1"}, {"prompt": "b", "answer": "2"}]
    with pytest.raises(DataError, match=r"/train.jsonl:2: no completion to learn from") as caught:
        learn(rows, tmp_path, tokenizer)
    assert "data.columns.completion=<column>" in caught.value.remedy


def test_a_row_is_named_by_its_own_file(tmp_path, tokenizer):
    files = [tmp_path / name for name in ("good.jsonl", "bad.jsonl")]
    files[0].write_text('{"prompt": "a", "completion": "1", "data_source": "sums"}\n' * 3)
    files[1].write_text('{"prompt": "a", "completion": "1", "data_source": "sums"}\n\n{"prompt": "b"}\n')
    prompts = load_prompts([str(file) for file in files], Data(), tokenizer)
    assert [prompt.where.rpartition("/")[2] for prompt in prompts.prompts] == [
        "good.jsonl:1", "good.jsonl:2", "good.jsonl:3", "bad.jsonl:1", "bad.jsonl:3"
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"/bad\.jsonl:3: no completion to learn from"):
        demonstrations_of(prompts.prompts, Data(), tokenizer, frozenset({END}))
    files[0].rename(tmp_path / "moved.jsonl")
    moved = load_prompts([str(tmp_path / "moved.jsonl"), str(files[1])], Data(), tokenizer)
    assert moved.prompts[0].where != prompts.prompts[0].where
    sourced = [p for p in moved.prompts if p.source == "sums"]
    assert fingerprint(sourced) == fingerprint([p for p in prompts.prompts if p.source == "sums"])


def test_an_answer_must_be_text(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"train.jsonl.*column 'score': a completion must be text, found int"):
        learn([{"prompt": "a", "score": 3}], tmp_path, tokenizer, columns={"completion": "score"})
    with pytest.raises(
        DataError, match="no completion to learn from"
    ):  # `response` may be anything in another data set
        learn([{"prompt": "a", "response": {"x": 1}}], tmp_path, tokenizer)
