"""The config room: one typed tree of keys, and the loader that fills it from YAML, overrides and verl's names."""

from ullage.config.check import is_run_name, not_yet, require_runnable
from ullage.config.keys import KeyInfo, key_listing
from ullage.config.load import Loaded, load_config, load_mapping, resolved_yaml
from ullage.config.overrides import split_overrides
from ullage.config.problems import Problem
from ullage.config.tree import Config

__all__ = [
    "Config",
    "KeyInfo",
    "Loaded",
    "Problem",
    "is_run_name",
    "key_listing",
    "load_config",
    "load_mapping",
    "not_yet",
    "require_runnable",
    "resolved_yaml",
    "split_overrides",
]
