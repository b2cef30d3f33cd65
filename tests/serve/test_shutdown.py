"""A server from its start to its end: with a key, with a full queue, asked to stop in the middle of answers."""

import json
import os
import signal

import httpx
import pytest
from openai import AuthenticationError, OpenAI, RateLimitError

STREAM = {"prompt": "2+", "ignore_eos": True, "stream": True, "seed": 1}
KEY = "secret-1"
ROUTES = [
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/llama"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/nowhere"),
]


def events(lines):
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_sigterm_lets_a_stream_end(forks, tiny_model):
    server = forks.serve(tiny_model, "--slots", 2)
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**STREAM, "max_tokens": 150}) as response:
        lines = response.iter_lines()
        first = next(lines)
        os.kill(server.pid, signal.SIGTERM)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    choices = [event["choices"][0] for event in events([first, *rest])]
    assert len("".join(choice["text"] for choice in choices)) > 100
    assert choices[-1]["finish_reason"] == "length"
    assert forks.ask({"wait": server.pid}) == 0
    with pytest.raises(httpx.ConnectError):
        server.health()


def test_a_server_with_a_key_and_one_slot(forks, tiny_model):
    """One process for three stories: each start and end of one takes seconds."""
    server = forks.serve(tiny_model, "--slots", 1, "--max-waiting", 61, ULLAGE_API_KEY=KEY)
    check_keys(server)
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        check_queue(server, client)
        check_interrupt(server, client)


def check_keys(server):
    with httpx.Client(base_url=server.url) as client:
        for method, path in ROUTES:
            for given in (None, "Bearer wrong", KEY, "Bearer", b"Bearer secr\xe9t", f"Basic {KEY}"):
                response = client.request(method, path, headers={} if given is None else {"authorization": given})
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (401, "invalid_api_key")
                assert error["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"
    with pytest.raises(AuthenticationError, match="wrong API key"):
        OpenAI(base_url=f"{server.url}/v1", api_key="secret-2").models.list()
    assert OpenAI(base_url=f"{server.url}/v1", api_key=KEY).models.retrieve("llama").id == "llama"
    assert KEY not in server.log


def check_queue(server, client):
    """One answer runs, sixty wait: many more are sent away, and welcome again once those are gone."""
    openai = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    long = {**STREAM, "max_tokens": 1000, "n": 61}
    with client.stream("POST", "/v1/completions", json=long) as response:
        lines = response.iter_lines()  # kept: without it httpx would hang up
        next(lines)
        with pytest.raises(RateLimitError, match=r"\d\d choices wait already, at most 61 may") as refused:
            openai.completions.create(model="llama", prompt="1", n=40)
        assert refused.value.response.headers["retry-after"] == "1"
        assert (refused.value.code, refused.value.type) == ("queue_full", "rate_limit_error")
    while client.get("/health").json()["waiting"]:
        pass
    assert len(openai.completions.create(model="llama", prompt="1", max_tokens=2, n=40).choices) == 40


def check_interrupt(server, client):
    """A running answer and a waiting one are told, and the exit code says that it was an interrupt."""
    body = {**STREAM, "max_tokens": 1000, "n": 20}
    with client.stream("POST", "/v1/completions", json=body) as running:
        first = running.iter_lines()
        next(first)
        with client.stream("POST", "/v1/completions", json=body) as waiting:
            assert server.stop(signal.SIGINT) == 130
            for lines in (first, waiting.iter_lines()):
                error = events(lines)[-1]["error"]
                assert (error["message"], error["code"]) == ("the server is shutting down", "stopping")
    assert server.log.splitlines()[-1] == "ullage: error: interrupted"
