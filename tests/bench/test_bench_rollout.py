"""The rollout benchmark in its small form, and the roofline by hand."""

import json

import pytest

from ullage.bench.company import differing
from ullage.bench.rollout import WORKLOADS, groups, ragged
from ullage.bench.roofline import H200, Ceiling, cache_bytes, decode_seconds, prefill_seconds, weight_numbers
from ullage.bench.shapes import shape_config
from ullage.cli.bench import ROLLOUT_PARTS
from ullage.cli.main import main
from ullage.rollout.sampling import Sample


def test_bytes_and_products_of_a_small_shape():
    config = shape_config("tiny")  # 2 layers, 64 wide, MLP of 128, 4 and 2 heads of 16, 512 tokens
    assert weight_numbers(config) == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 512 * 64 == 106_496
    assert cache_bytes(config) == 2 * 2 * 2 * 16 * 2 == 256
    slow_memory, slow_products = Ceiling(1e6, 1e18), Ceiling(1e18, 1e6)
    # Two steps of one sequence and one of another: weights twice, 10 + 11 + 3 cached tokens, three rows of logits.
    read = 2 * 2 * 106_496 + (10 + 11 + 3) * 256 + 3 * 8 * 512
    assert decode_seconds(config, [10, 3], [2, 1], slow_memory) == pytest.approx(read / 1e6)
    assert decode_seconds(config, [10, 3], [2, 1], slow_products) == pytest.approx(3 * 2 * 106_496 / 1e6)
    assert prefill_seconds(config, [10, 3], slow_products) == pytest.approx(13 * 2 * (106_496 - 32_768) / 1e6)


@pytest.mark.parametrize(("shape", "published"), [("Qwen3-0.6B", 36_000), ("8B", 12_600)])
def test_the_floor_of_the_ragged_workload_is_the_published_one(shape, published):
    """Other draws of the lengths move it by a few percent."""
    work, config = ragged(shape), shape_config(shape)
    floor = decode_seconds(config, work.prompts, work.responses, H200) + prefill_seconds(config, work.prompts, H200)
    assert work.drawn / floor == pytest.approx(published, rel=0.04)


def test_workloads_are_what_they_say():
    assert set(ROLLOUT_PARTS) == {*WORKLOADS, "company"}
    assert [(work.shape, len(work.prompts), work.drawn) for work in WORKLOADS["batch"]()] == [
        (shape, 256, 256 * 256) for shape in ("0.5B", "1.5B", "7B")
    ]
    assert groups("Qwen3-1.7B").drawn == 32 * 16 * 512
    lengths = ragged("8B")
    assert (min(lengths.prompts) >= 100, max(lengths.responses) <= 1024) == (True, True)
    assert lengths == ragged("8B"), "the same every time"


def test_the_small_form_is_written_down(tmp_path, capfd):
    out = tmp_path / "rollout.json"
    assert main(["bench", "rollout", "--out", str(out), "--json"]) == 0
    printed, written = json.loads(capfd.readouterr().out), json.loads(out.read_text())
    assert written["command"] == "ullage bench rollout --only tiny company"
    rows = written["tiny"]
    assert printed == {"tiny": rows, "company": written["company"]}
    # On a CPU no sample hangs on its company.
    assert [row["differing_tokens_percent"] for row in written["company"]] == [0.0, 0.0]
    engines = [row["engine"] for row in rows if row["engine"] != "trl"]  # which may not be installed
    assert engines == [
        "ullage", "generate", "ullage", "ullage", "ullage, read apart", "ullage, prompts apart",
        "ullage, LoRA of rank 4 on nf4",
    ]  # fmt: skip
    assert [row["workload"] for row in rows][:2] == ["4 x (8 + 6)"] * 2
    # Pages of 16 tokens, 256 B each in bf16 and twice that here: 4 prompts of 8 + 6 tokens; 2 x 3 samples of 20 + 6,
    # whose prompts have a page in common and a partial one, which two of them copy and the last one takes.
    pages = [round(row["cache_mib"] * 2**20 / (16 * 512)) for row in rows if row["engine"].startswith("ullage")]
    assert (pages[0], pages[2:]) == (4, [2 * (1 + 3), 2 * (1 + 3), 2 * 3 * 2, 4])
    # Float32 on a CPU: everybody gives the log-probs of the same weights.
    assert all(row["logprob_gap"] < 1e-5 for row in rows[:-1])


def test_tokens_differ_from_the_first_difference_on():
    def samples(*rows):
        return [Sample(group=0, index=0, token_ids=row, logprobs=(), finish_reason="length") for row in rows]

    found = differing(samples((1, 2, 3, 4), (5, 6, 7, 8)), samples((1, 9, 3, 4), (5, 6, 7, 8)))
    assert found == {"differing_samples_percent": 50.0, "differing_tokens_percent": 37.5, "first_difference": 1}
