"""Training with gradients that stay on the device: which way they go, in what order, to which bits.

Devices are the CPU, NCCL is a stand-in (fake_nccl.py), and kernels are the CUDA sources on an
emulated device.
"""

import logging
import threading

import pytest
import torch
from device_jobs import COMPRESSORS, CPU, DRIVER, emulated, gradients, on_device, run
from fake_nccl import FakeNccl
from reference_operations import ReferenceOperations
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import backward, make_model, train, wrap

import ddl
from ddl import kernels
from ddl.aggregation.device_aggregator import device_path
from ddl.comm import nccl as nccl_room
from ddl.comm import threads
from ddl.comm.current import use
from ddl.compressors import make_compressor
from ddl.errors import DeadlineError
from ddl.streams import HostStream

# Which way gradients go.


def test_the_log_says_once_why_gradients_do_not_stay_on_the_device(caplog, monkeypatch):
    monkeypatch.setattr(kernels, "device_operations", lambda device: emulated())
    tree, gtopk_kind = make_compressor("gtopk", "tree"), make_compressor("gtopk")

    def work(comm):
        return [
            device_path(comm, gtopk_kind, [CPU]) is not None,
            device_path(comm, tree, [CPU]) is not None,
            device_path(comm, gtopk_kind, [CPU, torch.device("meta")]) is not None,
            device_path(comm.split(0, comm.rank)._host, gtopk_kind, [CPU]) is not None,
        ]

    with caplog.at_level(logging.WARNING):
        assert run(2, work) == [[True, False, False, False]] * 2
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 3
    assert "compressor 'gtopk' with collective 'tree' and wire 'plain' has no form" in said[0]
    assert "parameters lie on meta, expected cpu, the device of rank 0" in said[1]
    assert "parameters lie on meta, expected cpu, the device of rank 1" in said[2]


def test_if_one_rank_lacks_the_kernels_all_go_through_the_host(monkeypatch):
    nccl = FakeNccl()

    def operations_of(device):
        return None if threading.current_thread().name == "rank-1" else ReferenceOperations()

    monkeypatch.setattr(kernels, "device_operations", operations_of)

    def train_toy(comm):
        with use(comm):
            return train(comm)

    models = run(2, train_toy, nccl)
    assert ddl.parameters_digest(models[0]) == ddl.parameters_digest(models[1])
    assert nccl.calls == []


# A training.


def make_cnn():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    generator = torch.Generator().manual_seed(0)  # ranks are threads, and share torch's own one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def train_cnn(comm, compressor, steps=10):
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = ddl.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        compressor=compressor,
        density=0.05,
        bucket_bytes=1200,
        dense_below=5,
        comm=comm,
    )
    generator = torch.Generator().manual_seed(comm.rank)
    for step in range(steps):
        inputs = torch.randn(6, 1, 8, 8, generator=generator)
        labels = inputs.mean((1, 2, 3)).mul(20).long().clamp(-1, 1) + 1
        if step == 6 and comm.rank == 1:
            inputs[0] = float("nan")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if step == 3:  # given up before it is applied
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    optimizer.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_training_on_an_emulated_device_gives_the_bits_of_the_cpu(monkeypatch, compressor):
    on_cpu = threads.run(2, lambda comm: train_cnn(comm, compressor))
    moved = (on_cpu[0] - nn.utils.parameters_to_vector(make_cnn().parameters())).abs()
    assert moved.max() > 0.01 and torch.isfinite(on_cpu[0]).all()

    launches = len(DRIVER.launches)
    monkeypatch.setattr(kernels, "_implementation", lambda device: emulated())
    by_host = threads.run(2, lambda comm: train_cnn(comm, compressor))
    assert compressor == "none" or len(DRIVER.launches) > launches
    monkeypatch.undo()

    nccl = FakeNccl()
    monkeypatch.setattr(kernels, "device_operations", lambda device: emulated())
    on_the_device = run(2, lambda comm: train_cnn(comm, compressor), nccl)
    assert {name for _, name in nccl.calls} >= {"allReduce", "destroy"}

    for parameters in (*on_cpu, *by_host, *on_the_device):
        assert torch.equal(parameters.view(torch.int32), on_cpu[0].view(torch.int32))


# Streams.


class RecordingStream(HostStream):
    """Counts what callers' streams are given, and what the worker's stream follows of it.

    Attributes:
        caller: the stream that callers are on.
        marks: (what was marked, by whom), in order.
        followed: for each launch, the number of the last mark of each caller's stream.
        waited: the threads that worked on this stream or waited for it.
    """

    def __init__(self, device):
        super().__init__(device)
        self.caller = 1
        self.marks, self.followed, self.waited = [], [], set()

    def current(self):
        self.waited.add(threading.current_thread().name)
        return super().current()

    def mark_caller(self, marks):
        self.marks.append(self.caller)
        marks[self.caller] = len(self.marks)
        return marks

    def follow(self, events):
        self.followed.append(sorted(events))

    def synchronize(self):
        self.waited.add(threading.current_thread().name)


@pytest.fixture
def stream(monkeypatch):
    """The stream of the worker of the next optimizer."""
    stream = RecordingStream(CPU)
    monkeypatch.setattr(nccl_room.streams, "make_stream", lambda device: stream)
    return stream


def single(work):
    threads.run(1, work)


def test_a_launch_follows_what_the_step_before_still_did_on_the_callers_stream(stream):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, comm=comm)
        for step in range(2):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            stream.caller = 2  # where the average is applied
            optimizer.step()
            stream.caller = 1
        applied = stream.marks.index(2) + 1
        assert len(stream.followed) == 2
        assert applied in stream.followed[1]
        optimizer.close()

    single(work)


def test_a_launch_follows_every_stream_that_wrote_gradients(stream):
    def work(comm):
        parts = [nn.Linear(4, 2) for _ in range(3)]
        model = nn.ModuleList(parts)
        optimizer = wrap(model, comm=comm)
        for caller, part in enumerate(parts, start=5):
            stream.caller = caller
            part(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        last = [len(stream.marks) - stream.marks[::-1].index(caller) for caller in (5, 6)]
        assert set(last) <= set(stream.followed[0])
        optimizer.close()

    single(work)


def test_a_launch_follows_the_zeros_of_gradients_that_did_not_come(stream):
    def work(comm):
        model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        optimizer = wrap(model, comm=comm, unused_parameters="zero")
        model[1](torch.ones(1, 4)).sum().backward()
        before = len(stream.marks)
        optimizer.step()
        assert max(stream.followed[0]) > before
        optimizer.close()

    single(work)


def test_only_the_worker_waits_for_its_stream(stream):
    def work(comm):
        train(comm)

    single(work)
    assert stream.waited == {"ddl-reducer-0"}


def test_the_error_at_the_deadline_names_step_bucket_and_rank(monkeypatch):
    monkeypatch.setattr(kernels, "device_operations", lambda device: ReferenceOperations())

    def work(comm):
        model = make_model()
        optimizer = wrap(model, comm=comm)
        for step in range(2 - comm.rank):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()

    said = r"step 1, bucket 0 .*, rank 0 of 2: rank 0 of 2 waits for the gradients of the other"
    with pytest.raises(DeadlineError, match=said):
        run(2, work, FakeNccl(patience=0.05), timeout=0.5)


# What the host waits for.

SYNCHRONISING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


class NoSynchronisation(TorchDispatchMode):
    """Refuses what would make the host wait for the device."""

    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        name = function.__name__.split(".")[0]
        assert name not in SYNCHRONISING, name
        if name.startswith("index"):
            tensors = [t for t in arguments[1] if isinstance(t, torch.Tensor)]
            assert all(tensor.dtype != torch.bool for tensor in tensors), "a mask as an index"
        return function(*arguments, **(more or {}))


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("P", [2, 3])
def test_nothing_waits_for_the_device_between_the_first_kernel_and_the_end(
    monkeypatch, compressor, P
):
    waited = []

    def work(comm):
        comm.connect()
        aggregator = on_device(comm, 900, make_compressor(compressor), operations=emulated())
        refusing = NoSynchronisation()

        def wait(event, what):
            refusing.__exit__(None, None, None)
            waited.append(comm.rank)

        monkeypatch.setattr(comm, "wait", wait)
        for step in range(2):
            flat = gradients(comm.rank, step, 900, P)
            refusing.__enter__()
            assert aggregator.begin(flat, 0.05).finite
            with NoSynchronisation():
                aggregator.apply(flat)

    run(P, work)
    assert sorted(waited) == sorted([*range(P)] * 2)
