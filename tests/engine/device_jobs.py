"""Jobs whose devices are the CPU: ranks are threads, NCCL and the kernels have stand-ins."""

import math
from functools import cache

import torch
from emulator.emulated import EmulatedDriver
from fake_nccl import FakeNccl
from reference_operations import ReferenceOperations, padded

from ddl.aggregation.device_aggregator import DevicePath
from ddl.collectives import Collected
from ddl.comm import threads
from ddl.comm.nccl import NcclCommunicator
from ddl.kernels import CudaOperations
from ddl.kernels.launch import NONFINITE, PADDING, REPORT_SIZE, Picks, Workspace
from ddl.sparse import SparseVector

CPU = torch.device("cpu")
COMPRESSORS = ["none", "topk", "gtopk", "gaussiank", "gaussiank-gtopk", "randomk"]

# All checks but those for races, which tests/kernels make.
DRIVER = EmulatedDriver(weak_memory=False, races=False)


@cache
def emulated():
    """The CUDA kernels on an emulated device."""
    return CudaOperations(DRIVER)


def make_operations(name):
    """The kernels "by reference" or "by emulator"."""
    return ReferenceOperations() if name == "reference" else emulated()


def run(P, work, nccl=None, timeout=60.0):
    """Call work(comm) on P ranks with NCCL between them."""
    nccl = FakeNccl() if nccl is None else nccl

    def on_rank(host):
        return work(NcclCommunicator(host, CPU, nccl, nccl.make_stream))

    return threads.run(P, on_rank, timeout=timeout)


def on_device(comm, numel, compressor, seed=0, operations=None):
    """The aggregator of a bucket that stays on the device."""
    path = DevicePath(comm, compressor, operations or ReferenceOperations())
    return path.aggregator(numel, seed, whole=False)


def padded_picks(packet, capacity):
    indices, values = padded(packet.vector.indices, packet.vector.values, capacity)
    report = torch.zeros(REPORT_SIZE, dtype=torch.int32)
    report[NONFINITE] = 0 if packet.finite else 3
    return Picks(indices, values, report)


def as_collective(collect):
    """A collective on the device, called like those through the host."""

    def collective(comm, packet, k, wire=None):
        numel = packet.vector.numel
        picks = padded_picks(packet, capacity=min(numel, 2 * k + 1))
        collected = collect(comm, ReferenceOperations(), picks, k, Workspace(CPU))
        real = collected.total.indices != PADDING
        total = SparseVector(collected.total.indices[real], collected.total.values[real], numel)
        included = torch.ones(packet.vector.count, dtype=torch.bool)
        if collected.included is not None:
            included = collected.included[: packet.vector.count]
        return Collected(total, included, bool(collected.finite))

    return collective


def gradients(rank, step, numel, P):
    """Of layers of different scales; now and then one is not finite, or nothing at all."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    flat = torch.randn(numel, generator=generator)
    flat *= torch.logspace(-2, 1, 5).repeat_interleave(math.ceil(numel / 5))[:numel]
    if step == 2 and rank == P - 1:
        flat[numel // 3] = float("nan")
    if step == 4 and rank == 0:
        flat.zero_()
    return flat
