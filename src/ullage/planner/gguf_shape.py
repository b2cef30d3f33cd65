"""The shape of a model in a GGUF file, from its header alone (github.com/ggml-org/ggml, docs/gguf.md)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from ullage.base.errors import ModelError
from ullage.planner.model_shape import Shape

MAGIC = b"GGUF"
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Of the value types that have a fixed size."""
TEXT, ARRAY = 8, 9
LONGEST = 1 << 24
"""Bytes of a text, where the file is not damaged."""
KINDS = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Architectures that a config.json spells differently."""
KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
"""Of a config.json, and what GGUF calls them below the architecture's name."""


def shape_of_gguf(path: Path) -> Shape:
    """ModelError: not a GGUF file, or of an architecture that has other keys."""
    try:
        with path.open("rb") as file:
            fields, tensors = _header(file)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}", "check the path") from None
    except (OverflowError, struct.error, KeyError, ValueError) as error:
        raise ModelError(f"{path}: its GGUF header cannot be read ({error})", "copy or download it again") from None
    architecture = fields.get("general.architecture", "")
    config: dict[str, Any] = {
        name: fields[key] for name, rest in KEYS.items() if (key := f"{architecture}.{rest}") in fields
    }
    config["model_type"] = KINDS.get(architecture, architecture)
    config["vocab_size"] = fields.get(f"{architecture}.vocab_size", len(fields.get("tokenizer.ggml.tokens", ())))
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return Shape.from_config(config, path.stem)


def _header(file: BinaryIO) -> tuple[dict[str, Any], set[str]]:
    """Fields by key, of arrays the range of their indices, and the names of all tensors."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("not GGUF")
    _, num_tensors, num_fields = _read(file, "IQQ")
    fields = {}
    for _ in range(num_fields):
        key = _text(file)
        (kind,) = _read(file, "I")
        fields[key] = _value(file, kind)
    names = set()
    for _ in range(num_tensors):
        names.add(_text(file))
        (dimensions,) = _read(file, "I")
        _read(file, f"{dimensions}QIQ")  # extents, type, offset
    return fields, names


def _value(file: BinaryIO, kind: int) -> Any:  # noqa: ANN401 -- as the file says
    if kind == TEXT:
        return _text(file)
    if kind != ARRAY:
        return _read(file, FORMATS[kind])[0]
    each, count = _read(file, "IQ")
    if each in FORMATS:
        file.seek(count * struct.calcsize(FORMATS[each]), 1)
    else:
        for _ in range(count):
            _value(file, each)
    return range(count)


def _text(file: BinaryIO) -> str:
    (length,) = _read(file, "Q")
    if length > LONGEST:
        raise ValueError(f"a text of {length} bytes")
    return file.read(length).decode("utf-8", "replace")


def _read(file: BinaryIO, form: str) -> tuple[Any, ...]:
    packed = "<" + form
    return struct.unpack(packed, file.read(struct.calcsize(packed)))
