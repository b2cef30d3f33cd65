"""Generation and scoring as one: functions and a reward model together, failures, budgets, the order of samples."""

from contextlib import nullcontext

import pytest

from ullage.base.communicator import Solo
from ullage.base.errors import ServiceError
from ullage.batch.pack import Limits
from ullage.config.tree import Reward
from ullage.data.prompts import Prompt
from ullage.rewards.pool import Score
from ullage.rollout.sampling import Sample, Sampling
from ullage.trainer.generate import EVALUATION, TRAINING, Generator, with_verdict

PROMPTS = [
    Prompt(id=0, token_ids=(1,), prompt="a", target="1", source="s", extra={"row": 0}),
    Prompt(id=1, token_ids=(2,), prompt=[{"role": "user", "content": "b"}], target="2", source="t", extra={}),
]
SEEDS = [[7, 8], [9, 10]]


class BackwardEngine:
    """Samples finish in the reverse of their order."""

    limits = Limits(max_tokens=100, max_sequences=4)

    def generate(self, requests, sampling, *, limits, finished, on_finish, on_progress):
        samples = [
            Sample(group=group, index=index, token_ids=(group, index), logprobs=(0.0, 0.0), finish_reason="stop")
            for group, request in enumerate(requests)
            for index in range(len(request.seeds))
        ]
        for sample in reversed(samples):
            on_finish(sample)
        on_progress(8, len(samples))
        return samples


class ListedPanel:
    """Gives each text its total; 1 where it has none."""

    def __init__(self, totals=(), labels=("length",), error=None):
        self.labels = list(labels)
        self.totals = dict(totals)
        self.error = error
        self.requests = []
        self.seen = []

    def submit(self, request):
        self.requests.append(request)
        self.seen.append(request)

    def collect(self):
        if self.error:
            raise self.error
        requests, self.requests = self.requests, []
        return [self._score(request.response) for request in requests]

    def _score(self, text):
        total = self.totals.get(text, 1.0)
        return Score(total, {self.labels[0]: total or 0.0} if self.labels else {}, None if total is not None else "no")


class ListedModel:
    """A reward model that knows its verdicts, and what it was asked."""

    def __init__(self, verdicts):
        self.verdicts = verdicts
        self.asked = []

    def scores(self, prompts, responses):
        self.asked.append(list(zip(prompts, responses, strict=True)))
        return [self.verdicts[response] for response in responses]


class Phases:
    def __init__(self):
        self.names = []
        self.events = []

    def event(self, text):
        self.events.append(text)

    def phase(self, name):
        self.names.append(name)
        return nullcontext()

    def progress(self, done, total, note):
        pass


class Digits:
    def decode(self, token_ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(map(str, token_ids))


def sample_of(length):
    return Sample(group=0, index=0, token_ids=tuple(range(length)), logprobs=(0.0,) * length, finish_reason="stop")


def generator(panel, model=None, *, weight=1.0, limit=0.5, ranks=None):
    recorder = Phases()
    made = Generator(
        BackwardEngine(),
        panel,
        Digits(),
        Reward(max_failure_fraction=limit),
        recorder,
        ranks or Solo(),
        lambda: None,
        reward_model=model,
        reward_model_weight=weight,
    )
    return made, recorder


def run(made, phases=TRAINING):
    return made.run(PROMPTS, SEEDS, Sampling(max_tokens=2), phases)


def test_samples_scores_and_texts_are_in_the_order_of_prompts():
    panel = ListedPanel({"00": 1.0, "01": 2.0, "10": 3.0, "11": 4.0})
    made, recorder = generator(panel)
    samples, scores, texts = run(made)
    assert texts == ["00", "01", "10", "11"]
    assert [(sample.group, sample.index) for sample in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [score.total for score in scores] == [1.0, 2.0, 3.0, 4.0]
    assert recorder.names == ["rollout", "reward"]
    assert made.reward_names == ["length"]


def test_a_reward_model_beside_functions():
    model = ListedModel({"00": 0.5, "01": -1.0, "10": 2.0, "11": 0.0})
    made, recorder = generator(ListedPanel({"00": 4.0}), model, weight=0.5)
    _, scores, _ = run(made, EVALUATION)
    assert [score.total for score in scores] == [4.25, 0.5, 2.0, 1.0]
    assert [score.parts["reward_model"] for score in scores] == [0.5, -1.0, 2.0, 0.0]
    assert scores[0].parts == {"length": 4.0, "reward_model": 0.5}
    assert made.reward_names == ["length", "reward_model"]
    assert model.asked == [[("a", "00"), ("a", "01"), (PROMPTS[1].prompt, "10"), (PROMPTS[1].prompt, "11")]]
    assert recorder.names == ["eval", "eval"]


def test_a_reward_model_alone():
    totals = dict.fromkeys(("00", "01", "10", "11"), 0.0)
    made, _ = generator(ListedPanel(totals, labels=()), ListedModel({"00": 1.0, "01": 2.0, "10": 3.0, "11": 4.0}))
    _, scores, _ = run(made)
    assert scores[3] == Score(4.0, {"reward_model": 4.0}, None)
    assert made.reward_names == ["reward_model"]


def test_a_function_called_like_the_reward_model_keeps_its_name():
    made, _ = generator(
        ListedPanel(labels=("reward_model",)), ListedModel(dict.fromkeys(("00", "01", "10", "11"), 3.0))
    )
    _, scores, _ = run(made)
    assert scores[0] == Score(4.0, {"reward_model": 1.0, "reward_model_2": 3.0}, None)


def test_what_has_no_score_costs_its_sample():
    model = ListedModel({"00": float("nan"), "01": "too long", "11": 1.0})
    made, recorder = generator(ListedPanel({"10": None}), model, limit=0.75)
    _, scores, _ = run(made)
    assert recorder.events == ["3 of 4 answers could not be scored: first: the reward model gave nan"]
    assert [score.error for score in scores] == ["the reward model gave nan", "too long", "no", None]
    assert [score.total for score in scores] == [None, None, None, 2.0]
    assert "10" not in [response for _, response in model.asked[0]]  # not asked about what has failed already
    made, recorder = generator(ListedPanel({"10": None}), model)
    with pytest.raises(
        ServiceError, match=r"3 of 4 rewards failed \(limit 50 %\): first: the reward model gave nan"
    ) as caught:
        run(made)
    assert recorder.events == []  # the error says it
    assert caught.value.remedy == (
        "give a reward model that can score these conversations, or raise reward.max_failure_fraction"
    )


def test_failures_of_all_ranks_are_one_line():
    class Two(Solo):
        def gather(self, value):
            return [value, [5, []], [1, [["theirs", "ask them"], ["later", "ask them"]]]]

    made, recorder = generator(ListedPanel(), ranks=Two())
    made.check_budget([Score(1.0, {}, None)])
    assert recorder.events == ["2 of 9 answers could not be scored: first: theirs"]
    made, recorder = generator(ListedPanel(), limit=0.0, ranks=Two())
    with pytest.raises(ServiceError) as caught:
        made.check_budget([Score(None, {}, "mine", remedy="mend it")])
    assert caught.value.cause == "3 of 9 rewards failed (limit 0 %): first: mine"
    assert caught.value.remedy == "mend it, or raise reward.max_failure_fraction"


def test_nothing_is_said_where_every_answer_has_a_score():
    made, recorder = generator(ListedPanel())
    run(made)
    assert recorder.events == []


def test_answers_that_are_already_there():
    panel = ListedPanel({"x": 2.0})
    made, recorder = generator(panel, ListedModel({"x": 1.0, "y": 0.0}))
    scores = made.score(PROMPTS, [sample_of(3), sample_of(4)], ["x", "y"])
    assert [score.total for score in scores] == [3.0, 1.0]
    assert recorder.names == []


def test_a_function_is_given_the_row_and_the_tokens():
    panel = ListedPanel()
    generator(panel)[0].score([PROMPTS[0]], [sample_of(3)], ["text"])
    request = panel.seen[0]
    assert (request.prompt, request.response, request.target, request.source) == ("a", "text", "1", "s")
    assert (request.extra, request.response_length, request.response_ids) == ({"row": 0}, 3, [0, 1, 2])


def test_a_spent_budget_ends_every_rank():
    class Told(Solo):
        errors = ()

        def raise_together(self, error):
            Told.errors = (*self.errors, error)
            super().raise_together(error)

    spent = ServiceError("spent")
    made, _ = generator(ListedPanel(error=spent), ranks=Told())
    with pytest.raises(ServiceError, match="spent"):
        run(made)
    assert Told.errors == (spent,)


def test_an_infinite_sum():
    assert with_verdict(Score(1.0, {}, None), 1e308, name="m", weight=10.0) == Score(
        None, {}, "the reward model gave 1e+308"
    )
