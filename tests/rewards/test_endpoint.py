"""The reward `endpoint`, asked through the panel, against real servers that are slow, busy, broken or away."""

import threading
import time
from contextlib import closing

import httpx
import pytest
from local_service import free_url, in_turn, saying, serving

from ullage.base.errors import ConfigError, ServiceError
from ullage.config.tree import Reward, RewardFunction
from ullage.rewards import service as service_module
from ullage.rewards.panel import Panel, summed
from ullage.rewards.pool import Request, Score, check_budget

KEY = "top-secret-5f1c"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(service_module, "FIRST_PAUSE_SECONDS", 0.01)


def panel(*functions, timeout_seconds=2.0):
    return closing(Panel(Reward(functions=list(functions), timeout_seconds=timeout_seconds, num_workers=1)))


def endpoint(url, *, weight=1.0, sources=(), **kwargs):
    return RewardFunction(name="endpoint", weight=weight, sources=list(sources), kwargs={"url": url, **kwargs})


def request(response, **changes):
    values = {"prompt": "p", "target": "1", "source": "s", "extra": {"secret": 1}, "response_length": 3} | changes
    return Request(response=response, **values)


def scored(opened, *requests):
    for each in requests:
        opened.submit(each)
    return opened.collect()


def scores_of(answer, *requests, timeout_seconds=2.0, **kwargs):
    with serving(answer) as service, panel(endpoint(service.url, **kwargs), timeout_seconds=timeout_seconds) as opened:
        return scored(opened, *requests), service


def test_a_completion_goes_out_and_its_score_comes_back():
    scores, service = scores_of(lambda body: {"score": len(body["response"]), "words": 2, "note": "x"}, request("abcd"))
    assert scores == [Score(4.0, {"endpoint": 4.0, "endpoint/words": 2.0}, None)]
    assert service.bodies == [{"prompt": "p", "response": "abcd", "target": "1", "source": "s"}]
    assert "authorization" not in service.headers[0]


def test_scores_keep_the_order_of_the_requests():
    requests = [request("x" * number, prompt=[{"role": "user", "content": "q"}]) for number in range(40)]
    scores, service = scores_of(lambda body: {"scores": [len(body["response"])]}, *requests)
    assert [score.total for score in scores] == [float(number) for number in range(40)]
    assert service.bodies[0]["prompt"] == [{"role": "user", "content": "q"}]


def test_batches():
    def answer(body):
        return {"scores": [{"score": len(item["response"])} if item["response"] else None for item in body["items"]]}

    requests = [request("x" * number) for number in range(30)]
    scores, service = scores_of(answer, *requests, batch_size=8, concurrency=1)
    assert [score.total for score in scores] == [None, *(float(number) for number in range(1, 30))]
    assert scores[0].error == "endpoint returned None"  # only its own sample
    sizes = [len(body["items"]) for body in service.bodies]
    assert sum(sizes) == 30
    assert max(sizes) == 8


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_busy_then_well(status):
    scores, service = scores_of(in_turn((status, "later", {}), (status, "later", {}), {"score": 1}), request("a"))
    assert scores == [Score(1.0, {"endpoint": 1.0}, None)]
    assert len(service.bodies) == 3


def test_retries_end():
    scores, service = scores_of(in_turn((500, "no luck\nat all", {})), request("a"), retries=2)
    assert len(service.bodies) == 3
    place = service.url
    error = f'endpoint at {place} answered HTTP 500 Internal Server Error: "no luck\\nat all" (3 attempts)'
    assert scores == [Score(None, {}, error)]


def test_a_service_that_asks_for_more_patience_than_there_is():
    scores, service = scores_of(in_turn((429, "slow down", {"retry-after": "30"})), request("a"), timeout_seconds=5.0)
    assert len(service.bodies) == 1
    assert scores[0].error.endswith('answered HTTP 429 Too Many Requests: "slow down"')


def test_the_pause_that_a_service_asks_for():
    said = in_turn((429, "", {"retry-after": "0.3"}), {"score": 1})
    started = time.monotonic()
    scores, service = scores_of(said, request("a"))
    assert scores[0].total == 1.0
    assert len(service.bodies) == 2
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize("status", [400, 401, 404, 307])
def test_other_answers_are_not_asked_again(status):
    scores, service = scores_of(in_turn((status, "", {"location": "http://127.0.0.1:9/"})), request("a"))
    assert len(service.bodies) == 1
    assert f"answered HTTP {status}" in scores[0].error


def test_a_hanging_service_costs_the_time_limit():
    scores, service = scores_of(lambda body: 60.0, request("a"), timeout_seconds=0.3)
    assert scores == [Score(None, {}, f"endpoint at {service.url} gave no answer within 0.3 s")]
    assert len(service.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"<html>hello</html>", "did not answer in JSON: <html>hello</html>"),
        (b"\xff\xfe", "did not answer in JSON: \ufffd\ufffd"),
        ({"points": 1}, "answered without 'score'"),
        ([1], "answered without 'score'"),
        ({"scores": [1, 2]}, "answered 2 scores for 1 completions"),
        (b"x" * (2 << 20), "answered with more than 1048576 bytes"),
    ],
)
def test_garbage(answer, error):
    scores, service = scores_of(in_turn(answer), request("a"))
    assert scores == [Score(None, {}, f"endpoint at {service.url} {error}")]


@pytest.mark.parametrize(
    ("value", "error"),
    [(b'{"score": NaN}', "returned NaN"), (b'{"score": "1"}', "returned the str '1'"), (b'{"score": null}', "None")],
)
def test_a_score_that_is_no_number(value, error):
    scores, _ = scores_of(in_turn(value), request("a"))
    assert scores[0].total is None
    assert scores[0].error.endswith(error)


def test_a_service_that_is_down_ends_the_run():
    url = free_url()
    with panel(endpoint(url, retries=2)) as opened:
        scores = scored(opened, request("a"), request("b"))
    assert [score.total for score in scores] == [None, None]
    with pytest.raises(ServiceError, match="2 of 2 rewards failed") as caught:
        check_budget(scores, 0.5)
    assert caught.value.code == 69
    assert f"endpoint at {url} cannot be reached: " in caught.value.cause
    assert "Connection refused (3 attempts)" in caught.value.cause
    assert caught.value.remedy == (
        "see that the service runs, or give it more timeout_seconds, or raise reward.max_failure_fraction"
    )


def test_nobody_waits_again_for_a_service_that_is_away():
    with panel(endpoint(free_url(), retries=2, concurrency=1)) as opened:
        errors = [score.error for score in scored(opened, *(request(str(number)) for number in range(3)))]
    assert [error.endswith("(3 attempts)") for error in errors] == [True, False, False]


def test_a_service_that_hangs_costs_less_from_the_second_question_on():
    limit, answers = 0.45, in_turn(*[60.0] * 6, {"score": 1}, 60.0)
    with (
        serving(answers) as service,
        panel(endpoint(service.url, concurrency=1, retries=2), timeout_seconds=limit) as opened,
    ):
        errors = [scored(opened, request("a"))[0].error for _ in range(8)]
    waits = [error and error.rpartition("within ")[2] for error in errors]
    short = "0.15 s, nor to an earlier question in 0.45 s"
    # One attempt's share; the whole time again for every third, in case it is only slow; all again once it answers.
    assert waits == ["0.45 s", short, short, "0.45 s", short, short, None, "0.45 s"]
    assert len(service.bodies) == 8


def test_one_slow_question_among_answers_is_no_silence():
    answers = in_turn(60.0, {"score": 1})
    with serving(answers) as service, panel(endpoint(service.url, concurrency=2), timeout_seconds=0.4) as opened:
        slow, quick = scored(opened, request("a"), request("b"))
        assert {slow.total, quick.total} == {None, 1.0}
        service.answer = in_turn((503, "", {}), {"score": 2})
        assert scored(opened, request("c"))[0].total == 2.0  # heard in full: it may try again


def test_as_many_connections_as_calls():
    together = threading.Barrier(110)

    def answer(body):
        together.wait(2)
        return {"score": 1}

    scores, _ = scores_of(answer, *(request("a") for _ in range(110)), concurrency=110, retries=0, timeout_seconds=2.5)
    assert [score.total for score in scores] == [1.0] * 110


def test_the_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("SCORER_KEY", KEY)
    answers = in_turn((401, f"not a key: Bearer {KEY}", {}), f"Bearer {KEY}".encode(), {"score": 1})
    with serving(answers) as service, panel(endpoint(service.url + "/x?q=1", api_key_env="SCORER_KEY")) as opened:
        scores = [scored(opened, request("a"))[0] for _ in range(3)]
        descriptions = opened.descriptions
    assert [headers["authorization"] for headers in service.headers] == [f"Bearer {KEY}"] * 3
    assert service.paths == ["/x?q=1"] * 3
    assert scores[0].error.endswith('answered HTTP 401 Unauthorized: "not a key: Bearer ***"')
    assert scores[1].error.endswith("did not answer in JSON: Bearer ***")
    assert scores[2].total == 1.0
    assert descriptions == [f"endpoint: scoring service at {service.url}/x"]
    assert KEY not in repr((scores, descriptions))


@pytest.mark.parametrize("key", ["sekret \n", "\tsekret"])
def test_white_space_around_a_key_is_no_part_of_it(key, monkeypatch):
    monkeypatch.setenv("SCORER_KEY", key)
    scores, service = scores_of(in_turn({"score": 1}), request("a"), api_key_env="SCORER_KEY")
    assert scores[0].total == 1.0
    assert service.headers[0]["authorization"] == "Bearer sekret"


@pytest.mark.parametrize("key", ["sek ret", "sek\nret", "sek\x01ret", "s\u00e9cret", "sek\u00a0ret"])
def test_a_key_that_no_header_can_carry(key, monkeypatch):
    monkeypatch.setenv("SCORER_KEY", key)
    with pytest.raises(ConfigError) as caught:
        Panel(Reward(functions=[endpoint("http://localhost", api_key_env="SCORER_KEY")]))
    assert caught.value.cause == "SCORER_KEY holds white space or other characters that no key has"
    assert "ret" not in str(caught.value)


@pytest.mark.parametrize("quoted", ["{}", "{!r}"])
def test_the_key_is_not_in_what_goes_wrong_with_http(quoted, monkeypatch):
    key = "it's\\a/key"
    monkeypatch.setenv("SCORER_KEY", key)
    line = f"HTTP/1.1 Bearer {quoted.format(key)}\r\n\r\n".encode()
    with saying(line) as (url, calls), panel(endpoint(url, api_key_env="SCORER_KEY", retries=1)) as opened:
        (score,) = scored(opened, request("a"))
    assert len(calls) == 2
    assert "cannot be reached: illegal status line" in score.error
    assert "***" in score.error
    assert "key" not in score.error


@pytest.mark.parametrize("said", ["it's\\\\a\\/key", "it's\\\\a/key"])
def test_the_key_is_not_in_quoted_json(said, monkeypatch):
    monkeypatch.setenv("SCORER_KEY", "it's\\a/key")
    scores, _ = scores_of(in_turn(f'{{"score": "{said}"}}'.encode()), request("a"), api_key_env="SCORER_KEY")
    assert scores[0].error == "endpoint returned the str '***'"


def test_what_can_never_succeed_is_not_tried_again(monkeypatch):
    calls = []

    def refuse(*arguments, **options):
        calls.append(arguments)
        raise httpx.LocalProtocolError("Illegal header value")

    monkeypatch.setattr(httpx.Client, "stream", refuse)
    with panel(endpoint("http://localhost")) as opened:
        (score,) = scored(opened, request("a"))
    assert score.error == "endpoint at http://localhost cannot be asked: Illegal header value"
    assert len(calls) == 1


def test_a_key_that_is_not_there(monkeypatch):
    monkeypatch.delenv("SCORER_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"takes its key from is not set: SCORER_KEY\n"):
        Panel(Reward(functions=[endpoint("http://localhost", api_key_env="SCORER_KEY")]))


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({}, r"cannot use kwargs.url: Field required\nit takes: url, api_key_env, retries, concurrency, batch_size"),
        ({"url": "http://localhost", "timeout": 3}, "cannot use kwargs.timeout: Extra inputs are not permitted"),
        ({"url": "http://localhost", "retries": -1}, "cannot use kwargs.retries: .* greater than or equal to 0"),
        ({"url": "localhost:80"}, "the reward endpoint has no usable URL"),
        ({"url": "ftp://localhost"}, "the reward endpoint has no usable URL"),
        ({"url": "http://me:pw@localhost"}, "holds a password"),
    ],
)
def test_kwargs_that_cannot_be_used(kwargs, text):
    with pytest.raises(ConfigError, match=text) as caught:
        Panel(Reward(functions=[RewardFunction(name="endpoint", kwargs=kwargs)]))
    assert "pw" not in str(caught.value)


def test_functions_and_services_together(tmp_path):
    (tmp_path / "endpoint.py").write_text("def score(response): return len(response)")
    local = RewardFunction(path=str(tmp_path / "endpoint.py"), weight=2.0)
    with serving(lambda body: {"score": 0.5}) as service:
        functions = [
            endpoint(service.url, weight=-4.0),
            local,
            endpoint(service.url, sources=["other"]),
        ]
        with panel(*functions) as opened:
            scores = scored(opened, request("abc"), request("abc", source="other"))
            assert opened.labels == ["endpoint_2", "endpoint", "endpoint_3"]
            assert opened.descriptions[0].endswith(", weight -4")
            assert opened.descriptions[2].endswith(", for other")
    assert scores[0] == Score(2 * 3 - 4 * 0.5, {"endpoint": 3.0, "endpoint_2": 0.5}, None)
    assert scores[1] == Score(4.5, {"endpoint": 3.0, "endpoint_2": 0.5, "endpoint_3": 0.5}, None)


def test_no_functions_at_all():
    with panel() as opened:
        assert opened.labels == []
        assert scored(opened, request("a"), request("b")) == [Score(0.0, {}, None)] * 2


def test_a_sum_of_scores():
    assert summed([Score(1.0, {"a": 1.0}, None), Score(2.0, {"b": 2.0}, None, "x")]) == Score(
        3.0, {"a": 1.0, "b": 2.0}, None, "x"
    )
    failed = Score(None, {}, "down")
    assert summed([Score(1.0, {"a": 1.0}, None), failed]) == Score(None, {"a": 1.0}, "down")
    huge = Score(1.7e308, {}, None)
    assert summed([huge, huge]) == Score(None, {}, "the weighted sum is inf")
