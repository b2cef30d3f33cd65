"""Compares traced and replayed peaks with measured ones: `python tests/golden/check_memory.py FILE [--rows N]`.

Rebuilds the plain policy-gradient step of each row on fake tensors (no GPU, no memory), replays what it allocates, and
prints the error of every phase's allocated peak, of the row's, and on which side of a capped run the least capacity
falls. Exits with 1 above a mean error of 0.1 % or a worst of 0.5 %, or if a capped row is on the wrong side. The format
is that of memory_h200.json beside this script.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from ullage.planner.replay import extrapolate, least_capacity, replay
from ullage.run.trace import record

MEAN_LIMIT = 0.001
WORST_LIMIT = 0.005
CHUNK = 1024
RANK = 16
DEPTHS = (2, 4)
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Adapter(nn.Module):
    """A frozen linear layer with a trained product of two thin ones beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(RANK, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 2.0


class PlainStep:
    """Log-probs without gradient, two micro-batches, clipping, AdamW: the step that was measured."""

    def __init__(self, row, layers=None):
        self.row = row
        self.layers = layers or row["model"]["num_hidden_layers"]
        self.autocast = "autocast" in row["precision"]
        self.lora = "LoRA" in row["precision"]

    def __call__(self, phase):
        phase("load")
        self.model = self.build()
        phase("warm")
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        phase.own("weights", self.model.parameters())
        optimizer = torch.optim.AdamW(self.trained, lr=1e-6, **{self.row["adamw"]: True})
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        phase.own("gradients", (parameter.grad for parameter in self.trained))
        optimizer.step()
        for state in optimizer.state.values():
            phase.own("optimizer", (x for x in state.values() if isinstance(x, torch.Tensor)))
        optimizer.zero_grad(set_to_none=True)
        ids = torch.randint(0, self.row["model"]["vocab_size"], (self.row["batch"], self.row["length"]))
        advantages = torch.ones(self.row["batch"], self.row["length"] - 1)
        phase("ref")
        with torch.no_grad():
            old = self.logprobs(ids)
        for number in (0, 1):
            phase(f"fwd{number}")
            loss = (torch.exp(self.logprobs(ids) - old) * -advantages).mean() / 2
            phase(f"bwd{number}")
            loss.backward()
            del loss
        phase("clip")
        phase.own("gradients", (parameter.grad for parameter in self.trained))
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        phase("opt")
        optimizer.step()

    def build(self):
        fields = dict(self.row["model"], num_hidden_layers=self.layers, use_cache=False)
        config = AutoConfig.for_model(fields.pop("architecture"), **fields)
        dtype = torch.float32 if self.autocast else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        model.train()
        if self.lora:
            model.requires_grad_(False)
            model.enable_input_require_grads()
            for layer in model.model.layers:
                for part in (layer.self_attn, layer.mlp):
                    for name in ADAPTED:
                        if hasattr(part, name):
                            setattr(part, name, Adapter(getattr(part, name)))
        if self.row["gradient_checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def logprobs(self, ids):
        """[batch, length - 1] of each token given those before it."""
        targets = ids[:, 1:]
        if "chunks" in self.row["logprob"]:
            with self.casting():
                hidden = self.model.model(input_ids=ids).last_hidden_state
            hidden = hidden[:, :-1].reshape(-1, hidden.shape[-1])
            chunks = zip(hidden.split(CHUNK), targets.reshape(-1).split(CHUNK), strict=True)
            return torch.cat([checkpoint(self.chunk, *both, use_reentrant=False) for both in chunks]).view(
                targets.shape
            )
        with self.casting():
            logits = self.model(input_ids=ids).logits[:, :-1]
        if "fp32" in self.row["logprob"]:
            return gathered(logits.float(), targets)
        return torch.stack([gathered(row, target) for row, target in zip(logits, targets, strict=True)])

    def chunk(self, hidden, targets):
        with self.casting():
            logits = self.model.lm_head(hidden)
        return gathered(logits.float(), targets)

    def casting(self):
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


def gathered(logits, targets):
    return functional.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def trace(row, layers=None):
    # On fake tensors transformers cannot tell that nothing is packed, and would build a mask.
    with mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", return_value=None):
        return record(PlainStep(row, layers))


def predict(row):
    """Allocated peaks of every phase from the trace of the whole model, and the trace."""
    traced = trace(row)
    return {phase: peak.allocated for phase, peak in replay(traced.events, "native").items()}, traced


def predict_shallow(row):
    """Allocated peaks of every phase from two models of a few layers."""
    return extrapolate({n: trace(row, n).events for n in DEPTHS}, row["model"]["num_hidden_layers"], "native")


def errors(row, peaks):
    """Relative error of each measured phase's allocated peak, and of the row's."""
    measured = {phase: peak["allocated"] for phase, peak in row["peaks_native"].items()}
    found = {phase: peaks[phase] / size - 1 for phase, size in measured.items()}
    found["peak"] = max(peaks[phase] for phase in measured) / max(measured.values()) - 1
    return found


def capped(row, traced):
    """For each capped run: the cap, whether it ran, and whether the least capacity says so too."""
    tests = row.get("cap_test_expandable_segments", ())
    least = least_capacity(traced.events) if tests else 0
    return [(test["cap_bytes"], test["ran"], (least <= test["cap_bytes"]) == test["ran"], least) for test in tests]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, help="only the first N")
    parser.add_argument("--shallow", action="store_true", help=f"extrapolate from {DEPTHS} layers; no capped runs")
    arguments = parser.parse_args()
    worst, sides = [], []
    for row in json.loads(arguments.file.read_text())["rows"][: arguments.rows]:
        began = time.perf_counter()
        peaks, traced = (predict_shallow(row), None) if arguments.shallow else predict(row)
        found = errors(row, peaks)
        worst.append(abs(found["peak"]))
        phases = "  ".join(f"{phase} {error:+.3%}" for phase, error in found.items())
        print(f"row {row['id']:>3}  {phases}  ({time.perf_counter() - began:.1f} s)", flush=True)
        for cap, ran, right, least in capped(row, traced) if traced else ():
            sides.append(right)
            verdict = "right" if right else "WRONG"
            print(f"         cap {cap:,}: {'ran' if ran else 'out of memory'}; least capacity {least:,}: {verdict}")
    mean = sum(worst) / len(worst)
    print(f"{len(worst)} rows: mean {mean:.4%}, worst {max(worst):.4%}; capped runs {sum(sides)} of {len(sides)}")
    return 0 if mean <= MEAN_LIMIT and max(worst) <= WORST_LIMIT and all(sides) else 1


if __name__ == "__main__":
    sys.exit(main())
