"""Ullage's own update, traced without a device, against what its tensors must weigh."""

import torch

from ullage.base.communicator import Solo
from ullage.bench.update import Workload, prepared
from ullage.config.tree import Optim
from ullage.engine.optimizer import Levers, Optimizer
from ullage.planner.replay import Allocate, Empty, Enter
from ullage.run.trace_phases import TracedCapture, record_phases, traced_target

# Before Ampere: the plain kernels, which need no Triton.
TARGET = traced_target((7, 5), 2**37)


def test_values_asked_for_and_copies_to_the_host_are_answered():
    found = {}

    def step(phase):
        phase("here")
        x = torch.zeros(256, device=TARGET.device)
        found["sum"] = float(x.sum())
        found["host"] = x.cpu()
        found["kept"] = torch.ones(256).copy_(x)
        found["back"] = (torch.ones(256).to(TARGET.device) + x).shape

    trace = record_phases(step)
    assert found["sum"] == 1.0
    assert (found["host"].device.type, found["kept"].sum().item(), found["back"]) == ("cpu", 256.0, (256,))
    assert trace.components("here")["activations"] == 3 * 1024, "x, its copy and their sum; nothing of the host"


def test_an_update_holds_weights_gradients_and_the_optimizer_it_was_built_with():
    sizes = {}

    def step(phase):
        phase("load")
        actor, passes, _ = prepared(Workload(shape="tiny", tokens=512, micro_batch=256, mean=64, cap=128), TARGET, {})
        parameters = list(actor.model.module.parameters())
        phase.own("weights", parameters)
        phase("update")
        passes()
        phase.own("gradients", [p.grad for p in parameters if p.grad is not None])
        phase("step")
        actor.optimizer.step(1e-6, Solo())
        sizes["weights"] = sum(p.numel() for p in parameters) * 2
        sizes["optimizer"] = sum(actor.optimizer.nbytes().values())

    trace = record_phases(step)
    update, after = trace.components("update"), trace.components("step")
    assert update["weights"] == after["weights"] == sizes["weights"]
    assert after["gradients"] == sizes["weights"]
    # Beside master weights and moments the step makes less than another copy of the weights.
    assert sizes["optimizer"] == 7 * sizes["weights"], "gradients, master and two moments: 2 + 4 + 4 + 4 bytes"
    assert 0 < after["activations"] - 6 * sizes["weights"] < sizes["weights"]


def test_a_captured_step_runs_on_a_queue_of_its_own_and_then_into_a_pool():
    def step(phase):
        phase("rollout")
        capture = TracedCapture(phase)
        for size in (256, 512):
            replay = capture(lambda size=size: torch.zeros(size, device=TARGET.device) + 1)
            replay()

    events = record_phases(step).events
    first = events.index(Enter("rollout"))
    seen = [(event.size, event.owner) for event in events[first:] if isinstance(event, Allocate)]
    workspace = [(32 * 2**20, "side"), (2**20, "side")]
    # A tensor and its sum, twice; what is replayed makes nothing, and libraries keep what they have for the queue.
    assert seen == workspace + [(4 * size, owner) for size in (256, 512) for owner in ("side", "graphs") for _ in "ab"]
    assert [event for event in events if isinstance(event, Empty)] == [Empty(), Empty()]


def test_an_optimizer_on_the_host_rounds_there(monkeypatch):
    """What rounding needs beside weights and master is nobody's on the device."""

    def traced():
        def step(mark):
            del mark
            weight = torch.zeros(3 << 20, dtype=torch.bfloat16, device="meta").requires_grad_()
            Optimizer([("weight", weight)], Optim(), Levers(state="host")).step(1e-3, Solo())

        return [(event.size, event.owner) for event in record_phases(step).events if isinstance(event, Allocate)]

    thresholds = traced()
    monkeypatch.setattr("ullage.engine.optimizer.round_by_thresholds_", lambda narrow, wide, place: narrow.copy_(wide))
    assert traced() == thresholds
