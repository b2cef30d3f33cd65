"""The number of keys a user may have to understand has a limit."""

from pydantic import BaseModel

from ullage.config.tree import Config

MAX_KEYS = 150


def keys(section, prefix=""):
    """Every leaf key below a section, as a dotted path."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_there_are_fewer_than_150_keys():
    found = [path for path in keys(Config) if path != "later"]  # the loader's own, which nobody sets
    assert "actor_rollout_ref.actor.optim.lr" in found
    assert len(found) == len(set(found))
    assert len(found) < MAX_KEYS, "\n".join(found)
