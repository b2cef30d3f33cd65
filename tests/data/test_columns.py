import pytest

from ullage.base.errors import ConfigError, DataError
from ullage.data.columns import check_map, fields_of
from ullage.data.readers import Row

USER = {"role": "user", "content": "hi"}


def fields(values, **columns):
    return fields_of(Row(values, "train.jsonl:3"), columns, default_source="train")


def failure(values, **columns):
    with pytest.raises(DataError) as caught:
        fields(values, **columns)
    assert caught.value.cause.startswith("train.jsonl:3: ")
    return caught.value


def test_target_order():
    row = {
        "prompt": "p",
        "target": 5,
        "ground_truth": 4,
        "solution": 3,
        "answer": 2,
        "reward_model": {"ground_truth": 1},
    }
    for expected, column in enumerate(("reward_model", "answer", "solution", "ground_truth", "target"), start=1):
        assert fields(row).target == expected
        del row[column]
    assert fields(row).target is None


def test_prompt_order():
    row = {"prompt": "a", "messages": [USER], "question": "c", "problem": "d"}
    for expected, column in zip(("a", [USER], "c", "d"), list(row), strict=True):
        result = fields(row)
        assert result.prompt == expected
        assert column not in result.extra
        del row[column]


def test_null_beside_a_filled_column_is_passed_over():
    result = fields({"prompt": None, "question": "q", "answer": None, "solution": 0, "data_source": None})
    assert (result.prompt, result.target, result.source) == ("q", 0, "train")


def test_map_with_dotted_paths():
    row = {"in": {"text": "p"}, "out": {"gold": [7]}, "meta": {"set": 3}, "a.b": "literal", "a": {"b": "nested"}}
    result = fields(row, prompt="in.text", target="out.gold", source="meta.set")
    assert (result.prompt, result.target, result.source) == ("p", [7], "3")
    assert result.extra == row
    assert fields(row, prompt="a.b").prompt == "literal"


def test_map_wins_over_known_names():
    row = {"prompt": "p", "answer": "a", "text": "t", "gold": "g"}
    result = fields(row, prompt="text", target="gold")
    assert (result.prompt, result.target) == ("t", "g")
    assert result.extra == {"prompt": "p", "answer": "a", "gold": "g"}


def test_missing_prompt_column():
    error = failure({"promt": "p", "label": "1"})
    assert error.cause == (
        "train.jsonl:3: no prompt column (prompt/messages/question/problem); columns found: promt, label; "
        "did you mean 'promt'?"
    )
    assert error.remedy == "say which column it is: data.columns.prompt=promt"
    assert failure({"x": 1}).remedy == "say which column it is: data.columns.prompt=<column>"
    assert "columns found: none" in failure({}).cause


def test_missing_mapped_column():
    error = failure({"prompt": "p", "gold_answer": "1"}, target="gold_answr")
    assert error.cause == (
        "train.jsonl:3: no target column (gold_answr); columns found: prompt, gold_answer; did you mean 'gold_answer'?"
    )
    assert error.remedy == "say which column it is: data.columns.target=gold_answer"


def test_unknown_role_in_the_map():
    with pytest.raises(ConfigError, match=r"data\.columns\.promt: must be one of prompt, target, source") as caught:
        check_map({"promt": "x"})
    assert caught.value.remedy == "did you mean data.columns.prompt?"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (None, "column 'prompt': a prompt must be text or a list of messages, found null"),
        ("", "found empty"),
        ([], "found empty"),
        (7, "found int '7'"),
        ({"role": "user", "content": "hi"}, "found dict"),
        (["hi"], "column 'prompt', message 1: not a chat message, found str"),
        ([USER, {"from": "human", "value": "hi"}], "message 2: not a chat message, found keys from, value"),
        ([{"role": "user", "content": None}], "message 1: content must be text, found null"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1: content must be text, found"),
        ([{"role": "user", "content": []}], "message 1: content must be text, found '[]'"),
    ],
)
def test_unusable_prompt(prompt, expected):
    assert expected in failure({"prompt": prompt}).cause


def test_null_keys_of_columnar_messages_are_dropped():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    prompt = fields({"prompt": [{**USER, "tool_calls": None}, {**call, "name": None}]}).prompt
    assert prompt == [USER, call]


def test_images_are_refused():
    assert "column 'images' is not empty" in failure({"prompt": "<image>", "images": [{"bytes": "x"}]}).cause
    assert fields({"prompt": "p", "images": []}).prompt == "p"


def test_reply_of_a_finished_conversation_is_the_target():
    reply = {"role": "assistant", "content": "hello"}
    result = fields({"messages": [USER, reply]})
    assert (result.prompt, result.target, result.extra) == ([USER], "hello", {})
    assert fields({"messages": [USER, reply], "answer": "x"}).target == "x"
    assert fields({"prompt": [USER, reply]}).prompt == [USER, reply]
    assert "holds nothing but a reply" in failure({"messages": [reply]}).cause
