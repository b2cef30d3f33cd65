import json
from pathlib import Path

import pytest

from ullage.base.errors import DataError
from ullage.config.tree import Data
from ullage.data.prompts import load_prompts, truncate

HERE = Path(__file__).parent


def load(tokenizer, *files, max_samples=-1, **config):
    return load_prompts([str(file) for file in files], Data(**config), tokenizer, max_samples=max_samples)


def failure(tokenizer, *files, **config):
    with pytest.raises(DataError) as caught:
        load(tokenizer, *files, **config)
    assert caught.value.code == 65
    return caught.value


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_trl_columns(tokenizer):
    first, second = load(tokenizer, HERE / "prompts/trl.jsonl").prompts
    assert (first.id, first.prompt, first.target, first.source) == (0, "What is 2 + 3?", "5", "trl")
    assert first.extra == {"answer": "5", "difficulty": 1}
    assert tokenizer.decode(first.token_ids) == "<s>What is 2 + 3?"
    assert second.prompt == [{"role": "user", "content": "What is 4 + 4?"}]
    assert second.target == "8"
    assert second.extra == {"solution": "8", "difficulty": 2}


def test_verl_columns_alike_from_jsonl_and_parquet(tokenizer, tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in (HERE / "prompts/verl.jsonl").read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    lines = load(tokenizer, HERE / "prompts/verl.jsonl")
    table = load(tokenizer, tmp_path / "train.parquet")
    assert lines == table
    assert [(prompt.target, prompt.source) for prompt in table.prompts] == [("6", "openai/gsm8k")] * 2
    assert table.prompts[1].extra["extra_info"] == {"split": "train", "index": 1, "answer": "3 * 2 = 6\n#### 6"}
    assert table.prompts[1].extra["ability"] == "math"
    assert tokenizer.decode(table.prompts[1].token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThree pairs of socks. How many socks?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_gsm8k_columns(tokenizer):
    loaded = load(tokenizer, HERE / "gsm8k/train.jsonl", apply_chat_template="always", max_prompt_length=2048)
    assert (len(loaded.prompts), loaded.num_rows, loaded.num_overlong) == (20, 20, 0)
    assert loaded.prompts[0].target.endswith("\n#### 72")
    assert loaded.prompts[0].source == "train"
    assert isinstance(loaded.prompts[0].prompt, str)


def test_message_columns(tokenizer):
    first, second = load(tokenizer, HERE / "prompts/messages.jsonl").prompts
    assert [message["role"] for message in first.prompt] == ["system", "user"]
    assert (first.target, second.target) == ("Paris", None)
    assert first.extra == {"topic": "geography"}


def test_ids_count_over_all_files_and_survive_drops(tokenizer, tmp_path):
    one = write(tmp_path / "one.jsonl", {"prompt": "a"}, {"prompt": "much too long"})
    two = write(tmp_path / "two.jsonl", {"prompt": "b"})
    loaded = load(tokenizer, one, two, max_prompt_length=4)
    assert [(prompt.id, prompt.prompt, prompt.source) for prompt in loaded.prompts] == [
        (0, "a", "one"),
        (2, "b", "two"),
    ]
    assert (loaded.num_rows, loaded.num_overlong, loaded.overlong) == (3, 1, "drop")


def test_max_samples_takes_the_first_rows(tokenizer, tmp_path):
    one = write(tmp_path / "one.jsonl", {"prompt": "a"}, {"prompt": "b"})
    two = write(tmp_path / "two.jsonl", {"prompt": "c"}, {"prompt": "d"})
    assert [prompt.prompt for prompt in load(tokenizer, one, two, max_samples=3).prompts] == ["a", "b", "c"]
    assert len(load(tokenizer, HERE / "prompts/broken_line_17.jsonl", max_samples=16).prompts) == 16


@pytest.mark.parametrize(("side", "expected"), [("left", "cdef"), ("right", "<s>abc"), ("middle", "<s>aef")])
def test_truncation(tokenizer, tmp_path, side, expected):
    file = write(tmp_path / "a.jsonl", {"prompt": "abcdef"}, {"prompt": "abc"})
    loaded = load(tokenizer, file, max_prompt_length=4, overlong_prompts=side)
    assert [tokenizer.decode(prompt.token_ids) for prompt in loaded.prompts] == [expected, "<s>abc"]
    assert [prompt.prompt for prompt in loaded.prompts] == ["abcdef", "abc"]
    assert (loaded.num_overlong, loaded.overlong) == (1, side)


def test_truncation_to_odd_and_smallest_limits():
    assert truncate((1, 2, 3, 4, 5, 6), 3, "middle") == (1, 5, 6)
    assert truncate((1, 2, 3), 1, "middle") == (3,)
    assert truncate((1, 2, 3), 1, "left") == (3,)
    assert truncate((1, 2, 3), 3, "middle") == (1, 2, 3)


def test_overlong_prompts_refused(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "abc"}, *({"prompt": "a" * length} for length in (5, 9, 6, 7)))
    error = failure(tokenizer, file, max_prompt_length=4, overlong_prompts="error")
    assert error.cause == (
        f"4 of 5 prompts exceed data.max_prompt_length=4: {file}:2 (6 tokens), {file}:3 (10 tokens), "
        f"{file}:4 (7 tokens) and 1 more"
    )
    assert "data.max_prompt_length=10" in error.remedy


def test_all_prompts_too_long(tokenizer, tmp_path):
    error = failure(
        tokenizer, write(tmp_path / "a.jsonl", {"prompt": "abcd"}, {"prompt": "abcdefg"}), max_prompt_length=4
    )
    assert error.cause == "all 2 prompts are longer than data.max_prompt_length=4; longest 8 tokens"
    assert "data.max_prompt_length=8" in error.remedy


def test_empty_data_set(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert failure(tokenizer, tmp_path / "a.jsonl").cause == f"the data set is empty: {tmp_path}/a.jsonl"
    assert failure(tokenizer).cause == "the data set is empty: no files given"
    limited = failure(tokenizer, HERE / "prompts/trl.jsonl", max_samples=0)
    assert limited.cause.endswith("trl.jsonl; the row limit is 0")


def test_bad_rows_are_named(tokenizer, tmp_path):
    broken = HERE / "prompts/broken_line_17.jsonl"
    assert failure(tokenizer, broken).cause.startswith(f"{broken}:17: not valid JSON")
    file = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": None})
    assert failure(tokenizer, file).cause.startswith(f"{file}:2: column 'prompt': a prompt must be text")
    named_otherwise = write(tmp_path / "b.jsonl", {"inputs": "a", "label": "b"})
    error = failure(tokenizer, named_otherwise, columns={"prompt": "input"})
    assert (
        error.cause
        == f"{named_otherwise}:1: no prompt column (input); columns found: inputs, label; did you mean 'inputs'?"
    )
    assert error.remedy == "say which column it is: data.columns.prompt=inputs"


def test_prompt_without_tokens(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ '' }}"
    file = write(tmp_path / "a.jsonl", {"prompt": "a"})
    assert failure(tokenizer, file, apply_chat_template="always").cause == f"{file}:1: the prompt has no tokens"


def test_fingerprint_follows_content_and_order_only(tokenizer, tmp_path):
    a, b = {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}
    (tmp_path / "copy").mkdir()
    original = load(tokenizer, write(tmp_path / "x.jsonl", a, b)).fingerprint
    reordered_keys = {"answer": 1, "prompt": "a"}
    assert load(tokenizer, write(tmp_path / "copy/x.jsonl", reordered_keys, b)).fingerprint == original
    assert len(original) == 32
    changed = [
        load(tokenizer, write(tmp_path / "x.jsonl", b, a)).fingerprint,
        load(tokenizer, write(tmp_path / "x.jsonl", a)).fingerprint,
        load(tokenizer, write(tmp_path / "x.jsonl", a, {**b, "answer": "2"})).fingerprint,
        load(tokenizer, write(tmp_path / "x.jsonl", a, {**b, "level": 3})).fingerprint,
    ]
    assert len({original, *changed}) == 5
