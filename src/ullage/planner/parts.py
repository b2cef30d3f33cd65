"""What each component of a plan is, in words: for `--explain`, `--json` and the page of `--html`."""

from __future__ import annotations

from collections.abc import Iterable

from ullage.planner.phases import Phase

PARTS = {
    "weights": "parameters of the roles that are on the device, adapters with them",
    "gradients": "of what is trained, allocated once",
    "optimizer": "moments, and stages for what comes from the host to be stepped",
    "master": "the trained weights in float32",
    "activations": "what layers keep for the backward pass",
    "working_layer": "what the layer at work makes beside that",
    "head": "logits of one chunk, and what their loss and gradient need",
    "kv_cache": "keys and values of the sequences that are decoded at once",
    "graphs": "pool of the captured steps of decoding (CUDA graphs): reserved from the first rollout to the end of the "
    "run and of use to nothing else, so it counts against the device in every phase from then on, though torch "
    "never counts it as allocated",
    "gather": "parameters and gradients on their way between GPUs",
    "buffers": "workspaces of cuBLAS and NCCL",
    "context": "what CUDA holds of the device before anything is allocated",
    "slack": "what the allocator holds beyond what is allocated",
}
"""In the order in which bars are built. All of them count against the device."""


def parts_of(phases: Iterable[Phase]) -> dict[str, str]:
    """Those that some phase has, in the order of bars."""
    found = {name for phase in phases for name in phase.components}
    return {name: text for name, text in PARTS.items() if name in found} | {name: "" for name in found - set(PARTS)}
