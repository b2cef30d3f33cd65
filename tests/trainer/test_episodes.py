"""Episodes: the tokens of every turn as they were sampled, the environment's between them without loss."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from experience_samples import load, make_config, make_train_batch, stay_double
from make_tiny_model import make_tiny_model, make_tokenizer
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.base.errors import ServiceError
from ullage.base.seeds import derive
from ullage.batch.pack import Limits
from ullage.config.tree import Data, Reward
from ullage.data.prompts import Prompt
from ullage.environments import Turn, tools
from ullage.rewards.panel import Panel
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import Sample, Sampling
from ullage.trainer.collect import to_rollouts
from ullage.trainer.episodes import Episodes, FollowUp
from ullage.trainer.generate import TRAINING, Generator
from ullage.workers.actor import Actor
from ullage.workers.passes import stage_logprobs

ALPHABET = "012?:\nuat="
"""Few symbols: an answer of a random model soon ends by itself."""
EOS = 2
MAX_TOKENS = 40
SEEDS = [[derive(7, group, index) for index in range(4)] for group in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("few") / "model", alphabet=ALPHABET, hidden=64)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, "float32")


def chat(question, token_ids):
    messages = [{"role": "user", "content": question}]
    return Prompt(id=0, token_ids=token_ids, prompt=messages, target=None, source="s", extra={})


def prompts_of(model, *texts):
    return [
        Prompt(id=i, token_ids=tuple(model.tokenizer(text)["input_ids"]), prompt=text, target="1", source="s", extra={})
        for i, text in enumerate(texts)
    ]


class Silent:
    """A recorder that records nothing but events."""

    def __init__(self):
        self.events = []

    def event(self, text):
        self.events.append(text)

    def phase(self, name):
        return nullcontext()

    def progress(self, done, total, note):
        pass


class ScriptedPool:
    """An environment without processes: `script(row, actions so far)` gives the turn, or raises an error's text."""

    name = "scripted"
    tool_schemas = ()

    def __init__(self, script, max_episodes=64):
        self.script, self.rows, self.actions, self.results, self.ended = script, [], {}, [], []
        self.max_episodes, self.live, self.most = max_episodes, set(), 0

    def reset(self, row):
        self.rows.append(row)
        self.actions[len(self.rows) - 1] = []
        self.results.append((len(self.rows) - 1, None, None))
        self.live.add(len(self.rows) - 1)
        self.most = max(self.most, len(self.live))
        return len(self.rows) - 1

    def step(self, episode, action):
        self.actions[episode].append(action)
        try:
            turn = self.script(self.rows[episode], self.actions[episode])
            self.results.append((episode, turn, None))
            self.live -= {episode} if turn.done else set()
        except RuntimeError as error:
            self.results.append((episode, None, str(error)))
            self.live.remove(episode)

    def end(self, episode):
        self.ended.append(episode)
        self.live.remove(episode)
        self.results.append((episode, None, None))

    def collect(self):
        results, self.results = self.results, []
        return results


def make_episodes(model, script, *, max_turns=4, slots=16, reward=None, data=None, max_episodes=64):
    engine = Engine(model, slots=slots, max_length=8 + MAX_TOKENS)
    reward = Reward.model_validate(reward or {})
    panel = Panel(reward)
    generator = Generator(engine, panel, model.tokenizer, reward, Silent(), Solo(), lambda: None)
    pool = ScriptedPool(script, max_episodes)
    follow_up = FollowUp(model.tokenizer, Data.model_validate(data or {}))
    return Episodes(generator, pool, follow_up, max_turns=max_turns), pool


def echo(row, actions):
    """Goes on with the number of the turn."""
    return Turn(f"={len(actions)}", reward=0.25, metrics={"characters": len(actions[-1])})


def run(episodes, prompts, sampling=None):
    return episodes.run(prompts, SEEDS[: len(prompts)], sampling or Sampling(max_tokens=MAX_TOKENS), TRAINING)


@pytest.fixture(scope="module")
def played(model):
    prompts = prompts_of(model, "0=", "12?=")
    episodes, pool = make_episodes(model, echo)
    return prompts, pool, *run(episodes, prompts)


def spans_of(sample):
    """(sampled, token ids) of each stretch."""
    stretches = []
    for token, sampled in zip(sample.token_ids, sample.mask or [True] * len(sample.token_ids), strict=True):
        if not stretches or stretches[-1][0] != sampled:
            stretches.append((sampled, []))
        stretches[-1][1].append(token)
    return stretches


def test_turns_and_observations_alternate(model, played):
    _, pool, samples, _, _ = played
    assert [(sample.group, sample.index) for sample in samples] == [(g, i) for g in range(2) for i in range(4)]
    assert {sample.finish_reason for sample in samples} == {"turns", "length"}
    for number, sample in enumerate(samples):
        spans = spans_of(sample)
        assert [sampled for sampled, _ in spans] == [True, False] * (len(spans) // 2) + [True]
        turns = [tokens for sampled, tokens in spans if sampled]
        assert [model.tokenizer.decode(turn, skip_special_tokens=True) for turn in turns] == pool.actions[number]
        assert all(turn[-1] == EOS and EOS not in turn[:-1] for turn in turns[:-1])
        heard = [tokens for sampled, tokens in spans if not sampled]
        assert heard == [model.tokenizer(f"={turn + 1}")["input_ids"] for turn in range(len(heard))]
        assert len(turns) == 4 if sample.finish_reason == "turns" else len(turns) <= 4


def test_what_was_not_sampled_has_no_log_prob(played):
    for sample in played[2]:
        mask = sample.mask or (True,) * len(sample.token_ids)
        assert all((logprob < 0) == sampled for logprob, sampled in zip(sample.logprobs, mask, strict=True))
        assert mask[-1]
        assert sample.num_sampled == sum(mask)


def test_no_episode_is_longer_than_a_response_may_be(played):
    lengths = [len(sample.token_ids) for sample in played[2]]
    assert max(lengths) <= MAX_TOKENS
    assert any(sample.mask is not None and sum(sample.mask) < len(sample.mask) for sample in played[2])


def test_rewards_of_all_turns_are_summed(played):
    _, pool, samples, scores, texts = played
    for number, (score, text) in enumerate(zip(scores, texts, strict=True)):
        actions = pool.actions[number]
        assert score.total == 0.25 * len(actions)
        assert score.parts == {
            "environment": 0.25 * len(actions),
            "environment/turns": len(actions),
            "environment/characters": sum(map(len, actions)),
        }
        lines = [line for turn, action in enumerate(actions) for line in (action, f"={turn + 1}")]
        assert text == "\n".join(lines[: len(spans_of(samples[number]))])


def test_samples_of_a_prompt_meet_the_same_environment(played):
    prompts, pool, *_ = played
    assert [row.seed for row in pool.rows] == [SEEDS[0][0]] * 4 + [SEEDS[1][0]] * 4
    assert [(row.prompt, row.target, row.source) for row in pool.rows[::4]] == [(p.prompt, "1", "s") for p in prompts]


def test_an_episode_of_one_turn_is_a_plain_sample(model):
    prompts = prompts_of(model, "0=", "12?=")
    episodes, _ = make_episodes(model, lambda row, actions: Turn(reward=1.0, done=True))
    samples, scores, texts = run(episodes, prompts)
    expected, _, plain_texts = run(episodes.generator, prompts)
    assert samples == expected
    assert texts == plain_texts
    assert [score.total for score in scores] == [1.0] * 8


@pytest.mark.invariant
@pytest.mark.parametrize("slots", [1, 3])
def test_slots_change_nothing(model, played, slots):
    samples, _, texts = run(make_episodes(model, echo, slots=slots)[0], played[0])
    assert texts == played[4]
    for sample, expected in zip(samples, played[2], strict=True):
        assert (sample.token_ids, sample.mask) == (expected.token_ids, expected.mask)
        assert sample.logprobs == pytest.approx(expected.logprobs, rel=0, abs=1e-6)


@pytest.mark.invariant
@pytest.mark.parametrize(("max_episodes", "most"), [(1, 1), (3, 3), (5, 4), (7, 4)])
def test_waves_change_nothing(model, played, max_episodes, most):
    """No more episodes live at once than the pool can play, in waves of one size: 8 of at most 5 are 4 and 4."""
    episodes, pool = make_episodes(model, echo, max_episodes=max_episodes)
    samples, scores, texts = run(episodes, played[0])
    assert (pool.most, pool.live, pool.results) == (most, set(), [])
    assert (texts, scores) == (played[4], played[3])
    assert [row.seed for row in pool.rows] == [row.seed for row in played[1].rows]
    for sample, expected in zip(samples, played[2], strict=True):
        assert (sample.group, sample.index, sample.token_ids, sample.mask, sample.finish_reason) == (
            expected.group, expected.index, expected.token_ids, expected.mask, expected.finish_reason
        )  # fmt: skip
        assert sample.logprobs == pytest.approx(expected.logprobs, rel=0, abs=1e-6)


def test_a_lost_episode_in_one_wave_costs_no_other(model, played):
    def breaks(row, actions):
        if row.seed == SEEDS[0][0]:
            raise RuntimeError("gone")
        return echo(row, actions)

    episodes, _ = make_episodes(model, breaks, max_episodes=3)
    samples, scores, _ = run(episodes, played[0])
    assert [score.error for score in scores] == ["environment scripted: gone"] * 4 + [None] * 4
    assert [sample.token_ids for sample in samples[4:]] == [sample.token_ids for sample in played[2][4:]]


def test_turns_have_seeds_of_their_own(model, played):
    """With no environment between them, two turns with the same seed would say the same."""
    for sample in played[2]:
        turns = [tuple(tokens) for sampled, tokens in spans_of(sample) if sampled and len(tokens) > 3]
        assert len(set(turns)) == len(turns)


@pytest.mark.invariant
@pytest.mark.parametrize("share_prefix", [True, False])
def test_log_probs_of_every_turn_are_the_trainers(model, played, share_prefix):
    prompts, _, samples, *_ = played
    experience = scored(prompts, samples)
    limits = Limits(max_tokens=4096, share_prefix=share_prefix)
    logprobs = stage_logprobs(experience, [torch.arange(8)], model, limits, 1.0)
    assert not logprobs[~experience.mask_NT].any()
    gap = (logprobs - experience.rollout_logprobs_NT).abs()
    assert gap.max() <= 2e-6
    assert (experience.mask_NT.sum(-1) < torch.tensor([len(sample.token_ids) for sample in samples])).any()


def test_observations_are_attended_to(model, played):
    prompts, _, samples, *_ = played
    experience = scored(prompts, samples)
    number = next(i for i, sample in enumerate(samples) if sample.mask is not None)
    first = samples[number].mask.index(False)
    changed = list(samples[number].token_ids)
    changed[first] = model.tokenizer.convert_tokens_to_ids("u")
    responses = tuple(tuple(changed) if i == number else r for i, r in enumerate(experience.responses))
    other = scored(prompts, samples, responses=responses)
    limits = Limits(max_tokens=4096)
    before, after = (
        stage_logprobs(stage, [torch.arange(8)], model, limits, 1.0)[number] for stage in (experience, other)
    )
    assert torch.equal(before[:first], after[:first])
    following = experience.mask_NT[number, first:]
    assert ((before - after)[first:].abs()[following] > 1e-6).all()


def scored(prompts, samples, **changes):
    rollouts = dataclasses.replace(to_rollouts(prompts, list(range(len(prompts))), samples), **changes)
    rewards = torch.tensor([float(i % 3) for i in range(len(samples))], dtype=torch.float64)
    return rollouts.scored(rewards_N=rewards, valid_N=torch.ones(len(samples), dtype=torch.bool))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_loss_and_gradient_are_those_of_the_sampled_tokens_alone(folder, played, mode):
    """By hand: one forward pass of the whole conversation each, no packing, no sharing, no chunks."""
    prompts, _, samples, *_ = played
    model = load(folder, "float64")
    experience = scored(prompts, samples)
    config = make_config(loss_agg_mode=mode)
    batch = make_train_batch(experience, config)
    actor = Actor(model, config.actor_rollout_ref.actor, Limits(max_tokens=150), Solo(), temperature=1.0)
    with stay_double():
        loss = float(actor.backward(batch, compose(config)).loss)
    gradient = {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}
    model.module.zero_grad()

    rewards = experience.rewards_N.reshape(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    num_sampled = sum(sample.num_sampled for sample in samples)
    expected, surrogate = 0.0, 0.0
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with stay_double():
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):
            prompt = prompts[sample.group].token_ids
            ids = torch.tensor([[*prompt, *sample.token_ids]])
            logprobs = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            mask = torch.tensor(sample.mask or [True] * len(sample.token_ids))
            chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[mask, 0]
            length = len(chosen) + 1e-8  # as verl has it
            share = 1 / num_sampled if mode == "token-mean" else 1 / (len(samples) * length)
            surrogate = surrogate - advantage * share * chosen.sum()
            expected -= advantage * share * len(chosen)  # where every ratio is 1
        surrogate.backward()
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(gradient[name], parameter.grad, rtol=1e-8, atol=1e-12), name


@pytest.mark.invariant
def test_top_p_is_replayed_across_turns(model):
    prompts = prompts_of(model, "0=", "12?=")
    sampling = Sampling(max_tokens=MAX_TOKENS, top_p=0.8, keep_supports=True)
    samples, *_ = run(make_episodes(model, echo)[0], prompts, sampling)
    assert any(sample.mask is not None for sample in samples)
    experience = scored(prompts, samples)
    logprobs = stage_logprobs(experience, [torch.arange(8)], model, Limits(max_tokens=4096), 1.0)
    assert (logprobs - experience.rollout_logprobs_NT).abs().max() <= 2e-6


def test_an_observation_without_room_for_an_answer_ends_the_episode(model):
    prompts = prompts_of(model, "0=")
    episodes, pool = make_episodes(model, lambda row, actions: Turn("=" * (MAX_TOKENS - 1), reward=1.0))
    samples, scores, _ = run(episodes, prompts)
    assert {sample.finish_reason for sample in samples} == {"length"}
    assert all(sample.mask is None for sample in samples)
    assert [score.total for score in scores] == [1.0] * 4
    assert sorted(pool.ended) == [0, 1, 2, 3]


def test_a_failed_episode_is_not_scored(model):
    def breaks(row, actions):
        if len(actions) == 2:
            raise RuntimeError("step raised KeyError")
        return Turn("=", done=not actions[-1], reward=1.0)

    prompts = prompts_of(model, "0=")
    episodes, _ = make_episodes(model, breaks, reward={"max_failure_fraction": 1.0})
    samples, scores, _ = run(episodes, prompts)
    failed = [score for score in scores if score.total is None]
    assert failed
    assert {score.error for score in failed} == {"environment scripted: step raised KeyError"}
    assert all(score.parts == {} for score in failed)
    assert not scored_mask(prompts, samples, scores)[[score.total is None for score in scores]].any()
    assert episodes.generator.recorder.events == [
        f"{len(failed)} of 4 answers could not be scored: first: environment scripted: step raised KeyError"
    ]
    episodes.generator.reward = Reward(max_failure_fraction=0.0)
    with pytest.raises(ServiceError, match="first: environment scripted: step raised KeyError") as caught:
        run(episodes, prompts)
    assert caught.value.remedy.startswith("correct the environment")


def scored_mask(prompts, samples, scores):
    rollouts = to_rollouts(prompts, [0], samples)
    valid = torch.tensor([score.total is not None for score in scores])
    return rollouts.scored(rewards_N=torch.zeros(len(samples)), valid_N=valid).mask_NT


def test_reward_functions_score_the_last_answer(model, tmp_path):
    (tmp_path / "size.py").write_text("def score(response): return len(response)")
    reward = {"functions": [{"path": str(tmp_path / "size.py"), "weight": 10.0}], "num_workers": 1}
    episodes, pool = make_episodes(model, echo, reward=reward)
    try:
        assert episodes.reward_names == ["size", "environment"]
        _, scores, _ = run(episodes, prompts_of(model, "0="))
        for number, score in enumerate(scores):
            actions = pool.actions[number]
            assert score.parts["size"] == len(actions[-1])
            assert score.total == pytest.approx(0.25 * len(actions) + 10.0 * len(actions[-1]))
    finally:
        episodes.generator.panel.close()


class ScriptedEngine:
    """Says the same in every episode, turn by turn."""

    limits = Limits(max_tokens=100, max_sequences=4)

    def __init__(self, tokenizer, *texts):
        self.turns, self.contexts = [[*tokenizer(text)["input_ids"], EOS] for text in texts], []

    def generate(self, requests, sampling, *, limits, finished, on_finish, on_progress):
        said = self.turns[len(self.contexts)]
        self.contexts.append([(request.prompt, len(request.seeds), request.max_tokens) for request in requests])
        for group, request in enumerate(requests):
            for index in range(len(request.seeds)):
                numbers = tuple(-1.0 - place for place in range(len(said)))
                on_finish(
                    Sample(group=group, index=index, token_ids=tuple(said), logprobs=numbers, finish_reason="stop")
                )


def test_a_calculator_in_the_middle_of_a_chat():
    characters = sorted(set('<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>u:42\n.'))
    tokenizer = make_tokenizer("".join(characters))
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    engine = ScriptedEngine(tokenizer, call, "42.")
    generator = Generator(engine, Panel(Reward()), tokenizer, Reward(), Silent(), Solo(), lambda: None)
    environment = tools.Environment()
    pool = ScriptedPool(lambda row, actions: environment.step(actions[-1]))
    episodes = Episodes(generator, pool, FollowUp(tokenizer, Data()), max_turns=4)
    ids = tokenizer("<bos>u:6*7\na:")["input_ids"]
    prompt = chat("6*7", tuple(ids))
    samples, scores, texts = episodes.run([prompt], [[1, 2]], Sampling(max_tokens=200), TRAINING)
    assert tokenizer.decode(samples[0].token_ids) == f"{call}<eos>t:42\na:42.<eos>"
    assert texts == [f"{call}\n42\n42."] * 2
    expected = [True] * (len(call) + 1) + [False] * len("t:42\na:") + [True] * len("42.E")
    assert [list(sample.mask) for sample in samples] == [expected] * 2
    assert samples[0].logprobs[len(call) + 1 :] == (0.0,) * 7 + (-1.0, -2.0, -3.0, -4.0)
    assert scores[0].parts == {
        "environment": 0.0, "environment/turns": 2.0, "environment/tool_calls": 1.0,
        "environment/failed_tool_calls": 0.0,
    }  # fmt: skip
    # Both samples said the same: the second turn is prefilled once, with room for what is left.
    assert engine.contexts[1] == [((*ids, *samples[0].token_ids[:-4]), 2, 200 - (len(call) + 1 + 7))]


def test_a_role_that_the_template_does_not_know_costs_the_episode(model):
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template = strict + "{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}a:"
    tokenizer = model.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        episodes, _ = make_episodes(
            model, lambda row, actions: Turn([{"role": "tool", "content": "1"}]), reward={"max_failure_fraction": 1.0}
        )
        prompt = dataclasses.replace(
            prompts_of(model, "")[0], token_ids=(1,), prompt=[{"role": "user", "content": "?"}]
        )
        _, scores, _ = run(episodes, [prompt])
    finally:
        tokenizer.chat_template = before
    errors = {score.error for score in scores} - {None}
    assert errors == {"environment scripted: the chat template refuses a chat of user, assistant, tool: no tools"}
