"""Many real OpenAI clients at once, half of which leave in the middle; and what a client is told that asks wrongly."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import BadRequestError, NotFoundError

MODEL = "llama"


def test_half_of_sixty_four_clients_leave_and_the_others_get_their_answers(client, server):
    def ask(number):
        return client.completions.create(
            model=MODEL, prompt=f"{number}+", seed=number, max_tokens=10, extra_body={"ignore_eos": True}
        ).choices[0]

    def leave(number):
        """After the first token of a thousand."""
        endless = {"seed": number, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
        with client.completions.create(model=MODEL, prompt=f"{number}+", stream=True, **endless) as stream:
            next(iter(stream))

    before = server.health()["drawn_tokens"]
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda number: leave(number) if number % 2 else ask(number), range(64)))
    health = server.wait_until(lambda health: not health["running"] and not health["waiting"])
    assert health["free_pages"] == health["total_pages"]
    assert health["drawn_tokens"] - before < 32 * 500, "long before their end"
    for number in (0, 30, 62):
        assert answers[number].text == ask(number).text
        assert answers[number].finish_reason == "length"


@pytest.mark.parametrize(
    ("given", "kind", "param", "says"),
    [
        ({"max_tokens": 0}, BadRequestError, "max_tokens", "greater than or equal to 1"),
        ({"temperature": -0.5}, BadRequestError, "temperature", "greater than or equal to 0"),
        ({"prompt": "2" * 1100}, BadRequestError, "prompt", "the context is 1024 tokens"),
        ({"extra_body": {"tempratur": 1}}, BadRequestError, "tempratur", "did you mean temperature?"),
        ({"model": "gpt-4"}, NotFoundError, "model", "no model 'gpt-4': this server has 'llama'"),
    ],
)
def test_a_client_learns_what_was_wrong(client, given, kind, param, says):
    with pytest.raises(kind) as refused:
        client.completions.create(**{"model": MODEL, "prompt": "2+", **given})
    assert says in refused.value.message
    assert refused.value.param == param
    assert client.completions.create(model=MODEL, prompt="2+", max_tokens=1).usage.completion_tokens == 1
