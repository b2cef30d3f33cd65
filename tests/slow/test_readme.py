"""The newcomer's path: the README's commands, word for word, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_readme_works_word_for_word(tmp_path):
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    install, demo, *own = blocks
    assert "pip install" in install
    assert demo == "ullage demo\n"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = "set -euo pipefail\n" + "".join(own)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "capitals" in done.stdout  # ullage ls
    metrics = (tmp_path / "runs" / "capitals" / "metrics.jsonl").read_text().splitlines()
    assert [line.startswith(f'{{"step": {i + 1},') for i, line in enumerate(metrics)] == [True] * 8
