"""Rows of JSONL and parquet files, saved folders, data sets of the Hub and generated ones, as plain JSON values."""

import contextlib
import difflib
import gzip
import importlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.base.errors import DataError
from ullage.data.generated import generated_rows, is_generated
from ullage.data.values import excerpt, one_line, plain

JSON_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
SUFFIXES = (*JSON_SUFFIXES, ".parquet")
# owner/name, owner/name:split or owner/name:config:split; old data sets have no owner
HUB_ID = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?")
ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands, for error messages: `train.jsonl:17`, or `train.parquet, row 17`."""

    values: dict[str, Any]
    where: str


def read_rows(file: str) -> Iterator[Row]:
    """The rows of one data set, in order: from disk where it exists there, else generated, else of a Hub id."""
    path = Path(file).expanduser()
    if path.is_dir():
        return _saved_folder(file, path)
    if path.exists():
        return _rows_of_file(file, path)
    if is_generated(file):
        return _generated(file)
    hub = HUB_ID.fullmatch(file)
    if hub is None or file.endswith(SUFFIXES):
        raise DataError(f"no such data file: {file}", _missing_file_remedy(path))
    config, split = (hub["config"], hub["split"]) if hub["split"] else (None, hub["config"])
    return _hub(file, hub["name"], config, split)


def source_name(file: str) -> str:
    """What rows of this file are called where they have no `data_source`: `~/gsm8k/train.jsonl.gz` -> `train`."""
    path = Path(file).expanduser()
    if path.exists():
        name = path.resolve().name
        return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
    return file.split(":")[0].rpartition("/")[2]


def _rows_of_file(file: str, path: Path) -> Iterator[Row]:
    if file.endswith(".parquet"):
        return _parquet(file, path)
    if file.endswith(JSON_SUFFIXES):
        return _json(file, path)
    raise DataError(f"{file} is of no known kind", f"data files end in one of: {', '.join(SUFFIXES)}")


def _missing_file_remedy(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either; check data.train_files and data.val_files"
    names = [entry.name for entry in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / near[0]}?" if near else "check data.train_files and data.val_files"


def _json(file: str, path: Path) -> Iterator[Row]:
    """Our own reader, because an error must name the line."""
    number = 0
    try:
        with gzip.open(path) if file.endswith(".gz") else path.open("rb") as stream:
            # Split at b"\n" only: a JSON string may hold other line separators, such as U+2028, unescaped.
            for number, line in enumerate(stream, start=1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not text.strip():
                    continue
                if text.lstrip().startswith(b"[") and file.endswith((".json", ".json.gz")):
                    yield from _json_array(file, number, text + stream.read())
                    return
                where = f"{file}:{number}"
                yield Row(_object(_parse(text, file, number), where), where)
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"{file}: cannot be read after line {number}: {reason}", "is the file complete?") from error


def _json_array(file: str, first_line: int, text: bytes) -> Iterator[Row]:
    """A `.json` file that is one list of objects."""
    rows = _parse(text, file, first_line)
    for number, values in enumerate(rows, start=1):
        where = f"{file}, row {number}"
        yield Row(_object(values, where), where)


def _parse(text: bytes, file: str, first_line: int) -> Any:  # noqa: ANN401 -- any JSON value
    try:
        # Raw control characters inside strings (tabs, NUL) are common in scraped text and harmless.
        # Without the line's end, since an error there would be counted on the next line.
        return json.loads(text.decode().rstrip(), strict=False)
    except UnicodeDecodeError as error:
        line = first_line + text.count(b"\n", 0, error.start)
        raise DataError(
            f"{file}:{line}: not UTF-8 ({error.reason} 0x{text[error.start]:02x})", "save it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(
            f"{file}:{line}: not valid JSON: {error.msg} at column {error.colno}: {excerpt(error.doc, error.pos)}",
            "a JSONL file holds one JSON object per line; correct or delete this line",
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested lists
        raise DataError(f"{file}:{first_line}: not usable JSON: {error}", "correct or delete this line") from None


def _object(values: Any, where: str) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(values, dict):
        raise DataError(
            f"{where}: expected a JSON object, found {type(values).__name__} {str(values)[:40]!r}",
            'a row looks like {"prompt": "...", "answer": "..."}',
        )
    try:
        return {key: plain(value, f"{where}: column '{key}'") for key, value in values.items()}
    except RecursionError:
        raise DataError(f"{where}: hundreds of values nested in each other", "correct or delete this row") from None


def _parquet(file: str, path: Path) -> Iterator[Row]:
    pyarrow, parquet = _module("pyarrow"), _module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as table:
            yield from _arrow_rows(file, table.iter_batches(batch_size=ROWS_AT_ONCE))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}: not a readable parquet file: {one_line(error)}", "is the file complete?") from error


def _saved_folder(file: str, path: Path) -> Iterator[Row]:
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        inside = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(SUFFIXES))
        remedy = f"name the files in it: {', '.join(inside[:5])}" if inside else "give a file, or save it there first"
        raise DataError(f"{file} is a folder, but not one written by datasets' save_to_disk", remedy)
    datasets = _module("datasets")
    with _silent(datasets):
        try:
            data = datasets.load_from_disk(str(path))
        except Exception as error:  # a damaged folder raises whatever pyarrow, json or datasets meet
            raise DataError(f"{file}: not a readable data set: {one_line(error)}", "save it again") from error
    return _dataset_rows(file, data, None, "/")


def _hub(file: str, name: str, config: str | None, split: str | None) -> Iterator[Row]:
    datasets = _module("datasets")
    with _silent(datasets):
        try:
            data = datasets.load_dataset(name, config)
        except Exception as error:  # HTTP, cache, config and parser errors of four libraries
            raise DataError(
                f"{file}: neither a path here nor a data set that could be loaded from the Hub: {one_line(error)}",
                "a Hub id is owner/name, owner/name:split or owner/name:config:split; without a network, give a JSONL "
                "or parquet file, or a folder written elsewhere with datasets.load_dataset(...).save_to_disk(...)",
            ) from error
    return _dataset_rows(file, data, split, ":")


def _generated(file: str) -> Iterator[Row]:
    for number, values in enumerate(generated_rows(file), start=1):
        where = f"{file}, row {number}"
        yield Row(_object(values, where), where)


def _dataset_rows(file: str, data: Any, split: str | None, separator: str) -> Iterator[Row]:  # noqa: ANN401 -- datasets
    """Rows of a `Dataset`, or of one split of a `DatasetDict`: the one asked for, `train`, or the only one."""
    if isinstance(data, dict):
        chosen = split or ("train" if "train" in data else next(iter(data)) if len(data) == 1 else None)
        if chosen not in data:
            problem = f"has no split '{split}'" if split else "has several splits and none is called train"
            base = file.removesuffix(f"{separator}{split}").rstrip("/")
            names = ", ".join(f"{base}{separator}{name}" for name in data)
            raise DataError(f"{file} {problem}", f"name one of: {names}")
        data = data[chosen]
    return _arrow_rows(file, data.with_format("arrow").iter(batch_size=ROWS_AT_ONCE))


def _arrow_rows(file: str, batches: Any) -> Iterator[Row]:  # noqa: ANN401 -- pyarrow has no types
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            where = f"{file}, row {number}"
            yield Row(_object(values, where), where)


def _module(name: str) -> Any:  # noqa: ANN401 -- a module
    """An optional dependency, imported only when a file needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(f"this data format needs the package {package}: {error}", f"pip install {package}") from error


@contextlib.contextmanager
def _silent(datasets: Any) -> Iterator[None]:  # noqa: ANN401 -- the module
    """Without progress bars, which would break the terminal view."""
    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()
