"""Host memory that is registered with CUDA, and given back; and streams where there are none."""

import mmap

import pytest
import torch

from ullage.base.errors import DoesNotFitError
from ullage.engine.streams import SideStream, host_buffer

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class FakeRuntime:
    """The three calls of CUDA's runtime that registering needs."""

    def __init__(self, code=0):
        self.code = code
        self.registered = {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        assert flags == 0
        self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.registered[address]

    def cudaError(self, code):  # noqa: N802
        return code

    def cudaGetErrorString(self, code):  # noqa: N802
        return f"error {code}"


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_whole_pages_are_registered_until_the_last_view_is_gone(runtime):
    buffer = host_buffer(1500, torch.float32, CUDA)
    other = host_buffer(1, torch.bfloat16, CUDA)
    assert buffer.tolist() == [0.0] * 1500
    assert runtime.registered == {buffer.data_ptr(): 2 * mmap.PAGESIZE, other.data_ptr(): mmap.PAGESIZE}
    assert buffer.data_ptr() % mmap.PAGESIZE == other.data_ptr() % mmap.PAGESIZE == 0
    view = buffer[1400:].view(10, 10)
    del buffer
    assert len(runtime.registered) == 2
    view.fill_(1.0)
    del view
    assert list(runtime.registered) == [other.data_ptr()]


def test_what_cannot_be_pinned_says_how_much_and_what_to_do(runtime):
    runtime.code = 2
    with pytest.raises(DoesNotFitError) as caught:
        host_buffer(3 << 18, torch.float32, CUDA)
    assert caught.value.cause == "could not pin 0.00 GiB of host memory: error 2"
    assert "`ulimit -l`" in caught.value.remedy


def test_what_cannot_be_allocated_says_how_much(runtime):
    with pytest.raises(DoesNotFitError, match=r"could not allocate 4194304\.00 GiB of host memory"):
        host_buffer(1 << 50, torch.float32, CPU)
    assert runtime.registered == {}


def test_nothing_is_registered_for_a_cpu_or_for_nothing(runtime):
    assert host_buffer(5, torch.int8, CPU).tolist() == [0] * 5
    assert host_buffer(0, torch.float32, CUDA).shape == (0,)
    assert runtime.registered == {}


def test_on_a_cpu_everything_has_happened():
    stream = SideStream(CPU)
    target = torch.zeros(3)
    with stream.use():
        target.copy_(torch.ones(3), non_blocking=True)
    stream.wait_for_main()
    mark = stream.mark()
    mark.wait()
    stream.hold_main(mark)
    stream.wait_for(mark)
    stream.keep_until_done(target)
    assert target.tolist() == [1.0] * 3
