"""Local paths become absolute; everything that is not a local path stays as it was given."""

from ullage.config.load import load_mapping, resolved_yaml
from ullage.config.paths import anchored


def test_paths_that_exist_are_written_out_and_others_stay(tmp_path):
    for name in ("rows.jsonl", "reward.py", "my_algorithm.py"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    config = load_mapping(
        {
            "data": {"train_files": ["rows.jsonl", "owner/data:train"], "val_files": "missing.jsonl"},
            "actor_rollout_ref": {"model": {"path": "model"}},
            "critic": {"model": {"path": "model"}},
            "reward": {"functions": [{"path": "reward.py", "name": "score"}, {"name": "gsm8k"}]},
            "algorithm": "my_algorithm.py",
        }
    ).config
    full = anchored(config, tmp_path)
    assert full.data.train_files == [str(tmp_path / "rows.jsonl"), "owner/data:train"]
    assert full.data.val_files == ["missing.jsonl"]
    assert full.actor_rollout_ref.model.path == str(tmp_path / "model")
    assert full.actor_rollout_ref.model.tokenizer_path is None
    assert full.critic.model.path == str(tmp_path / "model")
    assert [function.path for function in full.reward.functions] == [str(tmp_path / "reward.py"), None]
    assert full.algorithm.name == str(tmp_path / "my_algorithm.py")


def test_parts_of_an_algorithm_are_files_by_their_ending(tmp_path):
    (tmp_path / "credit.py").touch()
    (tmp_path / "loss.py").touch()
    (tmp_path / "grpo").mkdir()
    loss = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "loss.py"}}}}
    full = anchored(
        load_mapping({**loss, "algorithm": {"name": "grpo", "adv_estimator": "credit.py"}}).config, tmp_path
    )
    assert (full.algorithm.name, full.algorithm.adv_estimator) == ("grpo", str(tmp_path / "credit.py"))
    assert full.actor_rollout_ref.actor.policy_loss.loss_mode == str(tmp_path / "loss.py")
    assert anchored(load_mapping({}).config, tmp_path).algorithm.name is None


def test_the_result_is_still_a_config_that_loads_back(tmp_path):
    config = load_mapping({"actor_rollout_ref": {"model": {"path": "smollm2"}}, "reward": "gsm8k"}).config
    assert anchored(config, tmp_path) == config
    assert "smollm2" in resolved_yaml(anchored(config, tmp_path))
