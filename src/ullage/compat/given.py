"""What user code calls `config`: a mapping, a YAML file, a flat config class or our own tree, read into one Config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ullage.compat.flat_config import FLAT_NAMES, FlatConfig, merged
from ullage.config.load import Loaded, load_config, load_mapping
from ullage.config.tree import Config

Given = Mapping[str, Any] | str | Path | FlatConfig | Config
_log = logging.getLogger("ullage")


def read(config: Given) -> Loaded:
    """Every problem is raised at once; what was said about keys goes to the logger `ullage`."""
    if isinstance(config, Config):
        return Loaded(config, [], config.model_dump(mode="json"))
    if isinstance(config, FlatConfig):
        config = merged(config)
    loaded = load_config(Path(config)) if isinstance(config, str | Path) else load_mapping(config)
    for notice in loaded.notices:
        _log.warning("config: %s", notice)
    return loaded


class Settings:
    """A config as user code reads it: the tree's sections, and the flat names, as in `config.clip_epsilon`."""

    def __init__(self, tree: Config) -> None:
        self.tree = tree

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- any key
        if name.startswith("__"):  # what `copy` asks for before there is a tree
            raise AttributeError(name)
        value: Any = self.tree
        for part in FLAT_NAMES.get(name, name).split("."):
            value = getattr(value, part)
        return value
