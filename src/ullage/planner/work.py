"""What the phases of a step have to do, and how long a GPU takes for it: FLOPs over tensor cores, bytes over memory and
over PCIe.

The constants are from benchmarks/results/*_h200_*.json, each with the file that it is fitted to; other GPUs are taken
to reach the same shares of what they are sold as.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.planner.hardware import GPU

MATMUL_SHARE = 0.77
"""Of the specified TFLOP/s, in matrix products of wide layers (head, speed)."""
DECODE_LAYER = 28e-6
"""Seconds of a layer in one step of a captured graph beside its bytes and products: eight kernels, one after another
(batch)."""
DECODE_MATMUL_SHARE = 0.56
"""Of the specified TFLOP/s, in products of as few rows as there are slots (batch, groups)."""
LAUNCH = 1.33e-3
"""Seconds below which no pass gets through a layer, however few its tokens (fit, without graphs)."""
DECODE_SHARE = 0.8
"""Of the specified bandwidth, while decoding (batch, groups)."""
PCIE_ONE_WAY, PCIE_BOTH, PCIE_BESIDE = 0.86, 0.74, 0.78
"""Of one direction's specified rate: alone (activations: sync), with the other direction busy too (speed, levers,
state_again: streamed), and beside computation (activations: async)."""
OFFLOAD_COST = 0.003
"""Of the computation, for offload that is hidden behind it (activations: async 20 %)."""
HOST_BANDWIDTH = 46e9
"""Bytes a second that the host's cores read and write, 16 of them (state: host, 28 bytes for each parameter)."""
GRADIENT_SUMS, GRADIENT_STEP = 5.4, 14.2
"""Bytes that they read and write for each byte of gradients that they add up, and for each in the optimizer's step
(levers: gradients on host, between two runs)."""
STEP_BASE = 0.07
"""Seconds in which the host starts the optimizer's step, tensor after tensor, 0.03 to 0.1 with the host: on the device,
where nothing measured is bound by bytes (levers, state_again), and beside its copies where state is streamed (speed,
levers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """All passes of one phase of a step, on one rank."""

    flops: float
    traffic: float
    """Bytes through device memory."""
    launches: float
    """Layers started by the host, forward or backward."""
    forward: float = 1.0
    """Share of the work that lies before the backward pass."""
    leaving: float = 0.0
    """Bytes of activations that go to the host and come back."""
    beside: bool = True
    """They do so beside the computation."""
    gradients: float = 0.0
    """Bytes of gradients that go to the host and are added there beside the backward pass."""
    gathered: float = 0.0
    """Bytes of weights and gradients that a rank sends to others beside the computation, where they are shared out."""
    exchanged: float = 0.0
    """Bytes that it sends and waits for: gradients of whole replicas, sums over the parts of a matrix."""

    def seconds(self, gpu: GPU) -> float:
        rate = MATMUL_SHARE * gpu.tflops_bf16 * 1e12
        compute = max(self.flops / rate + self.traffic / (gpu.bandwidth * 1e9), self.launches * LAUNCH)
        before, link = self.forward * compute, _link(gpu)
        waits = self._waits(before, compute - before, gpu) + max(0.0, self.gathered / link - compute)
        return compute + waits + self.exchanged / link

    def _waits(self, forward: float, backward: float, gpu: GPU) -> float:
        """What copies take longer than the computation beside them."""
        beside = PCIE_BESIDE * gpu.pcie_gbs * 1e9
        added = max(self.gradients / beside, GRADIENT_SUMS * self.gradients / HOST_BANDWIDTH)
        waits = max(0.0, added - backward)
        if self.leaving and self.beside:
            each = self.leaving / beside
            waits += max(0.0, each - forward) + max(0.0, each - backward) + OFFLOAD_COST * (forward + backward)
        elif self.leaving:
            waits += 2 * self.leaving / (PCIE_ONE_WAY * gpu.pcie_gbs * 1e9)
        return waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The rollout of one rank: prompts in passes, then a token of every slot at a time."""

    prefill: Passes
    steps: int
    layers: float
    """Of one step, weighted by how long their kinds take."""
    weight_bytes: float
    read_bytes: float
    """The cache's, and what the sampler writes and reads."""
    flops: float
    """Of one step."""
    widened: float = 0.0
    """Bytes of quantised weights that are read, and of those written that products read in their place."""
    gathered: float = 0.0
    exchanged: float = 0.0
    """Of one step, as in `Passes`."""

    def seconds(self, gpu: GPU) -> float:
        bandwidth, rate = DECODE_SHARE * gpu.bandwidth * 1e9, DECODE_MATMUL_SHARE * gpu.tflops_bf16 * 1e12
        products = max(self.weight_bytes / bandwidth, self.flops / rate)
        computed = self.layers * DECODE_LAYER + (self.read_bytes + self.widened) / bandwidth + products
        step = max(computed, self.gathered / _link(gpu))
        return self.prefill.seconds(gpu) + self.steps * (step + self.exchanged / _link(gpu))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The optimizer's steps of all roles; or nothing but copies, of roles that come and go."""

    count: float
    traffic: float = 0.0
    """Bytes through device memory in one step."""
    into: float = 0.0
    out: float = 0.0
    """Bytes from and to the host."""
    by_host: float = 0.0
    """Bytes that the host's cores read and write."""
    base: float = STEP_BASE

    def seconds(self, gpu: GPU) -> float:
        pcie = gpu.pcie_gbs * 1e9 * (PCIE_BOTH if self.into and self.out else PCIE_ONE_WAY)
        copies = max(self.into, self.out) / pcie
        on_device = max(self.traffic / (gpu.bandwidth * 1e9), self.base + copies)
        return self.count * (on_device + self.by_host / HOST_BANDWIDTH)


Work = Passes | Decoding | Steps


def _link(gpu: GPU) -> float:
    """Bytes a second from one GPU to another, in one direction."""
    return max(gpu.interconnect_gbs / 2, gpu.pcie_gbs) * 1e9
