"""What each template says about itself: where it fits, what it needs there, and how long a step takes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path

from ullage.base.units import seconds_text
from ullage.config.load import load_config
from ullage.planner.documents.worked import gib, written
from ullage.planner.hardware import parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.plan import Plan, plan

FOLDER = "src/ullage/config/templates"
WIDTH = 118


@dataclass(frozen=True, slots=True)
class Template:
    """A template's first sentence, and the machine that it is planned for."""

    says: str
    machine: str


TEMPLATES = {
    "3b": Template("GRPO on a 3B model, all parameters, on one card of 24 GB.", "RTX 4090"),
    "8b": Template("GRPO on an 8B model, all parameters, on one card of 80 GB.", "H100 SXM"),
    "32b": Template("GRPO on a 32B model with LoRA, on one card of 80 GB.", "H100 SXM"),
    "70b": Template(
        "GRPO on a 70B model with QLoRA, on one card of 80 GB. Training all of its parameters takes weights that "
        "several GPUs share, which Ullage does not do yet.",
        "H100 SXM",
    ),
    "constrained": Template("Least memory: every lever is pulled that leaves what is learned alone.", "RTX 4090"),
    "balanced": Template("A balance: layers are recomputed, and nothing leaves the GPU.", "H200"),
    "multi_gpu": Template(
        "Several GPUs of one machine. Each holds a whole replica, so that more of them make a step faster, not "
        "smaller: models larger than one GPU need shared weights, which Ullage does not have yet.",
        "8x H100 SXM",
    ),
}


def files() -> dict[str, str]:
    """Every template under its path in the repository: its header made anew, the rest as it is."""
    return {f"{FOLDER}/{name}.yaml": f"{header(name)}\n\n{body(name)}" for name in TEMPLATES}


def header(name: str) -> str:
    """What the planner says about the rest of the file."""
    made, where = planned(name), TEMPLATES[name].machine
    usable = gib(made.machine.gpu.memory_bytes) if made.machine else ""
    host = made.host_bytes * (made.machine.count if made.machine else 1)
    paragraphs = [
        TEMPLATES[name].says,
        f"Planned for {where} ({usable} usable on each GPU): {made.binding.name} binds with {gib(made.peak_bytes)}; "
        f"host memory {gib(host)}; a checkpoint {gib(made.disk['checkpoint'])}; a step takes about "
        f"{seconds_text(made.step_seconds)} if every response has its full length.",
    ]
    if made.chosen:
        values = written({key: each["value"] for key, each in made.chosen.items()})
        paragraphs.append(f"Left on auto, and chosen there: {', '.join(values)}.")
    paragraphs.append(f"For another GPU: ullage plan {name}.yaml --gpu NAME")
    return "\n".join(line for text in paragraphs for line in _comment(text))


@cache
def planned(name: str) -> Plan:
    path = Path(str(resources("ullage.config") / "templates" / f"{name}.yaml"))
    config = load_config(path, []).config
    return plan(find_shape(config.actor_rollout_ref.model.path), config, parse_machine(TEMPLATES[name].machine))


def body(name: str) -> str:
    """The file below its first comment."""
    text = (resources("ullage.config") / "templates" / f"{name}.yaml").read_text(encoding="utf-8")
    return text.partition("\n\n")[2]


def _comment(text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]
