"""docs/rewards.md: every config on it loads, and every key of a service on it exists."""

import re
from pathlib import Path

import pytest
import yaml

from ullage.config.load import load_config
from ullage.rewards import endpoint, judge
from ullage.rewards.service import settings_of

PAGE = (Path(__file__).parent.parent.parent / "docs" / "rewards.md").read_text()
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_page_shows_each_kind():
    assert len(SNIPPETS) == 4


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_loads(tmp_path, snippet):
    (tmp_path / "config.yaml").write_text(snippet)
    config = load_config(tmp_path / "config.yaml").config
    given = yaml.safe_load(snippet)
    assert len(config.reward.functions) == len(given.get("reward", {}).get("functions", []))
    assert config.reward_model.enable is ("reward_model" in given)
    for function in config.reward.functions:
        if function.name in ("endpoint", "judge"):
            module = {"endpoint": endpoint, "judge": judge}[function.name]
            assert settings_of(module.Settings, function.kwargs, function.name).retries == 5
