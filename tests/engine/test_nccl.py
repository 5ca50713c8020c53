"""NCCL between devices, over a stand-in for it: transfers, deadlines, and who gets it at all."""

import logging
import sys
import threading
import time
import types

import pytest
import torch
from fake_nccl import FakeNccl

from ddl import gpus
from ddl.collectives import dense, messages
from ddl.comm import nccl as nccl_room
from ddl.comm import threads
from ddl.comm.current import current
from ddl.comm.nccl import NcclCommunicator, load_nccl
from ddl.comm.threads import ThreadCommunicator
from ddl.errors import CommunicationError, DeadlineError
from ddl.gpus import join_gpus, own_device
from ddl.settings import Settings

CPU = torch.device("cpu")
SIZES = [1, 2, 3, 5, 8]


def run(P, work, nccl=None, timeout=60.0):
    """Call work(comm) on P ranks with NCCL between them."""
    nccl = FakeNccl() if nccl is None else nccl

    def on_rank(host):
        return work(NcclCommunicator(host, CPU, nccl, nccl.make_stream))

    return threads.run(P, on_rank, timeout=timeout)


def finish(comm):
    comm.wait(comm.stream.mark(), "a test")


@pytest.mark.parametrize("P", SIZES[1:])
def test_an_exchange_goes_around_a_ring_without_deadlock(P):
    def work(comm):
        sent = torch.full((3,), comm.rank, dtype=torch.int32)
        received = torch.empty_like(sent)
        comm.connect()
        before = comm.bytes_sent
        comm.exchange(sent, (comm.rank + 1) % P, received, (comm.rank - 1) % P)
        finish(comm)
        return received.tolist(), comm.bytes_sent - before

    assert run(P, work) == [([(rank - 1) % P] * 3, 12) for rank in range(P)]


def test_an_exchange_may_go_one_way():
    def work(comm):
        tensor = torch.full((2,), float(comm.rank))
        if comm.rank:
            comm.exchange(tensor, 0, None, 0)
        else:
            comm.exchange(None, 1, tensor, 1)
        finish(comm)
        return tensor.tolist()

    assert run(2, work) == [[1.0, 1.0], [1.0, 1.0]]


def test_a_single_rank_has_nobody_to_exchange_with():
    with pytest.raises(CommunicationError, match="the rank has no peers"):
        run(1, lambda comm: comm.exchange(torch.zeros(1), 0, None, 0))


def test_the_stand_in_notices_what_would_hang_nccl():
    def work(comm):
        comm.connect()
        tensor = torch.zeros(1)
        comm._handle.send(tensor.data_ptr(), 1, 7, 1 - comm.rank, comm.stream.handle)

    with pytest.raises(RuntimeError, match=r"deadlock: rank 0 in send; rank 1 in send"):
        run(2, work)


def test_lengths_that_differ_are_an_error():
    def work(comm):
        tensor = torch.zeros(2 + comm.rank)
        comm.exchange(tensor, 1 - comm.rank, torch.zeros(2 + comm.rank), 1 - comm.rank)

    with pytest.raises(CommunicationError, match=r"NCCL, an exchange: rank . sends . of type 7"):
        run(2, work)


@pytest.mark.parametrize("P", SIZES)
def test_all_gather_brings_all_parts_in_rank_order(P):
    def work(comm):
        whole = torch.empty(2 * P, dtype=torch.int32)
        comm.connect()
        before = comm.bytes_sent
        comm.all_gather(torch.tensor([comm.rank, -1], dtype=torch.int32), whole)
        finish(comm)
        return whole.tolist(), comm.bytes_sent - before

    expected = [number for rank in range(P) for number in (rank, -1)]
    assert run(P, work) == [(expected, (P - 1) * 8)] * P


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("P", SIZES)
def test_all_reduce_sums_several_tensors_at_once(P, dtype):
    def work(comm):
        first = torch.arange(40).add(comm.rank).to(dtype)
        second = torch.full((P,), comm.rank, dtype=torch.int32)
        comm.connect()
        before = comm.bytes_sent
        comm.all_reduce_(first, second)
        finish(comm)
        size = 40 * first.element_size() + 4 * P
        return first, second.tolist(), comm.bytes_sent - before == 2 * (P - 1) * size // P

    total = P * (P - 1) // 2
    for first, second, counted in run(P, work):
        assert torch.equal(first, (torch.arange(40) * P + total).to(dtype))
        assert second == [total] * P
        assert counted


def test_messages_and_the_collectives_made_of_them_work_as_without_nccl():
    nccl = FakeNccl()

    def work(comm):
        tensor = torch.full((3000,), float(comm.rank))
        dense.all_reduce_(comm, tensor)
        heard = messages.gather_objects(comm, comm.rank)
        return tensor.unique().tolist(), heard, comm.bytes_sent > 0

    assert run(3, work, nccl) == [([3.0], [0, 1, 2], True)] * 3
    assert nccl.calls == []  # and nothing has been joined for it


def test_messages_under_different_labels_are_refused():
    def work(comm):
        comm.label = comm.rank
        messages.barrier(comm)

    with pytest.raises(CommunicationError, match="out of step"):
        run(2, work)


def test_groups_of_a_split_and_duplicates_transfer_among_themselves():
    def work(comm):
        group = comm.split(comm.rank % 2, -comm.rank)
        again = group.duplicate()
        for member in (group, again):
            tensor = torch.full((1,), float(comm.rank))
            member.all_reduce_(tensor)
            member.wait(member.stream.mark(), "a test")
        again.close()
        group.close()
        return tensor.item(), group.stream is not again.stream

    evens, odds = (6.0, True), (4.0, True)
    assert run(5, work) == [evens, odds, evens, odds, evens]


def test_a_rank_that_does_not_come_ends_the_wait_of_the_other_at_its_deadline():
    nccl = FakeNccl(patience=0.05)

    def work(comm):
        comm.connect()
        if comm.rank:
            return "", ""
        tensor = torch.zeros(4)
        comm.exchange(tensor, 1, torch.zeros(4), 1)
        comm.exchange(tensor, 1, torch.zeros(4), 1)  # what comes behind does not block either
        begin = time.monotonic()
        with pytest.raises(DeadlineError) as waiting:
            comm.wait(comm.stream.mark(), "the gradients of the other ranks")
        assert time.monotonic() - begin < 10
        with pytest.raises(CommunicationError) as later:
            comm.exchange(tensor, 1, torch.zeros(4), 1)
        return str(waiting.value), str(later.value)

    waiting, later = run(2, work, nccl, timeout=0.3)[0]
    assert "rank 0 of 2 waits for the gradients of the other ranks: nothing within 0.3 s" in waiting
    assert "rank 0 of 2: no transfer is possible, because NCCL was ended" in later
    assert (0, "abort") in nccl.calls  # else its kernels would hold the device


def test_a_rank_that_does_not_join_ends_in_a_deadline():
    def work(comm):
        if comm.rank == 0:
            comm.connect()

    with pytest.raises(DeadlineError, match="rank 0 of 2 joins NCCL: not every rank within"):
        run(2, work, FakeNccl(patience=2.0), timeout=0.2)


def test_an_error_that_nccl_finds_by_itself_ends_a_wait():
    nccl = FakeNccl(patience=0.05)

    def work(comm):
        comm.connect()
        if comm.rank == 0:
            comm.exchange(None, 1, torch.zeros(4), 1)
            nccl.asynchronous_error = "remote process exited"
            comm.wait(comm.stream.mark(), "a test")

    with pytest.raises(CommunicationError, match="rank 0 of 2, NCCL, a test: remote process"):
        run(2, work, nccl)
    assert (0, "abort") in nccl.calls


def test_another_thread_can_cancel_a_wait():
    def work(comm):
        comm.connect()
        if comm.rank == 0:
            comm.exchange(None, 1, torch.zeros(4), 1)
            threading.Timer(0.1, comm.cancel).start()
            comm.wait(comm.stream.mark(), "a test")

    with pytest.raises(CommunicationError, match="waits for a test: cancelled"):
        run(2, work, FakeNccl(patience=0.05))


def test_if_nccl_does_not_start_on_rank_0_all_are_told():
    class Broken(FakeNccl):
        def get_unique_id(self):
            raise self.NcclError("no network interface")

    def work(comm):
        with pytest.raises(CommunicationError) as error:
            comm.connect()
        return str(error.value)

    for said in run(3, work, Broken()):
        assert said == "NCCL does not start on rank 0: no network interface"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4)[::2], r"contiguous tensors on cpu, got one on cpu with strides \(2,\)"),
        (torch.zeros(2, device="meta"), "on cpu, got one on meta"),
        (torch.zeros(2, dtype=torch.int64), "got torch.int64; view it as int32"),
    ],
)
def test_tensors_that_cannot_travel_are_refused(tensor, message):
    with pytest.raises(ValueError, match=message):
        run(2, lambda comm: comm.all_reduce_(tensor))


def test_an_all_gather_into_too_little_room_is_refused():
    with pytest.raises(ValueError, match="whole must have 2 times the 3 elements of part, got 5"):
        run(2, lambda comm: comm.all_gather(torch.zeros(3), torch.zeros(5)))


# Who gets it.


@pytest.fixture
def own_gpus(monkeypatch):
    """Every rank's thread has a GPU of its own."""
    monkeypatch.setattr(gpus, "_place", lambda device: ("here", str(current().rank)))


def join(nccl, host, device=CPU, wanted=True, load=None):
    load = (lambda: nccl) if load is None else load
    return join_gpus(host, wanted, device=device, load=load, make_stream=nccl.make_stream)


def refuse():
    raise CommunicationError("CuPy finds no NCCL library")


def test_a_rank_takes_the_gpu_the_program_has_chosen_or_else_the_one_of_its_number(monkeypatch):
    assert torch.cuda.is_available() or own_device(0) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert [own_device(rank).index for rank in range(5)] == [0, 1, 2, 3, 0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert own_device(1).index == 2


@pytest.mark.parametrize("by", ["uuid", "bus"])
def test_a_gpu_is_told_from_others_whatever_its_number_in_the_process(monkeypatch, by):
    known = {"pci_domain_id": 0, "pci_bus_id": 23, "pci_device_id": 1}
    if by == "uuid":
        known["uuid"] = "GPU-1f2e"
    properties = types.SimpleNamespace(**known)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    first, second = (gpus._place(torch.device("cuda", index)) for index in (0, 1))
    assert first == second
    assert first[1] == ("GPU-1f2e" if by == "uuid" else "[0, 23, 1]")


@pytest.mark.usefixtures("own_gpus")
def test_ranks_with_a_gpu_each_are_joined():
    nccl = FakeNccl()

    def work(host):
        comm = join(nccl, host)
        assert comm.bytes_sent == host.bytes_sent == 0
        tensor = torch.ones(1)
        comm.all_reduce_(tensor)
        finish(comm)
        return type(comm), tensor.item()

    assert threads.run(3, work) == [(NcclCommunicator, 3.0)] * 3
    assert [name for _, name in nccl.calls].count("destroy") == 3  # of the trial


def test_a_single_rank_has_nobody_to_be_joined_with():
    nccl = FakeNccl()
    assert threads.run(1, lambda host: type(join(nccl, host))) == [ThreadCommunicator]


def test_ranks_that_share_a_gpu_go_through_the_host_and_the_log_says_so_once(caplog):
    nccl = FakeNccl()
    with caplog.at_level(logging.WARNING):
        kinds = threads.run(3, lambda host: type(join(nccl, host)))
    assert kinds == [ThreadCommunicator] * 3
    (record,) = caplog.records
    assert "ranks 0 and 1 share a GPU, expected one for each" in record.getMessage()
    assert "staged through host memory" in record.getMessage()
    assert nccl.calls == []


@pytest.mark.usefixtures("own_gpus")
@pytest.mark.parametrize(
    ("on_rank_1", "said"),
    [
        ({"load": refuse}, "rank 1: CuPy finds no NCCL library"),
        ({"device": None}, "rank 1: no GPU"),
        ({"wanted": False}, "rank 1: DDL_NCCL=0"),
    ],
)
def test_if_one_rank_cannot_or_will_not_none_does(caplog, on_rank_1, said):
    nccl = FakeNccl()

    def work(host):
        return type(join(nccl, host, **(on_rank_1 if host.rank == 1 else {})))

    with caplog.at_level(logging.WARNING):
        assert threads.run(3, work) == [ThreadCommunicator] * 3
    assert [said in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.usefixtures("own_gpus")
def test_if_the_first_sum_fails_on_one_rank_none_uses_nccl(caplog):
    class Broken(FakeNccl):
        def NcclCommunicator(self, ndev, commId, rank):
            if rank == 1:
                raise self.NcclError("unhandled cuda error")
            return super().NcclCommunicator(ndev, commId, rank)

    nccl = Broken(patience=0.1)
    with caplog.at_level(logging.WARNING):
        kinds = threads.run(2, lambda host: type(join(nccl, host)))
    assert kinds == [ThreadCommunicator] * 2
    assert len(caplog.records) == 1 and "no NCCL between GPUs" in caplog.text


def test_without_gpus_nothing_is_said_and_nothing_loaded(caplog):
    nccl = FakeNccl()
    with caplog.at_level(logging.INFO):
        kinds = threads.run(2, lambda host: type(join(nccl, host, device=None, load=refuse)))
    assert kinds == [ThreadCommunicator] * 2
    assert caplog.records == []


def test_the_switch_in_the_environment():
    assert Settings.from_environment({}).nccl
    assert not Settings.from_environment({"DDL_NCCL": "0"}).nccl
    with pytest.raises(ValueError, match="DDL_NCCL must be 0 or 1, got 'off'; unset it for 1"):
        Settings.from_environment({"DDL_NCCL": "off"})


def test_without_cupy_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(CommunicationError, match=r"CuPy was not found .* pip install 'ddl\[cuda13"):
        load_nccl()


def test_what_is_used_of_cupy_exists():
    pytest.importorskip("cupy")
    nccl = load_nccl()
    for name in ("send", "recv", "allGather", "allReduce", "abort", "destroy", "check_async_error"):
        assert callable(getattr(nccl.NcclCommunicator, name))
    for name in ("get_unique_id", "groupStart", "groupEnd", "NcclError"):
        assert callable(getattr(nccl, name))
    numbers = {
        torch.uint8: nccl.NCCL_UINT8,
        torch.int32: nccl.NCCL_INT32,
        torch.float16: nccl.NCCL_FLOAT16,
        torch.float32: nccl.NCCL_FLOAT32,
        torch.bfloat16: nccl.NCCL_BFLOAT16,
    }
    assert numbers == nccl_room._TYPES
    assert nccl.NCCL_SUM == FakeNccl.NCCL_SUM
