"""Every request that is refused says why, in the form clients know, with its status; none leaves a traceback."""

import json
import socket
from pathlib import Path

import httpx
import pytest

from ullage.serve.request import IGNORED, NEUTRAL, ChatBody, CompletionBody

PROMPT = {"prompt": "2+"}
CHAT = {"messages": [{"role": "user", "content": "2+"}]}


def ask(server, body, path="/v1/completions", **options):
    return httpx.post(f"{server.url}{path}", content=json.dumps(body), headers=JSON, **options)


JSON = {"content-type": "application/json"}


def problem(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({}, "prompt", "prompt: Field required"),
        ({"prompt": ""}, "prompt", "must be a text, a list of texts, a list of token ids"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": [[]]}, "prompt", "must not be empty"),
        ({"prompt": [5, "a"]}, "prompt", "must be a text"),
        ({"prompt": [5, -1]}, "prompt", "must be a text"),
        ({"prompt": [True]}, "prompt", "must be a text"),
        ({"prompt": [36]}, "prompt", "token id 36 of 36"),
        ({"prompt": "2" * 1100}, "prompt", "the context is 1024 tokens: the prompt has 1100 and max_tokens is 16"),
        ({**PROMPT, "max_tokens": 1023}, "prompt", "the prompt has 2 and max_tokens is 1023"),
        ({**PROMPT, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({**PROMPT, "max_tokens": "9"}, "max_tokens", "valid integer"),
        ({**PROMPT, "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({**PROMPT, "temperature": 1e-9}, "temperature", "0 (greedy) or at least 0.01"),
        ({**PROMPT, "temperature": "hot"}, "temperature", "valid number"),
        ({**PROMPT, "temperature": True}, "temperature", "valid number"),
        ({**PROMPT, "top_p": 0}, "top_p", "greater than"),
        ({**PROMPT, "top_k": -2}, "top_k", "greater than or equal to -1"),
        ({**PROMPT, "n": 0}, "n", "greater than or equal to 1"),
        ({**PROMPT, "n": 129}, "n", "less than or equal to 128"),
        ({"prompt": ["2"] * 1025}, "n", "1025 choices in one request: at most 1024"),
        ({**PROMPT, "stop": ""}, "stop", "none of them empty"),
        ({**PROMPT, "stop": ["x"] * 17}, "stop", "up to 16"),
        ({**PROMPT, "stream": 1}, "stream", "valid boolean"),
        ({**PROMPT, "stream_options": {"usage": True}}, "stream_options", "stream_options.usage"),
        ({**PROMPT, "seed": 1.5}, "seed", "valid integer"),
        ({**PROMPT, "logprobs": 1}, "logprobs", "logprobs: 0 gives it"),
        ({**PROMPT, "echo": True}, "echo", "return_token_ids gives its token ids"),
        ({**PROMPT, "best_of": 4}, "best_of", "not ranked"),
        ({**PROMPT, "suffix": "x"}, "suffix", "only continues"),
        ({**PROMPT, "presence_penalty": 0.5}, "presence_penalty", "the model's own distribution"),
        ({**PROMPT, "logit_bias": {"5": 1}}, "logit_bias", "the model's own distribution"),
        ({**PROMPT, "max_token": 1}, "max_token", "unknown parameter; did you mean max_tokens?"),
        ({**PROMPT, "messages": []}, "messages", "unknown parameter"),
    ],
)
def test_completions_say_what_is_wrong(server, given, param, says):
    error = problem(ask(server, given), 400)
    assert says in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({}, "messages", "Field required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hello"}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0.content: Field required"),
        (
            {"messages": [{"role": "wizard", "content": "x"}]},
            "messages",
            "'system', 'developer', 'user' or 'assistant'",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages", "messages.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "messages.0.content: must be text, or a list of parts of type text",
        ),
        ({**CHAT, "tools": [{"type": "function"}]}, "tools", "calls are not read out of answers"),
        ({**CHAT, "response_format": {"type": "json_object"}}, "response_format", "not constrained"),
        ({**CHAT, "top_logprobs": 5}, "top_logprobs", "the log-prob of the drawn token"),
        ({**CHAT, "logprobs": 1}, "logprobs", "valid boolean"),
        ({**CHAT, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "set by the server"),
        ({"messages": [{"role": "user", "content": "2" * 1100}]}, "messages", "the context is 1024 tokens"),
        ({**CHAT, "max_completion_tokens": 5000}, "messages", "max_tokens is 5000"),
        ({**CHAT, "reasoning_effort": "high"}, "reasoning_effort", "unknown parameter"),
    ],
)
def test_chats_say_what_is_wrong(server, given, param, says):
    error = problem(ask(server, given, "/v1/chat/completions"), 400)
    assert says in error["message"]
    assert error["param"] == param


def test_what_changes_nothing_is_accepted(server):
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "echo": False, "best_of": 1,
        "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "suffix": None, "logprobs": None, "stop": [],
    }  # fmt: skip
    plain = {**PROMPT, "seed": 1, "max_tokens": 6}
    texts = [ask(server, body).json()["choices"][0]["text"] for body in (plain, {**plain, **harmless})]
    assert texts[0] == texts[1] != ""
    smile = ask(server, {"prompt": "\N{GRINNING FACE}", "max_tokens": 1})  # sent as a whole surrogate pair
    assert smile.json()["usage"]["prompt_tokens"] == 1
    assert ask(server, {**CHAT, "tools": [], "tool_choice": "none", "max_tokens": 2}, "/v1/chat/completions").is_success


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\uD800"}',
        b'{"prompt": "\\ud83d \\ude00"}',
    ],
)
def test_bodies_that_are_no_object(server, raw):
    error = problem(httpx.post(f"{server.url}/v1/completions", content=raw, headers=JSON), 400)
    assert error["message"].startswith("the body")


def test_unknown_models_paths_methods_and_types(server):
    error = problem(ask(server, {**PROMPT, "model": "gpt-4"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "no model 'gpt-4': this server has 'llama'"
    assert problem(httpx.get(f"{server.url}/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    assert problem(httpx.get(f"{server.url}/v1/embeddings"), 404)["message"] == "no such path: /v1/embeddings"
    assert problem(httpx.get(f"{server.url}/v1/completions/"), 404)
    wrong = httpx.get(f"{server.url}/v1/completions")
    assert problem(wrong, 405)["message"] == "/v1/completions does not answer to GET"
    assert wrong.headers["allow"] == "POST"
    form = httpx.post(f"{server.url}/v1/completions", data=PROMPT)
    assert problem(form, 415)["message"] == "Content-Type must be application/json"


def test_no_page_in_a_browser_gets_in(server):
    """Neither under a name of its own (DNS rebinding), nor from another origin (no CORS headers anywhere)."""
    port = server.url.rpartition(":")[2]
    for path in ("/health", "/v1/models", "/v1/completions", "/nowhere"):
        refused = httpx.get(f"{server.url}{path}", headers={"host": f"evil.example:{port}"})
        assert problem(refused, 403)["code"] == "wrong_host"
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST"):
        assert httpx.get(f"{server.url}/health", headers={"host": host}).is_success
    asked = httpx.options(f"{server.url}/v1/completions", headers={"origin": "https://evil.example"})
    assert asked.status_code == 405
    answered = httpx.get(f"{server.url}/v1/models", headers={"origin": "https://evil.example"})
    assert not [name for name in (*asked.headers, *answered.headers) if name.startswith("access-control")]


def raw_request(server, head, *parts):
    """The answer to a request written by hand."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + head)
        for part in parts:
            raw.sendall(part)
        answer = b""
        while not answer.endswith(b"}}"):
            answer += raw.recv(65536)
    return answer


def test_bodies_that_are_too_large(server):
    announced = raw_request(server, b"Content-Length: 16777217\r\n\r\n")
    assert announced.startswith(b"HTTP/1.1 413 ")
    assert b"larger than 16777216 bytes" in announced
    # Not announced: each part is read, and the one that is too much is the last.
    part = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    grown = raw_request(server, b"Transfer-Encoding: chunked\r\n\r\n", *([part] * 16), b"1\r\n \r\n")
    assert grown.startswith(b"HTTP/1.1 413 ")


def test_every_refusal_is_one_line_of_the_log(server):
    before = len(server.log.splitlines())
    ask(server, {**PROMPT, "model": "a\nb\x1b[31mc\u202e"})
    [line] = server.log.splitlines()[before:]
    assert line.startswith("404 POST /v1/completions: no model ")
    assert line.isprintable()


def test_the_page_names_every_parameter():
    page = (Path(__file__).parent.parent.parent / "docs" / "serve.md").read_text()
    read = {*CompletionBody.model_fields, *ChatBody.model_fields}
    for name in {*IGNORED, *NEUTRAL, *read} - {"stream_options"}:
        assert f"`{name}`" in page, name
