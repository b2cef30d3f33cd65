"""`ullage eval`: the same numbers as in training, hand-computed ones, and what is missing said before work begins."""

import json

import pytest

from ullage.cli.main import main
from ullage.telemetry.reader import read_metrics

REWARD = "def score(prompt, response, target):\n    return float(target)\n"


@pytest.fixture
def exam(tmp_path):
    """Prompts of two sources whose reward is their target, whatever the model says."""
    rows = [("sums", "1"), ("sums", "1"), ("words", "0"), ("words", "1"), ("words", "0"), ("words", "0")]
    lines = [json.dumps({"prompt": "1+1=", "answer": answer, "data_source": source}) for source, answer in rows]
    (tmp_path / "exam.jsonl").write_text("\n".join(lines))
    (tmp_path / "reward.py").write_text(REWARD)
    return ["--data", str(tmp_path / "exam.jsonl"), "--reward", str(tmp_path / "reward.py")]


def test_a_run_scores_what_its_training_reported(finished, capsys):
    reported = {row["step"]: {k: v for k, v in row.items() if k.startswith("eval/")} for row in read_metrics(finished)}
    names = ("mean@2", "pass@1", "pass@2", "best@1", "best@2")
    assert set(reported[4]) == {f"eval/val/{name}" for name in names}
    for what, step in ((finished, 4), (finished / "final", 4), (finished / "checkpoints" / "step_2", 2)):
        assert main(["eval", str(what), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["metrics"] == reported[step]
        assert result["step"] == step
    assert not (finished.parent / "evaluation").exists()


def test_the_table_has_hand_computed_numbers(tiny_model, exam, capsys):
    assert main(["eval", str(tiny_model), *exam, "--n", "2", "data.max_response_length=2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "source     sums   words",
        "prompts       2       4",
        "mean@2   1.0000  0.2500",
        "pass@1   1.0000  0.2500",
        "pass@2   1.0000  0.2500",
        "best@1   1.0000  0.2500",
        "best@2   1.0000  0.2500",
    ]


def test_majorities_stand_where_the_reward_tells_the_answer(tiny_model, tmp_path, exam, capsys):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    told = {'pred': solution_str} if data_source == 'words' else {}\n"
        "    return {'score': float(ground_truth), **told}\n"
    )
    assert main(["eval", str(tiny_model), *exam, "--n", "2", "data.max_response_length=2"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["maj@1         -  0.2500", "maj@2         -  0.2500"]


def test_a_generated_task_and_its_reward(tiny_model, capsys):
    task = "reasoning_gym:chain_sum:size=2:max_terms=2"
    words = ["--data", task, "--reward", "reasoning_gym", "--n", "2", "--json", "data.max_response_length=2"]
    assert main(["eval", str(tiny_model), *words, "reward.num_workers=1"]) == 0
    result = json.loads(capsys.readouterr().out)
    names = ("mean@2", "pass@1", "pass@2", "best@1", "best@2", "maj@1", "maj@2")
    assert list(result["metrics"]) == [f"eval/chain_sum/{name}" for name in names]
    assert (result["num_prompts"], result["num_failed"]) == (2, 0)


def test_json_and_samples(tiny_model, exam, tmp_path, capsys):
    out = tmp_path / "samples.jsonl"
    words = ["--n", "3", "--temperature", "0", "--samples", str(out), "--json", "data.max_response_length=2"]
    assert main(["eval", str(tiny_model), *exam, *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {
        "weights": str(tiny_model),
        "step": None,
        "score": 0.5,
        "metrics": {
            "eval/sums/mean@3": 1.0,
            "eval/sums/pass@1": 1.0,
            "eval/sums/pass@2": 1.0,
            "eval/sums/pass@3": 1.0,
            "eval/sums/best@1": 1.0,
            "eval/sums/best@2": 1.0,
            "eval/sums/best@3": 1.0,
            "eval/words/mean@3": 0.25,
            "eval/words/pass@1": 0.25,
            "eval/words/pass@2": 0.25,
            "eval/words/pass@3": 0.25,
            "eval/words/best@1": 0.25,
            "eval/words/best@2": 0.25,
            "eval/words/best@3": 0.25,
        },
        "num_prompts": 6,
        "num_failed": 0,
        "n": 3,
        "temperature": 0.0,
    }
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [(p, s) for p in range(6) for s in range(3)]
    assert [row["reward"] for row in rows[::3]] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert len({row["response"] for row in rows}) == 1  # greedy, and one prompt


def test_samples_without_a_score_are_told(tiny_model, tmp_path, exam, capsys):
    (tmp_path / "reward.py").write_text("def score(prompt, response, target):\n    return 1 / float(target)\n")
    words = [*exam, "reward.max_failure_fraction=0.9", "data.max_response_length=2"]
    assert main(["eval", str(tiny_model), *words]) == 0
    out, err = capsys.readouterr()
    assert "3 of 6 samples could not be scored and count as 0" in err
    assert out.splitlines()[2] == "mean@1   1.0000  0.2500"


@pytest.mark.parametrize(("left_out", "cause"), [("--data", "no held-out data"), ("--reward", "no reward")])
def test_what_is_missing_is_said_before_the_model_is_read(tmp_path, exam, left_out, cause, capsys):
    at = exam.index(left_out)
    assert main(["eval", str(tmp_path / "no-model"), *exam[:at], *exam[at + 2 :]]) == 78
    assert f"ullage: error: {cause}\n" in capsys.readouterr().err


def test_other_mistakes_have_their_codes(tmp_path, tiny_model, exam, capsys):
    assert main(["eval", str(tmp_path / "no-model"), *exam]) == 66
    assert main(["eval", str(tiny_model), *exam, "--data", str(tmp_path / "none.jsonl")]) == 65
    assert main(["eval", str(tiny_model), *exam, "--n", "0"]) == 78
    assert main(["eval", str(tiny_model), *exam, "--samples", exam[1]]) == 74
    assert "already exists" in capsys.readouterr().err


def test_a_config_file_says_what_to_evaluate(tiny_model, tmp_path, exam, capsys):
    config = tmp_path / "exam.yaml"
    config.write_text(
        f"data: {{val_files: '{exam[1]}', max_response_length: 2, val_max_samples: 2}}\nreward: '{exam[3]}'"
    )
    assert main(["eval", str(tiny_model), str(config)]) == 0
    lines = ["source     sums", "prompts       2", "mean@1   1.0000", "pass@1   1.0000", "best@1   1.0000"]
    assert capsys.readouterr().out.splitlines() == lines
