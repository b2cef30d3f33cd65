"""Every example of docs/python_api.md, run in its order."""

import re
import shutil
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "python_api.md"


def test_every_example_runs(task_files, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "my-model").symlink_to(tiny_model)
    for source, name in (("train.jsonl",) * 2, ("val.jsonl",) * 2, ("reward.py", "my_reward.py")):
        shutil.copy(task_files / source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    names = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(list((tmp_path / "runs").iterdir())) == 5
    assert (names["metrics"]["actor/learning_rate"], names["metrics"]["critic/learning_rate"]) == (1e-4, 1e-5)
    assert list(names["seconds"]) == ["forward"]
