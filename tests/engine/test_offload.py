"""Activation offload: what leaves, when it leaves and returns, that its memory is freed, and that nothing changes."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ullage.base.errors import ConfigError
from ullage.engine import offload
from ullage.engine.offload import (
    AsyncDoubleBufferGroupOffloadHandler,
    SynchronizedGroupOffloadHandler,
    make_handler,
    offload_activations,
)
from ullage.engine.recompute import recompute_layers
from ullage.engine.saved_storage import HostMemory, Stored

CPU = torch.device("cpu")
WIDTH = 8
ROWS = 4
ONE = ROWS * WIDTH * 8
"""Bytes of an activation. A layer saves two: its input for the linear, and the output of its tanh."""
KINDS = {"sync": SynchronizedGroupOffloadHandler, "async": AsyncDoubleBufferGroupOffloadHandler}


class _Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.before = lambda: None

    def forward(self, inputs):
        self.before()
        return inputs + torch.tanh(self.linear(inputs))


def make_layers(count=6):
    torch.manual_seed(0)
    return torch.nn.ModuleList(_Layer() for _ in range(count))


def make_inputs(rows=ROWS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)


def make(kind, offloaded, groups, **settings):
    return KINDS[kind](offloaded, groups, device=CPU, min_bytes=ONE, slab_bytes=1024, **settings)


def forward(layers, inputs):
    for layer in layers:
        inputs = layer(inputs)
    return inputs


def gradients(layers, inputs):
    return torch.autograd.grad(forward(layers, inputs).square().sum(), [inputs, *layers.parameters()])


def same(one, other):
    return len(one) == len(other) and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def slabs_in_use(handler):
    memory = handler.memory
    idle_open = memory.num_slabs > 0 and memory._open.live == 0
    return memory.num_slabs - len(memory._free) - idle_open


def fail(*_):
    raise torch.OutOfMemoryError("injected")


@contextmanager
def watched_saves():
    """Weak references to the storages of all outputs of tanh, in order."""
    refs, original = [], torch.tanh

    def tanh(x):
        out = original(x)
        refs.append(StorageWeakRef(out.untyped_storage()))
        return out

    with mock.patch.object(torch, "tanh", tanh):
        yield refs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("offloaded", "groups"), [(6, 6), (5, 6), (2, 6), (3, 3), (1, 2), (2, 4), (1, 1), (0, 3)])
@pytest.mark.parametrize("recompute", [None, "before", "after", "half"])
def test_gradients_are_the_same_bits(kind, offloaded, groups, recompute):
    layers, inputs = make_layers(), make_inputs()
    want = gradients(layers, inputs)
    if recompute == "before":
        recompute_layers(layers)
    handler = make(kind, offloaded, groups)
    offload_activations(layers, handler)
    if recompute in ("after", "half"):
        recompute_layers(layers, share=1.0 if recompute == "after" else 0.5)
    for _ in range(2):
        assert same(gradients(layers, inputs), want)
    assert (handler.offloaded_bytes > 0) == (offloaded > 0)
    assert slabs_in_use(handler) == 0


@pytest.mark.parametrize(("kind", "left"), [("sync", [0, 1, 2]), ("async", [0, 2, 4])])
def test_what_leaves_is_counted_and_freed(kind, left):
    layers, handler = make_layers(), make(kind, 3, 6)
    offload_activations(layers, handler)
    with watched_saves() as refs:
        out = forward(layers, make_inputs())
    assert handler.saved_bytes == 12 * ONE
    assert handler.offloaded_bytes == 6 * ONE
    assert [index for index, ref in enumerate(refs) if ref.expired()] == left
    assert handler.host_bytes == 3 * 1024  # 6 x 256 bytes, each on a boundary of 512
    out.sum().backward()
    assert slabs_in_use(handler) == 0


def test_async_keeps_at_most_two_leaving_groups():
    layers, handler = make_layers(), make("async", 6, 6)
    offload_activations(layers, handler)
    alive = []
    with watched_saves() as refs:
        for layer in layers:
            layer.before = lambda: alive.append([i for i, ref in enumerate(refs) if not ref.expired()])
        forward(layers, make_inputs())
        # At the start of layer i, i - 1 is on its way.
        assert alive == [[], [0], [1], [2], [3], [4]]
        assert all(ref.expired() for ref in refs)


def test_sync_frees_at_once():
    layers, handler = make_layers(), make("sync", 6, 6)
    offload_activations(layers, handler)
    alive = []
    with watched_saves() as refs:
        for layer in layers:
            layer.before = lambda: alive.append([i for i, ref in enumerate(refs) if not ref.expired()])
        forward(layers, make_inputs())
    assert alive == [[]] * 6


def returns(handler, layers):
    """At the first use of each group in the backward pass: the group, and those on their way back or there."""
    out = forward(layers, make_inputs())
    groups, seen = handler._groups, {}

    def spy(group):
        original(group)
        seen[group.index] = [other.index for other in groups if other.returns and other.members]

    original = handler._prepare
    with mock.patch.object(handler, "_prepare", spy):
        out.sum().backward()
    return seen


@pytest.mark.parametrize(
    ("offloaded", "want"),
    [
        (6, {5: [4, 5], 4: [3, 4, 5], 3: [2, 3, 4, 5], 2: [1, 2, 3, 4, 5], 1: [0, 1, 2, 3, 4, 5]}),
        (5, {5: [4], 4: [3, 4], 3: [2, 3, 4], 2: [1, 2, 3, 4], 1: [0, 1, 2, 3, 4]}),
        # 0 and 3 leave: nothing returns before the last group has made room, then within three groups of its use.
        (2, {5: [], 4: [3], 3: [0, 3], 2: [0, 3], 1: [0, 3]}),
        (1, {5: [], 4: [0], 3: [0], 2: [0], 1: [0]}),
    ],
)
def test_a_group_returns_one_ahead(offloaded, want):
    layers, handler = make_layers(), make("async", offloaded, 6)
    offload_activations(layers, handler)
    assert returns(handler, layers) == {**want, 0: want[1]}


@pytest.mark.parametrize(
    ("offloaded", "groups", "want"),
    [
        *[(0, 5, []), (1, 5, [0]), (2, 5, [0, 2]), (3, 5, [0, 2, 3]), (4, 5, [0, 1, 2, 3]), (5, 5, [0, 1, 2, 3, 4])],
        *[(9, 28, list(range(0, 27, 3))), (0, 1, []), (1, 1, [0])],
    ],
)
def test_which_groups_leave(offloaded, groups, want):
    assert [i for i in range(groups) if make("async", offloaded, groups)._leaves(i)] == want
    assert [i for i in range(groups) if make("sync", offloaded, groups)._leaves(i)] == list(range(offloaded))


@pytest.mark.parametrize("first", ["recompute", "offload"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_recompute_the_inputs_of_the_layers_leave(kind, first):
    layers, handler, inputs = make_layers(), make(kind, 5, 6), make_inputs()
    steps = [lambda: recompute_layers(layers), lambda: offload_activations(layers, handler)]
    for step in steps if first == "recompute" else reversed(steps):
        step()
    entered = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: entered.append(StorageWeakRef(args[0].untyped_storage())))
    out = forward(layers, inputs)
    assert (handler.saved_bytes, handler.offloaded_bytes) == (6 * ONE, 5 * ONE)
    # The first is held by the test, the last stays.
    assert [ref.expired() for ref in entered] == [False, True, True, True, True, False]
    out.sum().backward()
    assert slabs_in_use(handler) == 0


def test_asking_twice_is_asking_once():
    layers, inputs = make_layers(), make_inputs()
    want = gradients(layers, inputs)
    old, new = make("sync", 6, 6), make("async", 3, 3)
    for handler in (old, new):
        offload_activations(layers, handler)
        recompute_layers(layers)
    calls = []
    layers[0].before = lambda: calls.append(1)
    assert same(gradients(layers, inputs), want)
    assert len(calls) == 2
    assert (old.saved_bytes, new.offloaded_bytes) == (0, 6 * ONE)


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_nothing_is_saved(kind):
    layers, handler = make_layers(), make(kind, 6, 6)
    offload_activations(layers, handler)
    with torch.no_grad():
        forward(layers, make_inputs())
    assert (handler.saved_bytes, handler.host_bytes) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay(kind):
    layers, handler = make_layers(1), make(kind, 1, 1)
    offload_activations(layers, handler)
    layers[0].linear.weight.requires_grad_(False)  # a frozen weight is saved too, for the gradient of the input
    assert layers[0].linear.weight.nbytes == 2 * ONE
    out = forward(layers, make_inputs())
    assert handler.saved_bytes == ONE  # tanh's output; without a gradient of the weight, the input is not needed
    out.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_small_tensors_stay(kind):
    layers, handler = make_layers(2), KINDS[kind](2, 2, device=CPU, min_bytes=ONE + 1)
    offload_activations(layers, handler)
    want = gradients(make_layers(2), make_inputs())
    assert same(gradients(layers, make_inputs()), want)
    assert (handler.saved_bytes, handler.host_bytes) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_views_of_one_storage_move_once_and_keep_their_shape(kind, dtype):
    handler = KINDS[kind](2, 2, device=CPU, min_bytes=1, slab_bytes=512)
    whole = torch.arange(60 * 12).reshape(60, 12).to(dtype)
    views = [whole, whole.t(), whole[3:50:2, 1:], whole[None, 5, :, None].expand(4, 12, 2)]
    want, layout = [view.clone() for view in views], [(view.stride(), view.storage_offset()) for view in views]
    size = whole.nbytes
    tags = [handler.tensor_push(view) for view in views[:2]]
    handler.on_group_commit_forward()
    tags += [handler.tensor_push(view, anything=1) for view in views[2:]]
    handler.on_group_commit_forward()
    handler.finish_forward()
    assert handler.saved_bytes == handler.offloaded_bytes == size
    original = StorageWeakRef(whole.untyped_storage())
    del whole, views
    assert original.expired()
    got = [handler.tensor_pop(tag) for tag in reversed(tags)][::-1]
    assert same(got, want)
    assert [(view.stride(), view.storage_offset()) for view in got] == layout
    assert len({view.untyped_storage()._cdata for view in got}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_group_that_stays_needs_too_is_not_fetched(kind):
    handler = KINDS[kind](1, 3, device=CPU, min_bytes=1, slab_bytes=512)
    shared = torch.arange(100)
    first = handler.tensor_push(shared)
    handler.on_group_commit_forward()
    second = handler.tensor_push(shared)
    handler.on_group_commit_forward()
    handler.finish_forward()
    assert handler.offloaded_bytes == handler.saved_bytes == 800
    with mock.patch.object(Stored, "copy_in", side_effect=AssertionError("it is there")):
        assert handler.tensor_pop(second).data_ptr() == shared.data_ptr()
        assert handler.tensor_pop(first).data_ptr() == shared.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_used_again_is_not_taken_for_the_old_tensor(kind):
    handler = KINDS[kind](64, 64, device=CPU, min_bytes=1, slab_bytes=512)
    memory, storages, tags = (bytearray(8000), bytearray(8000)), [], []
    for value in range(64):
        assert all(old.expired() for old in storages[:-1]), "all but the last group's memory is free"
        tensor = torch.frombuffer(memory[value % 2], dtype=torch.int64).fill_(value)  # a new storage, an old address
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        tags.append(handler.tensor_push(tensor))
        del tensor
        handler.on_group_commit_forward()
    handler.finish_forward()
    assert [int(handler.tensor_pop(tag)[0]) for tag in reversed(tags)] == list(reversed(range(64)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offloaded", [0, 2])
def test_a_change_in_place_is_an_error_as_without_offload(kind, offloaded):
    layers, handler = make_layers(2), make(kind, offloaded, 2)
    offload_activations(layers, handler)
    out = forward(layers, make_inputs())
    with torch.no_grad():
        layers[0].linear.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


def test_a_change_before_the_copy_is_an_error_only_for_what_is_used():
    handler = make("async", 2, 2)
    first, second = torch.zeros(ROWS, WIDTH, dtype=torch.float64), torch.ones(ROWS, WIDTH, dtype=torch.float64)
    tags = [handler.tensor_push(tensor) for tensor in (first, second)]
    first.add_(1.0)
    handler.on_group_commit_forward()
    handler.finish_forward()
    assert torch.equal(handler.tensor_pop(tags[1]), second)
    with pytest.raises(RuntimeError, match="changed in place"):
        handler.tensor_pop(tags[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_the_pass_can_be_repeated(kind, recompute, where):
    layers, handler, inputs = make_layers(), make(kind, 5, 6), make_inputs()
    want = gradients(layers, inputs)
    offload_activations(layers, handler)
    if recompute:
        recompute_layers(layers)
    gradients(layers, inputs)
    held = handler.host_bytes
    if where == "forward":
        layers[3].before = fail
    else:
        hook = layers[3].register_full_backward_hook(fail)
    with watched_saves() as refs:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            gradients(layers, inputs)
        del caught
        handler.reset()
        assert slabs_in_use(handler) == 0
        assert all(ref.expired() for ref in refs)
    layers[3].before = lambda: None
    if where == "backward":
        hook.remove()
    for _ in range(2):
        assert same(gradients(layers, inputs), want)
    assert handler.host_bytes == held


@pytest.mark.parametrize("kind", KINDS)
def test_host_memory_does_not_grow_with_passes_of_other_sizes(kind):
    layers, plain, handler = make_layers(), make_layers(), make(kind, 5, 6)
    offload_activations(layers, handler)
    held = []
    for rows in (64, 7, 33, 64, 50, 4, 63):
        assert same(gradients(layers, make_inputs(rows)), gradients(plain, make_inputs(rows)))
        held.append(handler.host_bytes)
    assert held == [10 * 64 * WIDTH * 8] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_passes_may_be_nested(kind):
    layers, handler = make_layers(), make(kind, 5, 6)
    one, other = make_inputs(seed=1), make_inputs(rows=9, seed=2)
    want = gradients(layers, one), gradients(layers, other)
    offload_activations(layers, handler)
    first, second = forward(layers, one), forward(layers, other)
    for inputs, out, gradient in ((one, first, want[0]), (other, second, want[1])):
        assert same(torch.autograd.grad(out.square().sum(), [inputs, *layers.parameters()]), gradient)
    del first, second, out
    assert slabs_in_use(handler) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_can_be_walked_twice(kind):
    layers, inputs = make_layers(), make_inputs()
    want = gradients(layers, inputs)
    offload_activations(layers, make(kind, 5, 6))
    loss = forward(layers, inputs).square().sum()
    for _ in range(2):
        assert same(torch.autograd.grad(loss, [inputs, *layers.parameters()], retain_graph=True), want)


def test_the_seeds_constructors_and_kinds():
    assert SynchronizedGroupOffloadHandler(3).num_offload_group == 3
    handler = AsyncDoubleBufferGroupOffloadHandler(num_offload_group=2, num_model_group=4)
    assert (handler.num_offload_group, handler.num_model_group) == (2, 4)
    assert isinstance(handler, SynchronizedGroupOffloadHandler)
    assert type(make_handler("sync", groups=4, offloaded=2, device=CPU)) is SynchronizedGroupOffloadHandler
    assert type(make_handler("async", groups=4, offloaded=2, device=CPU)) is AsyncDoubleBufferGroupOffloadHandler
    layers = make_layers(3)
    handler = SynchronizedGroupOffloadHandler(2, device=CPU, min_bytes=ONE)
    offload_activations(layers, handler)  # a group for each layer
    forward(layers, make_inputs())
    assert handler.offloaded_bytes == 4 * ONE


def test_more_groups_than_layers():
    with pytest.raises(ConfigError, match="4 groups of activations to offload, but the model has 3 layers"):
        offload_activations(make_layers(3), make("async", 1, 4))


def test_pieces_fill_slabs_without_gaps():
    memory = HostMemory(CPU, 1024)
    assert memory.held_bytes == 0
    first, second, third = memory.take(700), memory.take(512), memory.take(1800)
    assert [[len(piece.memory) for piece in pieces] for pieces in (first, second, third)] == [
        [700],
        [512],
        [512, 1024, 264],
    ]
    assert memory.held_bytes == 4096
    memory.give_back(second)
    memory.give_back(third)
    again = memory.take(2048)  # two slabs are free, and half of the last
    assert [len(piece.memory) for piece in again] == [1024, 1024]
    assert memory.held_bytes == 4096
    memory.give_back(first)
    memory.give_back(again)
    assert sum(len(piece.memory) for piece in memory.take(4096)) == 4096
    assert memory.held_bytes == 4096


class _Lazy:
    """A side stream that copies only when the computation waits for it, from and to memory that must still be there."""

    def __init__(self, device):
        del device
        self.queue = []

    def use(self):
        return _Deferred(self.queue)

    def wait_for_main(self):
        pass

    def mark(self):
        return len(self.queue)

    def hold_main(self, mark):
        for place in range(mark):
            if self.queue[place] is not None:
                self.queue[place]()
                self.queue[place] = None


class _Deferred(TorchFunctionMode):
    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.copy_:
            return function(*args, **(kwargs or {}))
        target, source = args
        target.fill_(255)  # not a number, until the copy has happened
        self.queue.append(partial(_copy, _weak(target), _weak(source)))
        return target


def _copy(target, source):
    _strong(target).copy_(_strong(source))


def _weak(tensor):
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.size()


def _strong(weak):
    reference, offset, size = weak
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    assert storage is not None, "freed before it was copied"
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, size, (1,))


@pytest.mark.parametrize(("offloaded", "groups"), [(6, 6), (5, 6), (2, 6), (2, 3)])
@pytest.mark.parametrize("recompute", [False, True])
def test_copies_that_take_their_time_are_waited_for(monkeypatch, offloaded, groups, recompute):
    monkeypatch.setattr(offload, "SideStream", _Lazy)
    layers, inputs = make_layers(), make_inputs()
    want = gradients(layers, inputs)
    handler = make("async", offloaded, groups)
    offload_activations(layers, handler)
    if recompute:
        recompute_layers(layers)
    for _ in range(3):
        assert same(gradients(layers, inputs), want)
    assert not any(handler.d2h_stream.queue + handler.h2d_stream.queue)
    hook = layers[4].register_full_backward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(layers, inputs)
    hook.remove()
    handler.reset()
    # Broken off: what was on its way has been waited for before its memory was free.
    assert not any(handler.d2h_stream.queue + handler.h2d_stream.queue)
    assert slabs_in_use(handler) == 0
    assert same(gradients(layers, inputs), want)
