"""Declared names, their reductions, and the one number of an evaluation."""

import pytest

from ullage.telemetry.metrics import METRICS, best_evaluation, describe, headline_evaluation, reduce_values

CONTRACT = """reward/mean reward/<function> response/length_mean response/truncated_fraction
group/zero_std_fraction actor/loss
actor/kl_ref actor/entropy actor/clip_fraction actor/grad_norm critic/loss critic/explained_variance
rollout/logprob_gap_mean rollout/tokens_per_second update/tokens_per_second update/mfu time/<phase>
memory/<phase>_peak_bytes eval/<source>/<score> eval/<source>/pass@<k>"""


def test_every_name_of_the_contract_is_declared():
    assert set(CONTRACT.split()) <= set(METRICS)
    assert all(metric.unit and metric.meaning for metric in METRICS.values())


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/gsm8k", "reward/<function>"),
        ("reward/gsm8k/acc", "reward/<function>"),
        ("reward/openai/gsm8k/mean", "reward/<source>/mean"),
        ("response/sums/length_mean", "response/<source>/length_mean"),
        ("group/sums/zero_std_fraction", "group/<source>/zero_std_fraction"),
        ("time/step", "time/step"),
        ("time/update_critic", "time/<phase>"),
        ("memory/rollout_peak_bytes", "memory/<phase>_peak_bytes"),
        ("eval/gsm8k/pass@4", "eval/<source>/pass@<k>"),
        ("eval/gsm8k/best@4", "eval/<source>/best@<k>"),
        ("eval/gsm8k/maj@4", "eval/<source>/maj@<k>"),
        ("eval/openai/gsm8k/loss", "eval/<source>/loss"),
        ("eval/openai/gsm8k/mean@4", "eval/<source>/<score>"),
    ],
)
def test_a_name_finds_its_declaration(name, declared):
    assert describe(name) is METRICS[declared]


def test_reductions():
    assert reduce_values("actor/loss", [1.0, 2.0, 6.0]) == 3.0
    assert reduce_values("never/declared", [1.0, 2.0]) == 1.5
    assert reduce_values("time/rollout", [1.0, 1.0, 1.0]) == 3.0
    assert reduce_values("actor/learning_rate", [3e-6, 1e-6]) == 1e-6
    assert reduce_values("memory/update_peak_bytes", [1.0, 4.0, 2.0]) == 4.0


def test_the_headline_is_the_mean_score_over_sources():
    metrics = {"eval/a/pass@4": 1.0, "eval/a/mean@4": 0.25, "eval/b/mean@4": 0.75, "eval/b/length": 9.0, "other": 5.0}
    assert headline_evaluation(metrics) == 0.5
    assert headline_evaluation({"reward/mean": 1.0}) is None
    assert headline_evaluation({"eval/a/mean@1": None}) is None


def test_the_best_loss_is_the_lowest():
    losses = [(0, 2.0), (1, 0.5), (2, 0.5), (3, 0.75), (4, float("nan"))]
    assert best_evaluation([(step, {"eval/a/loss": value}) for step, value in losses]) == (0.5, 1)
    scores = [(0, 2.0), (1, 0.5), (2, 2.0), (3, None)]
    assert best_evaluation([(step, {"eval/a/mean@1": value}) for step, value in scores]) == (2.0, 0)
    assert best_evaluation([(0, {"eval/a/mean@1": 0.1, "eval/a/loss": 1.0}), (1, {"reward/mean": 9.0})]) == (0.1, 0)
    assert best_evaluation([]) is None
