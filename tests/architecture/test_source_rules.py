"""Rules about the source that no linter knows: sizes, opening sentences, forbidden calls, names of tests."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "ullage"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Whatever unpickles can run code that a file or a peer brought along.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_NAMES = {"eval", "exec"}
FORBIDDEN_CALLS = {
    "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen",
}  # fmt: skip
FORBIDDEN_METHODS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
FORBIDDEN_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}


def name_of(path):
    return str(path.relative_to(ROOT))


def functions(tree):
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def violations(tree):
    """Every forbidden import, call or keyword in a module, as `line: what`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
            for name in names:
                if name.split(".")[0] in FORBIDDEN_IMPORTS or name in FORBIDDEN_CALLS:
                    yield f"{node.lineno}: import of {name}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            method = called.rpartition(".")[2]
            if called in FORBIDDEN_NAMES | FORBIDDEN_CALLS or method in FORBIDDEN_METHODS:
                yield f"{node.lineno}: {called}()"
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in FORBIDDEN_KEYWORDS and not is_false:
                    yield f"{node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"


def test_files_stay_short():
    long = {name_of(path): count for path in MODULES if (count := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert long == {}


def test_functions_stay_short():
    long = {
        f"{name_of(path)}:{node.lineno} {node.name}": length
        for path in MODULES
        for node in functions(ast.parse(path.read_text()))
        if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_every_module_opens_with_what_lives_there():
    silent = []
    for path in MODULES:
        first_line = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        if len(first_line.split()) < 3:
            silent.append(name_of(path))
    assert silent == []


def test_nothing_in_the_source_can_execute_data():
    found = [f"{name_of(path)}:{what}" for path in MODULES for what in violations(ast.parse(path.read_text()))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["1: import of pickle"]),
        ("def f():\n    from pickle import loads", ["2: import of pickle", "2: import of pickle.loads"]),
        ("from torch import load", ["1: import of torch.load"]),
        ("torch.load(path, weights_only=True)", ["1: torch.load()"]),
        ("eval(text)", ["1: eval()"]),
        ("exec(text)", ["1: exec()"]),
        ("yaml.load(text, Loader=yaml.SafeLoader)", ["1: yaml.load()"]),
        ("subprocess.run(command, shell=True)", ["1: shell=True"]),
        ("from_pretrained(path, trust_remote_code=flag)", ["1: trust_remote_code=flag"]),
        ("dist.all_gather_object(out, value)", ["1: dist.all_gather_object()"]),
        ("model.eval(); spec.loader.exec_module(m); yaml.safe_load(t); run(c, shell=False)", []),
        ("'pickle, eval(x)'  # torch.load", []),
    ],
)
def test_the_check_itself(source, found):
    assert list(violations(ast.parse(source))) == found


def test_names_of_test_files_are_unique():
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_room_of_the_tests_is_a_room_of_the_source():
    beside = {"architecture", "data", "golden", "invariants", "slow", "gpu", "tools", "end_to_end"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert folders - beside - rooms == set()
