"""`ullage serve` with a real OpenAI client: the trainer's tokens and log-probs, whole and streamed, alone and many."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
import torch

from experience_samples import load, rollouts_of
from ullage.batch.pack import Limits
from ullage.workers.passes import stage_logprobs

MESSAGES = [{"role": "user", "content": "2+3=?"}]
MODEL = "llama"
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@dataclass
class Drawn:
    """A choice as the engine's samples are."""

    group: int
    token_ids: list
    logprobs: list
    finish_reason: str


def trainer_logprobs(folder, prompts, samples):
    stage = rollouts_of(prompts, samples)
    valid = torch.ones(len(samples), dtype=torch.bool)
    experience = stage.scored(rewards_N=torch.zeros(len(samples)), valid_N=valid)
    order = [torch.arange(len(samples))]
    got = stage_logprobs(experience, order, load(folder, "float32"), Limits(max_tokens=4096), 1.0)
    return got, stage.rollout_logprobs_NT


def test_models_and_health_name_what_is_served(client, server):
    [model] = client.models.list()
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 1024)
    assert client.models.retrieve(MODEL).id == MODEL
    health = server.health()
    assert (health["status"], health["model"], health["slots"]) == ("ok", MODEL, 4)
    assert health["total_pages"] == 4 * (1024 // 16 + 1)


def test_greedy_tokens_are_those_of_transformers(client, tiny_model, tokenizer):
    from transformers import AutoModelForCausalLM

    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = AutoModelForCausalLM.from_pretrained(tiny_model).generate(**ids, do_sample=False, max_new_tokens=24)
    expected = out[0, ids["input_ids"].shape[1] :].tolist()
    got = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=24, extra_body=IDS
    )
    assert got.prompt_token_ids == ids["input_ids"][0].tolist()
    assert got.choices[0].token_ids == expected
    assert got.choices[0].message.content == tokenizer.decode(expected, skip_special_tokens=True)
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == ("stop" if expected[-1] == tokenizer.eos_token_id else "length")
    assert got.usage.prompt_tokens == ids["input_ids"].shape[1]
    assert got.usage.completion_tokens == len(expected)


def test_log_probs_are_the_trainers(client, tiny_model):
    prompts = ["2+3=", "count to ten, ", "7"]
    got = client.completions.create(model=MODEL, prompt=prompts, n=3, seed=4, max_tokens=40, logprobs=0, extra_body=IDS)
    samples = [
        Drawn(choice.index // 3, choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason)
        for choice in got.choices
    ]
    trainer, served = trainer_logprobs(tiny_model, [got.choices[3 * i].prompt_token_ids for i in range(3)], samples)
    assert (trainer - served).abs().max() <= 1e-5
    assert {choice.finish_reason for choice in got.choices} == {"stop", "length"}


def test_chat_log_probs_name_every_token(client, tokenizer):
    got = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=8, seed=1, max_tokens=60, logprobs=True, extra_body=IDS
    )
    ended = [choice for choice in got.choices if choice.finish_reason == "stop"]
    assert ended, "some answers end by themselves"
    for choice in got.choices:
        said = [entry.token for entry in choice.logprobs.content]
        assert said == [tokenizer.decode([token]) for token in choice.token_ids]
        assert all(entry.bytes == list(entry.token.encode()) for entry in choice.logprobs.content)
        text = "".join(token for token in said if token not in tokenizer.all_special_tokens)
        assert text == choice.message.content
    assert ended[0].logprobs.content[-1].token == "<eos>"


def test_every_form_of_prompt(client, tokenizer):
    texts = ["2+3=", "5-1="]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    common = {"model": MODEL, "seed": 3, "max_tokens": 6, "extra_body": IDS}
    alone = [client.completions.create(prompt=text, **common).choices[0] for text in texts]
    for prompt in (texts, ids):
        got = client.completions.create(prompt=prompt, **common).choices
        assert [choice.token_ids for choice in got] == [choice.token_ids for choice in alone]
        assert [choice.prompt_token_ids for choice in got] == ids
        assert [choice.index for choice in got] == [0, 1]
    [single] = client.completions.create(prompt=ids[1], **common).choices
    assert single.token_ids == alone[1].token_ids


def test_content_in_parts_and_null_fields_read_as_text(client):
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3=?"}]
    common = {"model": MODEL, "seed": 2, "max_tokens": 8, "extra_body": IDS}
    whole = client.chat.completions.create(messages=MESSAGES, **common)
    split = client.chat.completions.create(messages=[{"role": "user", "content": parts, "name": None}], **common)
    assert split.prompt_token_ids == whole.prompt_token_ids
    assert split.choices[0].token_ids == whole.choices[0].token_ids
    followed = [*MESSAGES, whole.choices[0].message.model_dump(), {"role": "user", "content": "1+1=?"}]
    assert client.chat.completions.create(messages=followed, **common).usage.prompt_tokens > 11


def test_a_seed_repeats_and_choices_do_not_depend_on_each_other(client):
    def ids(**options):
        got = client.completions.create(model=MODEL, prompt="2+", max_tokens=12, extra_body=IDS, **options)
        return [choice.token_ids for choice in got.choices]

    four = ids(seed=7, n=4)
    assert len({tuple(one) for one in four}) == 4
    assert ids(seed=7, n=4) == four
    assert ids(seed=7) == four[:1]
    assert ids(seed=8) != four[:1]
    assert ids() != ids()


def test_top_k_and_top_p_truncate(client):
    greedy, first, nucleus = (
        client.completions.create(model=MODEL, prompt="2+", max_tokens=20, seed=1, extra_body={**IDS, **extra}, **how)
        for how, extra in (({"temperature": 0}, {}), ({}, {"top_k": 1}), ({"top_p": 1e-6}, {}))
    )
    assert greedy.choices[0].token_ids == first.choices[0].token_ids == nucleus.choices[0].token_ids


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_stream_says_what_the_whole_says(client, kind):
    def ask(**options):
        common = {"model": MODEL, "n": 2, "seed": 11, "max_tokens": 50, "extra_body": IDS, **options}
        if kind == "chat":
            return client.chat.completions.create(messages=MESSAGES, logprobs=True, **common)
        return client.completions.create(prompt="2+3=", logprobs=0, **common)

    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        ids = [token for part in parts for token in getattr(part, "token_ids", None) or []]
        assert ids == choice.token_ids
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        assert parts[-1].finish_reason, "it comes last"
        assert len([part for part in parts if getattr(part, "token_ids", None)]) > 10, "token by token"
        if kind == "chat":
            assert parts[0].delta.role == "assistant"
            assert "".join(part.delta.content or "" for part in parts) == choice.message.content
            entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
            assert entries == choice.logprobs.content
            assert chunks[0].prompt_token_ids == whole.prompt_token_ids
        else:
            assert "".join(part.text for part in parts) == choice.text
            entries = [entry for part in parts if part.logprobs for entry in part.logprobs.token_logprobs]
            assert entries == choice.logprobs.token_logprobs
            assert parts[0].prompt_token_ids == choice.prompt_token_ids


def test_stop_strings_end_each_choice_where_they_begin(client, tokenizer):
    def ask(**options):
        common = {"model": MODEL, "prompt": "2+", "n": 4, "seed": 5, "max_tokens": 40, "extra_body": IDS}
        return client.completions.create(**common, **options)

    free = ask().choices
    stop = free[0].text[5:8]
    assert len(tokenizer(stop)["input_ids"]) == 3, "across token borders"
    stopped = ask(stop=["no such text", stop]).choices
    for before, after in zip(free, stopped, strict=True):
        if stop not in before.text:
            assert after.token_ids == before.token_ids
            continue
        end = before.text.index(stop)
        assert (after.text, after.finish_reason) == (before.text[:end], "stop")
        shown = tokenizer.decode(after.token_ids, skip_special_tokens=True)
        assert shown == before.text[: end + 3], "the token that completes it is the last"
    streamed = "".join(part.text for chunk in ask(stop=stop, stream=True) for part in chunk.choices if part.index == 0)
    assert streamed == stopped[0].text


def test_sixty_four_clients_at_once_get_what_each_would_get_alone(client, server):
    def ask(number):
        got = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"{number}+{number}=?"}],
            seed=number,
            max_tokens=8 + number % 5,
            temperature=0.5 + number % 3,
            logprobs=True,
            extra_body=IDS,
        )
        [choice] = got.choices
        return choice.token_ids, [entry.logprob for entry in choice.logprobs.content]

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(ask, range(64)))
    for number in range(0, 64, 9):
        tokens, logprobs = ask(number)
        assert tokens == together[number][0]
        assert logprobs == pytest.approx(together[number][1], rel=0, abs=1e-6)
    health = server.wait_until(lambda health: not health["running"] and not health["waiting"])
    assert health["free_pages"] == health["total_pages"]


LONG = {"model": MODEL, "prompt": "2+", "max_tokens": 1000, "ignore_eos": True}


def test_a_client_that_leaves_a_stream_frees_its_slot(server):
    before = server.health()["drawn_tokens"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "n": 3, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.wait_until(lambda health: health["running"] == 3)["free_pages"] < 260
    health = server.wait_until(lambda health: health["running"] + health["waiting"] == 0)
    assert health["free_pages"] == health["total_pages"]
    assert health["drawn_tokens"] - before < 2000, "long before their end"


def test_a_client_that_leaves_without_a_word_frees_its_slots_and_its_place_in_the_queue(server):
    before = server.health()["drawn_tokens"]
    with httpx.Client() as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post(f"{server.url}/v1/completions", json={**LONG, "n": 8}, timeout=0.5)
    health = server.wait_until(lambda health: health["running"] + health["waiting"] == 0)
    assert health["free_pages"] == health["total_pages"]
    assert health["drawn_tokens"] - before < 7000


def test_a_connection_that_ends_in_the_middle_of_its_body_does_no_harm(client, server):
    before = server.log
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: 100\r\n\r\n{")
    assert client.completions.create(model=MODEL, prompt="1", max_tokens=2).usage.prompt_tokens == 1
    assert server.log == before
