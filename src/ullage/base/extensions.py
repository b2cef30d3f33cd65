"""Finds a part by name: a file of one of our rooms, a dotted module, or a Python file of the user's."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ullage.base.errors import ConfigError


def find(room: str, name: str) -> ModuleType:
    """The module called `name`: `ullage/<room>/<name>.py`, a dotted module name, or a path that ends in `.py`."""
    if name.endswith(".py"):
        return load_file(Path(name))
    target = name if "." in name else f"ullage.{room}.{name}"
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is None or not (target == error.name or target.startswith(error.name + ".")):
            raise  # a dependency of the part is missing: its own message is the useful one
        raise ConfigError(
            f"no {room} part called '{name}'",
            f"known: {', '.join(known(room))}; or give a dotted module, or a path that ends in .py",
        ) from None


def known(room: str) -> list[str]:
    """Names of the parts that come with Ullage."""
    folder = Path(__file__).parent.parent / room
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def load_file(path: Path) -> ModuleType:
    """Import a user's Python file under a name that cannot collide with an installed module."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"no such Python file: {path}", "check the path in the config")
    name = f"ullage_user_{path.stem}_{abs(hash(str(path))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"not importable: {path}"
    assert spec.loader is not None, f"not importable: {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
