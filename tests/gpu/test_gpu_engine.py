"""The engine on a GPU: streams, events and pinned memory are real, ranks are threads.

Several ranks on one GPU are what NCCL refuses, so its stand-in copies between them. What NCCL does
with a single rank is tried at the end. Gradients are given, so that every bit can be compared with
the CPU's: the tests are about who waits for whom, and kernels have tests of their own.
"""

import sys
from pathlib import Path

import pytest
import torch
from places import Place
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from device_jobs import COMPRESSORS
from fake_nccl import TYPES, FakeNccl

import ddl
from ddl import kernels, streams
from ddl.aggregation.aggregator import aggregate
from ddl.aggregation.device_aggregator import DevicePath
from ddl.comm import SingleCommunicator, threads
from ddl.comm.nccl import NcclCommunicator, load_nccl
from ddl.compressors import make_compressor
from ddl.errors import CommunicationError

STEPS, RANKS = 6, 3
SHAPES = [(40, 30), (30,), (700,), (5, 4, 3)]
LONG = 500_000_000  # clock cycles that a GPU sleeps: about a quarter of a second


class Copied:
    """Memory of a GPU that somebody else owns."""

    def __init__(self, pointer, size):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


class OneGpuNccl(FakeNccl):
    """NCCL between ranks that share a GPU: whole kernels wait where NCCL's own would."""

    def memory(self, pointer, count, kind):
        dtype = TYPES[kind]
        size = count * torch.empty(0, dtype=dtype).element_size()
        if size == 0:
            return torch.empty(0, dtype=dtype, device="cuda")
        return torch.as_tensor(Copied(pointer, size), device="cuda").view(dtype)

    def settle(self):
        torch.cuda.synchronize()

    def make_stream(self, device):
        return streams.make_stream(device)


def run(place, work):
    """Call work(comm) on a few ranks whose device is the place's."""
    nccl = OneGpuNccl() if place.device.type == "cuda" else FakeNccl()

    def on_rank(host):
        return work(NcclCommunicator(host, place.device, nccl, nccl.make_stream))

    return threads.run(RANKS, on_rank)


class Given(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, gradients):
        parts = zip(self.parts, gradients, strict=True)
        return sum((part * gradient).sum() for part, gradient in parts)


def gradients(rank, step, device):
    """Of layers of different scales; in one step those of one rank are not finite."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    drawn = [torch.randn(shape, generator=generator) * len(shape) for shape in SHAPES]
    if step == 3 and rank == 1:
        drawn[2][5] = float("nan")
    return [gradient.to(device) for gradient in drawn]


def train(comm, device, compressor, before=lambda: None):
    """What training leaves: parameters that moved by the average gradients themselves."""
    model = Given().to(device)
    optimizer = ddl.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        compressor=compressor,
        density=0.03,
        bucket_bytes=4000,
        comm=comm,
    )
    for step in range(STEPS):
        given = gradients(comm.rank, step, device)
        optimizer.zero_grad()
        before()
        model(given).backward()
        optimizer.step()
    metrics = optimizer.metrics
    optimizer.close()
    assert optimizer.skipped_steps == 1
    assert metrics.select_seconds >= 0 and metrics.communicate_seconds >= 0
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def assert_same_bits(found, expected):
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize("compressor", COMPRESSORS[1:])
def test_training_on_the_device_gives_the_bits_of_the_cpu(monkeypatch, place: Place, compressor):
    on_cpu = threads.run(RANKS, lambda comm: train(comm, torch.device("cpu"), compressor))
    monkeypatch.setattr(kernels, "device_operations", lambda device: place.operations)
    assert_same_bits(run(place, lambda comm: train(comm, place.device, compressor)), on_cpu)


def test_dense_training_on_the_device_agrees_across_ranks(monkeypatch, place: Place):
    monkeypatch.setattr(kernels, "device_operations", lambda device: place.operations)
    found = run(place, lambda comm: train(comm, place.device, "none"))
    assert_same_bits(found, [found[0]] * RANKS)


@pytest.mark.gpu
@pytest.mark.parametrize("compressor", ["gtopk", "randomk"])
def test_the_way_by_the_host_gives_the_bits_of_the_cpu(gpu: Place, compressor):
    on_cpu = threads.run(RANKS, lambda comm: train(comm, torch.device("cpu"), compressor))
    by_host = threads.run(RANKS, lambda comm: train(comm, gpu.device, compressor))
    assert_same_bits(by_host, on_cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [True, False])
def test_gradients_of_a_late_stream_of_the_users_are_waited_for(gpu: Place, joined):
    """The backward pass runs on a stream of its own, far behind the host."""

    def late(comm):
        side = torch.cuda.Stream(gpu.device)
        with torch.cuda.stream(side):
            return train(comm, gpu.device, "gtopk", lambda: torch.cuda._sleep(LONG // 10))

    on_cpu = threads.run(RANKS, lambda comm: train(comm, torch.device("cpu"), "gtopk"))
    assert_same_bits(run(gpu, late) if joined else threads.run(RANKS, late), on_cpu)


@pytest.mark.gpu
def test_hooks_wait_neither_for_the_device_nor_for_the_network(gpu: Place):
    model = Given().to(gpu.device)
    comm = NcclCommunicator(SingleCommunicator(), gpu.device, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = ddl.DistributedOptimizer(optimizer, model.named_parameters(), comm=comm)
    for step in range(3):
        given = gradients(0, step, gpu.device)
        optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        asleep = torch.cuda.Event()
        asleep.record()
        model(given).backward()
        assert step == 0 or not asleep.query()  # the first one may load and compile
        optimizer.step()
    optimizer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_begin_makes_torch_wait_for_nothing_but_its_end(monkeypatch, gpu: Place, compressor):
    comm = NcclCommunicator(SingleCommunicator(), gpu.device, None)
    path = DevicePath(comm, make_compressor(compressor), gpu.operations)
    aggregator = path.aggregator(200_000, 0, whole=False)
    flat = torch.randn(200_000, device=gpu.device)
    aggregate(aggregator, flat, 0.01)  # loads kernels, takes memory
    waiting = comm.wait

    def wait(event, what):
        torch.cuda.set_sync_debug_mode("default")
        waiting(event, what)

    monkeypatch.setattr(comm, "wait", wait)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = aggregator.begin(flat, 0.01)
        torch.cuda.set_sync_debug_mode("error")
        aggregator.apply(flat)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outcome.finite and 0 < outcome.ended - outcome.started + outcome.select_seconds < 10


@pytest.mark.gpu
def test_nccl_itself_follows_our_stream_and_is_waited_for(gpu: Place):
    """One rank sends to itself, which NCCL allows within a group."""
    nccl = load_nccl()
    comm = NcclCommunicator(SingleCommunicator(), gpu.device, nccl)
    comm._handle = comm._bounded(lambda: nccl.NcclCommunicator(1, nccl.get_unique_id(), 0))
    with comm.stream.current():
        torch.cuda._sleep(LONG // 10)
        sent = torch.arange(1000, dtype=torch.int32, device=gpu.device)
        received = torch.empty_like(sent)
        comm.exchange(sent, 0, received, 0)
        half = torch.ones(8, dtype=torch.bfloat16, device=gpu.device)
        with comm._group("a sum") as handle:
            handle.allReduce(*comm._described(half)[:1] * 2, 8, 9, 0, comm.stream.handle)
        end = comm.stream.mark()
    assert not end.query()
    comm.wait(end, "a test")
    assert torch.equal(received, sent) and half.sum() == 8
    comm.close()


@pytest.mark.gpu
def test_nccl_can_be_ended_and_then_refuses(gpu: Place):
    nccl = load_nccl()
    comm = NcclCommunicator(SingleCommunicator(), gpu.device, nccl)
    comm._handle = comm._bounded(lambda: nccl.NcclCommunicator(1, nccl.get_unique_id(), 0))
    comm.cancel()
    assert comm._handle is None
    with pytest.raises(CommunicationError, match="cancelled"):
        with comm.stream.current():
            torch.cuda._sleep(LONG)
            end = comm.stream.mark()
        comm.wait(end, "a test")


@pytest.mark.gpu
def test_tensors_come_to_the_host_and_back_through_pinned_memory(gpu: Place):
    tensor = torch.randn(30, 20, device=gpu.device).t()
    host = streams.to_host(tensor)
    assert host.is_pinned() and torch.equal(host, tensor.cpu())
    assert torch.equal(streams.to_device(host, gpu.device), tensor)
