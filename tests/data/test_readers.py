import datetime
import decimal
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.base.errors import DataError
from ullage.data.readers import read_rows, source_name

HERE = Path(__file__).parent


def values(file):
    return [row.values for row in read_rows(str(file))]


def failure(file):
    with pytest.raises(DataError) as caught:
        values(file)
    assert caught.value.code == 65
    return caught.value


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_gsm8k_rows():
    rows = list(read_rows(str(HERE / "gsm8k/train.jsonl")))
    assert len(rows) == 20
    assert rows[0].values["question"].startswith("Natalia sold clips to 48 of her friends")
    assert rows[0].values["answer"].endswith("#### 72")
    assert rows[16].where == f"{HERE}/gsm8k/train.jsonl:17"


def test_broken_line_is_named():
    error = failure(HERE / "prompts/broken_line_17.jsonl")
    assert error.cause.startswith(f"{HERE}/prompts/broken_line_17.jsonl:17: not valid JSON: Expecting value at column ")
    assert '"answer":' in error.cause
    assert "one JSON object per line" in error.remedy


def test_byte_order_mark_blank_lines_and_windows_line_ends(tmp_path):
    file = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert [(row.values, row.where) for row in read_rows(str(file))] == [
        ({"prompt": "a"}, f"{file}:1"),
        ({"prompt": "b"}, f"{file}:4"),
    ]


def test_unusual_characters_stay_in_their_line(tmp_path):
    text = "nul \0 tab \t line separator \u2028 next line \x85 \U0001f600"
    file = write(tmp_path / "a.jsonl", '{"prompt": "' + text + '"}\n{"prompt": "\\u0000\\ud83d\\ude00"}\n')
    assert values(file) == [{"prompt": text}, {"prompt": "\0\U0001f600"}]


def test_huge_line(tmp_path):
    file = write(tmp_path / "a.jsonl", json.dumps({"prompt": "x" * 5_000_000}) + "\n")
    assert len(values(file)[0]["prompt"]) == 5_000_000


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"a": NaN, "b": [-Infinity, 1e999, 1.5], "c": true}')
    assert values(file) == [{"a": None, "b": [None, None, 1.5], "c": True}]


def test_list_of_objects_in_a_json_file(tmp_path):
    file = write(tmp_path / "a.json", '[\n  {"prompt": "a"},\n  {"prompt": "b"}\n]\n')
    assert [(row.values["prompt"], row.where) for row in read_rows(str(file))] == [
        ("a", f"{file}, row 1"),
        ("b", f"{file}, row 2"),
    ]
    broken = write(tmp_path / "b.json", '[\n  {"prompt": "a"},\n  {"prompt": b}\n]\n')
    assert failure(broken).cause.startswith(f"{broken}:3: not valid JSON")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'["a", "b"]', ":2: expected a JSON object, found list"),
        (b'"text"', ":2: expected a JSON object, found str 'text'"),
        (b'{"a": 1} {"a": 2}', ":2: not valid JSON: Extra data at column 10"),
        (b'{"a": 1,', ":2: not valid JSON: Expecting property name"),
        (b"\0\0\0\0", ":2: not valid JSON"),
        (b'{"a": "\xff"}', ":2: not UTF-8 (invalid start byte 0xff)"),
        (b'{"a": "\\ud83d"}', ":2: column 'a': half of a surrogate pair at character 0"),
        (b'{"a": ' + b"9" * 5000 + b"}", ":2: not usable JSON"),
        (b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}", ":2: "),  # by the parser or by us, as the Python version has it
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ":2: not usable JSON"),
    ],
)
def test_unusable_line(tmp_path, line, expected):
    file = write(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 1}\n')
    assert f"{file}{expected}" in failure(file).cause


def test_gzip(tmp_path):
    packed = gzip.compress(b'{"prompt": "a"}\n' * 1000)
    assert len(values(write(tmp_path / "a.jsonl.gz", packed))) == 1000
    cut = write(tmp_path / "cut.jsonl.gz", packed[:-12])
    assert failure(cut).remedy == "is the file complete?"
    assert "line 0" in failure(write(tmp_path / "no.jsonl.gz", "not gzip at all")).cause


def test_parquet_values_become_plain(tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(
        {
            "prompt": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
            "when": [datetime.datetime(2026, 1, 2, 3, 4, 5), None],
            "day": [datetime.date(2026, 1, 2), None],
            "took": [datetime.timedelta(seconds=90), None],
            "price": [decimal.Decimal("1.25"), None],
            "raw": [b"text", b"\xff\xfe"],
            "score": [float("nan"), 0.5],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    rows = list(read_rows(str(tmp_path / "a.parquet")))
    assert [row.where for row in rows] == [f"{tmp_path}/a.parquet, row 1", f"{tmp_path}/a.parquet, row 2"]
    assert rows[0].values == {
        "prompt": [{"role": "user", "content": "a"}],
        "when": "2026-01-02T03:04:05",
        "day": "2026-01-02",
        "took": 90.0,
        "price": 1.25,
        "raw": "text",
        "score": None,
    }
    assert rows[1].values["raw"] == "//4="
    assert json.loads(json.dumps(rows[1].values, allow_nan=False)) == rows[1].values


def test_truncated_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["a"] * 1000}), tmp_path / "a.parquet")
    cut = write(tmp_path / "cut.parquet", (tmp_path / "a.parquet").read_bytes()[:-20])
    assert failure(cut).cause.startswith(f"{cut}: not a readable parquet file: ")


def test_saved_folder(tmp_path, capfd):
    import datasets

    train = datasets.Dataset.from_list([{"prompt": str(number)} for number in range(5)])
    with_splits = datasets.DatasetDict({"train": train, "test": train.select([4, 2])})
    with_splits.save_to_disk(tmp_path / "splits")
    capfd.readouterr()
    assert [row["prompt"] for row in values(tmp_path / "splits")] == ["0", "1", "2", "3", "4"]
    assert [row["prompt"] for row in values(tmp_path / "splits/test")] == ["4", "2"]
    assert "".join(capfd.readouterr()) == ""
    datasets.DatasetDict({"one": train, "two": train}).save_to_disk(tmp_path / "unclear")
    error = failure(tmp_path / "unclear")
    assert error.cause.endswith("unclear has several splits and none is called train")
    assert error.remedy == f"name one of: {tmp_path}/unclear/one, {tmp_path}/unclear/two"
    write(tmp_path / "splits/test/state.json", "{")
    assert "test: not a readable data set: " in failure(tmp_path / "splits/test").cause


def test_folder_that_was_not_saved(tmp_path):
    write(tmp_path / "a.parquet", "")
    error = failure(tmp_path)
    assert "not one written by datasets' save_to_disk" in error.cause
    assert error.remedy == "name the files in it: a.parquet"


def test_missing_and_unknown_files(tmp_path):
    write(tmp_path / "train.jsonl", "{}")
    assert failure(tmp_path / "trian.jsonl").remedy == f"did you mean {tmp_path}/train.jsonl?"
    assert "does not exist either" in failure(tmp_path / "none/train.jsonl").remedy
    assert "no such data file: data/train.parquet" in failure("data/train.parquet").cause
    assert "no such data file: ./owner/name" in failure("./owner/name").cause
    assert "is of no known kind" in failure(write(tmp_path / "train.csv", "a,b")).cause


def test_hub_offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = failure("openai/gsm8k:main:test")
    assert error.cause.startswith("openai/gsm8k:main:test: neither a path here nor a data set that could be loaded")
    assert "OfflineModeIsEnabled" in error.cause
    assert "save_to_disk" in error.remedy


def test_hub_id_parts(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config):
        asked.append((name, config))
        return datasets.DatasetDict(
            train=datasets.Dataset.from_dict({"prompt": ["a"]}), test=datasets.Dataset.from_dict({"prompt": ["b"]})
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values("owner/name") == [{"prompt": "a"}]
    assert values("owner/name:test") == [{"prompt": "b"}]
    assert values("owner/name:main:test") == [{"prompt": "b"}]
    assert asked == [("owner/name", None), ("owner/name", None), ("owner/name", "main")]
    error = failure("owner/name:main:validation")
    assert error.cause == "owner/name:main:validation has no split 'validation'"
    assert error.remedy == "name one of: owner/name:main:train, owner/name:main:test"


def test_source_names(tmp_path):
    assert source_name(str(write(tmp_path / "train.jsonl.gz", ""))) == "train"
    assert source_name(str(write(tmp_path / "gsm8k.v2.parquet", ""))) == "gsm8k.v2"
    assert source_name(f"{tmp_path}/") == tmp_path.name
    assert source_name("openai/gsm8k:main:test") == "gsm8k"


def test_reading_does_not_load_torch(tmp_path):
    program = (
        "import sys, ullage.data.prompts, ullage.data.sampler, ullage.data.arithmetic\n"
        "from ullage.data.readers import read_rows\n"
        f"assert len(list(read_rows({str(HERE / 'gsm8k/train.jsonl')!r}))) == 20\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
