"""The tracer against lifetimes worked out by hand."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ullage.planner.replay import Allocate, Enter, Release
from ullage.run.trace import record

KIB = 2**10


def after(trace, phase):
    """The events of a phase with sizes for keys: positive an allocation, negative a free."""
    sizes, found, inside = {}, [], False
    for event in trace.events:
        if isinstance(event, Enter):
            inside = event.phase == phase
        elif isinstance(event, Allocate):
            sizes[event.key] = event.size
            found += [event.size] * inside
        elif isinstance(event, Release):
            found += [-sizes[event.key]] * inside
    return found


def peak(trace, phase):
    return sum(trace.components(phase).values())


def test_storages_are_counted_once_and_die_with_their_last_view():
    def step(phase):
        phase("here")
        whole = torch.zeros(256, 4)
        part = whole[:64].view(-1)
        whole.add_(1.0)
        del whole
        other = part * 2
        del part
        phase("later")
        del other

    trace = record(step)
    assert after(trace, "here") == [4 * KIB, KIB, -4 * KIB]
    assert after(trace, "later") == [-KIB]


def test_the_first_events_are_the_workspaces_of_two_threads():
    trace = record(lambda phase: phase("nothing"))
    assert [event.size // 2**20 for event in trace.events if isinstance(event, Allocate)] == [32, 1, 32, 1]
    assert trace.components("nothing") == {"buffers": 66 * 2**20}


def test_saved_tensors_live_until_backward_and_owners_are_named():
    def step(phase):
        weight = nn.Parameter(torch.empty(128, 128))  # 64 KiB
        phase.own("weights", [weight])
        x = torch.empty(32, 128)  # 16 KiB
        phase("forward")
        loss = functional.silu(x @ weight).sum()  # the product is kept (16), its silu (16) is not, nor the sum
        phase("backward")
        loss.backward()
        phase.own("gradients", [weight.grad])

    trace = record(step)
    forward = trace.components("forward")
    assert forward.pop("buffers") == 66 * 2**20
    assert forward == {"weights": 64 * KIB, "activations": 48 * KIB + 4}
    backward = trace.components("backward")
    assert (backward["weights"], backward["gradients"]) == (64 * KIB, 64 * KIB)


def test_checkpointed_code_keeps_its_input_and_computes_again():
    def body(x):
        for _ in range(8):
            x = x.sin()
        return x

    def step(phase, recompute):
        x = torch.empty(16 * KIB // 4, requires_grad=True)
        phase("forward")
        y = checkpoint(body, x, use_reentrant=False) if recompute else body(x)
        phase("between")
        z = y.sum()
        phase("backward")
        z.backward()

    full = record(lambda phase: step(phase, False))
    less = record(lambda phase: step(phase, True))
    # x and eight sines against x, the last, and what `sum` makes.
    assert peak(full, "between") - peak(less, "between") == 7 * 16 * KIB
    assert peak(less, "backward") >= peak(full, "between")


def test_attention_keeps_query_key_value_output_and_one_number_per_row():
    def step(phase):
        query = torch.empty(2, 8, 64, 32, dtype=torch.bfloat16, requires_grad=True)
        key, value = (torch.empty(2, 2, 64, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        phase("forward")
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        phase("after")
        out.sum()

    big = [size for size in after(record(step), "forward") if abs(size) > 64]
    assert big == [2 * 8 * 64 * 32 * 2, 2 * 8 * 64 * 4]


def test_a_storage_that_is_emptied_and_filled_again_is_followed():
    def step(phase):
        x = torch.empty(1024)
        phase("empty")
        x.untyped_storage().resize_(0)
        phase("full")
        x.untyped_storage().resize_(4096)

    trace = record(step)
    assert peak(trace, "full") - 66 * 2**20 == 4096
    assert [type(event) for event in trace.events[-7:-1]] == [Enter, Release, Allocate, Enter, Release, Allocate]
