"""Parts by name: ours, a dotted module, a user's file; what is missing is said as it is."""

import subprocess
import sys

import pytest

from ullage.base import extensions
from ullage.base.errors import ConfigError


def test_a_part_of_ours():
    assert extensions.find("rewards", "gsm8k").__name__ == "ullage.rewards.gsm8k"


def test_a_dotted_module():
    assert extensions.find("rewards", "json.decoder").__name__ == "json.decoder"


def test_a_users_file(tmp_path):
    file = tmp_path / "json.py"
    file.write_text("answer = 42\n")
    module = extensions.find("rewards", str(file))
    assert module.answer == 42
    assert module.__name__ != "json", "never in the place of an installed module"
    assert sys.modules["json"].__name__ == "json"


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"where = {folder!r}\n")
    first, second = (extensions.find("rewards", str(tmp_path / folder / "reward.py")) for folder in ("a", "b"))
    assert (first.where, second.where) == ("a", "b")


@pytest.mark.parametrize("name", ["gsm8", "no_such_package.part"])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(ConfigError, match=f"no rewards part called '{name}'") as caught:
        extensions.find("rewards", name)
    assert "gsm8k" in caught.value.remedy
    assert "math" in caught.value.remedy


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no such Python file: .*missing\.py"):
        extensions.find("rewards", str(tmp_path / "missing.py"))


def test_a_dependency_missing_inside_a_users_file_is_its_own_error(tmp_path):
    file = tmp_path / "needs.py"
    file.write_text("import surely_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        extensions.find("rewards", str(file))


def test_a_dependency_missing_inside_a_dotted_module_is_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "ullage_test_package.py").write_text("import surely_not_installed\n")
    (tmp_path / "ullage_test_folder").mkdir()
    (tmp_path / "ullage_test_folder" / "__init__.py").write_text("")
    (tmp_path / "ullage_test_folder" / "part.py").write_text("import surely_not_installed.deep\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        extensions.find("rewards", "ullage_test_folder.part")


def test_known_lists_parts_and_no_private_files():
    names = extensions.known("algorithms")
    assert "grpo" in names
    assert not any(name.startswith("_") for name in names)


def test_base_does_not_load_torch():
    code = "import sys, ullage.base.extensions, ullage.base.communicator; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"
