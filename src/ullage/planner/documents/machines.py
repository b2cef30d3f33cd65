"""GPUs and what clouds rent out, from the bundled data files, with a date and a source for every figure."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ullage.planner.documents.page import Page
from ullage.planner.documents.recipes import CONTEXT, named, spare
from ullage.planner.documents.worked import Worked, gib, worked
from ullage.planner.hardware import Instance, gpus, instances

FIELDS = ("total_mib", "usable_mib", "bandwidth_gbs", "tflops", "interconnect_gbs", "pcie_generation")
PROVIDERS = ("AWS", "GCP", "Azure", "Lambda", "RunPod", "Nebius")
USES = (
    ("0.5B", "Qwen2.5-0.5B", "full"),
    ("3B", "Qwen2.5-3B", "full"),
    ("7B", "Qwen2.5-7B", "LoRA"),
    ("7B", "Qwen2.5-7B", "full"),
    ("13B", "Llama-2-13B", "LoRA"),
    ("32B", "Qwen2.5-32B", "LoRA"),
    ("70B", "Llama-3.1-70B", "QLoRA"),
)


def page() -> Page:
    found = data("gpus.json")
    made = Page(
        "hardware",
        "GPUs and cloud instances",
        f"GPUs as of {found['date']}, prices on the date of their source. They are data: "
        "`src/ullage/planner/data/gpus.json` and `clouds.json`, which anyone can update.",
    )
    _gpus(made, found)
    _uses(made)
    _instances(made)
    return made


def _gpus(made: Page, found: dict[str, Any]) -> None:
    made.say(
        "## GPUs",
        "Usable is what the CUDA runtime reports; a 24 GB card never has 24 GiB. TFLOP/s are dense tensor-core rates "
        "in bf16 (fp16 where marked) with float32 accumulation: what people quote at half or twice as much is another "
        "unit. Each number links to its source.",
    )
    rows = []
    for gpu, row in zip(gpus(), found["gpus"], strict=True):
        explanation = _sourced(row, found)

        def cell(text: str, name: str = gpu.name, told: str = explanation) -> str:
            return made.cell(text, name, told)

        marked = "" if gpu.tensor_dtype == "bf16" else f" ({gpu.tensor_dtype})"
        rows.append(
            [
                gpu.name,
                str(gpu.year),
                cell(gib(gpu.memory_bytes)),
                cell(f"{gpu.bandwidth:,.0f}"),
                cell(f"{gpu.tflops_bf16:,.0f}{marked}"),
                cell(f"{gpu.interconnect_gbs:,.0f}" if gpu.interconnect_gbs else "none"),
                cell(f"{gpu.pcie_gbs:.0f}"),
            ]
        )
    head = ["GPU", "year", "usable", "memory GB/s", "TFLOP/s", "between GPUs GB/s", "to the host GB/s"]
    made.table(head, rows)
    made.say("The fields of the data file:")
    made.table(["field", "what it is"], [[f"`{field}`", found["units"][field]] for field in FIELDS])


def _sourced(row: dict[str, Any], found: dict[str, Any]) -> str:
    """Each field and where it was read."""
    lines = ["| field | value | source |", "| --- | --- | --- |"]
    for field in FIELDS:
        source = found["sources"][row["sources"][field]]
        link = f"[{source['title']}]({source['url']})" if source.get("url") else source["title"]
        lines.append(f"| `{field}` | {row[field]:,} | {link} |")
    return "\n".join(lines)


def _uses(made: Page) -> None:
    made.say(
        "## An instance for a model",
        f"The cheapest instance of each provider on which a GRPO run fits with every lever pulled (context {CONTEXT}, "
        "the recipe of [memory by size](sizes.md)), device and host memory counted; list price on demand, USD an hour. "
        "What 1,000 steps cost there: `ullage advise MODEL`.",
    )
    providers = [name for name in PROVIDERS if any(each.provider == name for each in instances())]
    rows = []
    for size, model, method in USES:
        done = worked(model, spare(model, method, "grpo"))
        cells = [_cheapest(made, provider, done) for provider in providers]
        peak = made.peak(done, f"{model}, {named(method, 'grpo')}, the least")
        rows.append([f"{size} ({model})", named(method, "grpo"), peak, *cells])
    made.table(["model", "method", "needs", *providers], rows)


def _cheapest(made: Page, provider: str, done: Worked) -> str:
    fitting = [each for each in instances() if each.provider == provider and _fits(each, done)]
    best = min(fitting, key=lambda each: (each.price or 0.0, each.name), default=None)
    if best is None:
        return "none"
    return f"{best.name} ({best.machine.text}): {_price(made, best)}"


def _fits(each: Instance, done: Worked) -> bool:
    machine = each.machine
    able = machine.gpu.vendor == "NVIDIA" and machine.gpu.tensor_dtype == "bf16"
    enough = machine.host_bytes is None or done.host_bytes * machine.count <= machine.host_bytes
    return able and each.price is not None and machine.gpu.memory_bytes >= done.peak_bytes and enough


def _instances(made: Page) -> None:
    made.say("## All instances", data("clouds.json")["about"])
    rows = []
    for each in instances():
        ram = "not given" if each.machine.host_bytes is None else gib(each.machine.host_bytes)
        price = "none found" if each.price is None else _price(made, each)
        rows.append([each.provider, each.name, each.machine.text, ram, price, each.region or "any", each.date])
    made.table(["provider", "instance", "GPUs", "RAM", "USD an hour", "region", "price of"], rows)


def _price(made: Page, each: Instance) -> str:
    told = f"List price on {each.date}, read from [{each.provider}'s table]({each.source})."
    return made.cell(f"${each.price:,.2f}", f"Prices of {each.provider}, {each.date}", told)


@cache
def data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("ullage.planner") / "data" / name).read_text(encoding="utf-8"))
    return found
