"""Shapes from GGUF headers that are written here field by field."""

import struct

import pytest

from ullage.base.errors import ModelError
from ullage.planner.gguf_shape import shape_of_gguf
from ullage.planner.model_shape import find_shape

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
LLAMA = {
    "llama.block_count": 3,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def field(key, value):
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", FLOAT32, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", UINT32, value)
    kind, items = (STRING, [text(each) for each in value]) if isinstance(value[0], str) else (
        UINT32, [struct.pack("<I", each) for each in value]
    )  # fmt: skip
    return text(key) + struct.pack("<IIQ", ARRAY, kind, len(items)) + b"".join(items)


def write(path, fields, tensors=("token_embd.weight",)):
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    body = b"".join(field(key, value) for key, value in fields.items())
    infos = b"".join(text(name) + struct.pack("<IQQIQ", 2, 64, 10, 0, 0) for name in tensors)
    path.write_bytes(head + body + infos)
    return path


def of_llama(**more):
    tokens = {"tokenizer.ggml.tokens": [f"<{number}>" for number in range(10)], "tokenizer.ggml.types": [1] * 10}
    return {"general.architecture": "llama", "llama.rope.freq_base": 1e4, **LLAMA, **tokens, **more}


def test_a_llama_with_one_table(tmp_path):
    shape = shape_of_gguf(write(tmp_path / "small.gguf", of_llama()))
    assert (shape.name, shape.layers, shape.hidden, shape.mlp) == ("small", 3, 64, 96)
    assert (shape.heads, shape.kv_heads, shape.head_size, shape.vocabulary, shape.tied) == (4, 2, 16, 10, True)
    # Attention 64 x (64 + 2 x 32 + 64), MLP 3 x 64 x 96, two norms; a norm and the table.
    assert shape.parameters == 3 * (64 * 192 + 3 * 64 * 96 + 2 * 64) + 64 + 10 * 64


def test_an_output_head_and_a_vocabulary_of_its_own(tmp_path):
    tensors = ("token_embd.weight", "output.weight")
    shape = shape_of_gguf(write(tmp_path / "m.gguf", of_llama(**{"llama.vocab_size": 12}), tensors))
    assert (shape.tied, shape.vocabulary) == (False, 12)


def test_layers_that_differ_have_no_one_shape(tmp_path):
    fields = of_llama(**{"llama.attention.head_count_kv": [2, 2, 4]})
    with pytest.raises(ModelError, match="num_key_value_heads"):
        shape_of_gguf(write(tmp_path / "m.gguf", fields))


def test_a_gguf_file_is_found_by_its_path(tmp_path):
    path = write(tmp_path / "small.gguf", of_llama())
    assert find_shape(str(path)) == shape_of_gguf(path)
    with pytest.raises(ModelError, match=r"nosuch\.gguf: cannot be read: No such file or directory"):
        find_shape(str(tmp_path / "nosuch.gguf"))


def test_what_is_no_gguf_or_ends_early(tmp_path):
    whole = write(tmp_path / "whole.gguf", of_llama()).read_bytes()
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"GGML", whole[:9], whole[:-30], whole[:24] + b"\xff" * 40):
        broken.write_bytes(content)
        with pytest.raises(ModelError, match=r"its GGUF header cannot be read"):
            shape_of_gguf(broken)
