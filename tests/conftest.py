"""Settings every test runs under, and tiny models made once per worker."""

import os
import tempfile
from pathlib import Path

# Before the first import of torch: with several test workers, one thread each is several times faster than many.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["NO_COLOR"] = "1"
# What runs remember about a machine is neither read from nor left to whoever runs the tests.
CACHE = tempfile.TemporaryDirectory(prefix="ullage-tests-", ignore_cleanup_errors=True)
os.environ["XDG_CACHE_HOME"] = CACHE.name

SOURCE = Path(__file__).parent.parent / "src"
# Child processes find the package of this tree, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))

import pytest  # noqa: E402 -- after the environment is set


@pytest.fixture(scope="session")
def tiny_architecture(tmp_path_factory):
    """`tiny_architecture("qwen3")`: the folder of a tiny random model of that architecture, made on first use."""
    from make_tiny_model import make_tiny_model

    made = {}

    def folder(name):
        if name not in made:
            made[name] = make_tiny_model(tmp_path_factory.mktemp("models") / name, architecture=name)
        return made[name]

    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_architecture):
    """Folder of a tiny random Llama with a character tokenizer; shared, so never write to it."""
    return tiny_architecture("llama")
