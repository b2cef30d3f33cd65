"""Every promised name is there, and `import ullage` loads nothing heavy before one is used."""

import json
import subprocess
import sys

import pytest

import ullage

NAMES = [
    "ActorRolloutRef", "AgentConfig", "BaseAlgorithm", "BaseTrainer", "Critic", "ExperienceBatch", "GSPOConfig",
    "RewardModel", "RolloutConfig", "Trainer", "TrainingConfig", "main",
]  # fmt: skip
PROFILER = [
    "GPUMemoryLogger", "PerformanceMonitor", "get_memory_usage", "log_gpu_memory_usage", "log_memory_usage",
    "log_performance_metrics", "monitor_gradients", "optimize_memory_usage", "profile_memory_usage", "simple_timer",
    "timer",
]  # fmt: skip
DISTRIBUTED = ["get_rank", "get_world_size", "is_main_process", "setup_distributed_environment"]

LOOK = """
import json, sys
import ullage
listed = dir(ullage)
heavy = sorted({"torch", "pydantic", "transformers", "yaml"} & set(sys.modules))
ullage.TrainingConfig
after = sorted({"torch", "pydantic"} & set(sys.modules))
print(json.dumps([listed, heavy, after]))
"""


def test_the_package_is_light_until_a_name_is_used():
    done = subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True, text=True)
    listed, heavy, after = json.loads(done.stdout)
    assert set(NAMES) <= set(listed)
    assert heavy == []
    assert after == ["pydantic"]  # a flat config needs the tree, and no tensors


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_its_own(name):
    assert getattr(ullage, name).__name__ == name
    assert name in ullage.__all__


def test_another_name_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'ullage' has no attribute 'Trainers'"):
        ullage.Trainers  # noqa: B018
    with pytest.raises(ImportError):
        from ullage import Trainers  # noqa: F401


def test_the_two_modules():
    import ullage.distributed
    import ullage.profiler

    assert sorted(ullage.profiler.__all__) == PROFILER
    assert sorted(ullage.distributed.__all__) == DISTRIBUTED
    assert all(callable(getattr(ullage.profiler, name)) for name in PROFILER)
    assert all(callable(getattr(ullage.distributed, name)) for name in DISTRIBUTED)
