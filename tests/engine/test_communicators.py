"""Messages, deadlines and byte counts."""

import math
import signal
import threading
import time

import pytest
import torch

from ddl.collectives import dense, gtopk, messages
from ddl.comm import SingleCommunicator, frames, threads
from ddl.errors import CommunicationError, DeadlineError
from ddl.sparse import Packet, SparseVector
from ddl.wires import PLAIN

SIZES = [1, 2, 3, 4, 5, 8, 16]


def message(*numbers):
    return torch.tensor(numbers, dtype=torch.uint8)


@pytest.mark.parametrize("P", SIZES)
def test_all_gather_brings_messages_of_any_length_in_rank_order(P):
    def work(comm):
        return [m.tolist() for m in messages.all_gather(comm, message(*range(comm.rank)))]

    expected = [list(range(rank)) for rank in range(P)]
    assert threads.run(P, work) == [expected] * P


@pytest.mark.parametrize("P", SIZES)
def test_broadcast_reaches_every_rank_from_any_root(P):
    for root in {0, P // 2, P - 1}:
        sent = threads.run(
            P, lambda comm, root=root: messages.broadcast_object(comm, comm.rank, root)
        )
        assert sent == [root] * P


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("numel", [0, 1, 7, 5000])
@pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
def test_dense_all_reduce_sums_every_dtype_and_length(P, numel, dtype):
    def work(comm):
        tensor = torch.arange(numel).remainder(7).add(comm.rank).to(dtype)
        dense.all_reduce_(comm, tensor)
        return tensor

    expected = (torch.arange(numel).remainder(7) * P + P * (P - 1) // 2).to(dtype)
    for tensor in threads.run(P, work):
        assert torch.equal(tensor, expected)


def test_dense_all_reduce_keeps_the_shape_and_layout_of_the_tensor():
    def work(comm):
        tensor = torch.ones(3, 4, 5).transpose(0, 2)
        dense.all_reduce_(comm, tensor)
        return tensor

    for tensor in threads.run(2, work):
        assert torch.equal(tensor, torch.full((5, 4, 3), 2.0))


@pytest.mark.parametrize("P", [2, 4, 7])
def test_dense_all_reduce_sends_the_bytes_it_promises(P):
    def work(comm):
        dense.all_reduce_(comm, torch.ones(100_000))
        return comm.bytes_sent

    sent = threads.run(P, work)
    assert sum(sent) == 2 * (P - 1) * 400_000
    assert max(sent) - min(sent) <= 16


def sparse_packet(rank, k, numel):
    indices = torch.arange(k, dtype=torch.int32) * (numel // k) + rank
    return Packet(SparseVector(indices, torch.ones(k), numel), finite=True)


@pytest.mark.parametrize("P", [2, 4, 8, 16])
def test_butterfly_sends_log2_P_k_entries_of_8_bytes(P):
    k = 1000

    def work(comm):
        gtopk.butterfly(comm, sparse_packet(comm.rank, k, 100_000), k)
        return comm.bytes_sent

    rounds = int(math.log2(P))
    assert threads.run(P, work) == [rounds * (8 * k + PLAIN.header_bytes)] * P


@pytest.mark.parametrize("P", [2, 3, 8, 13])
def test_tree_sends_k_entries_up_and_k_entries_and_bits_down_every_edge(P):
    k = 1000

    def work(comm):
        gtopk.tree(comm, sparse_packet(comm.rank, k, 100_000), k)
        return comm.bytes_sent

    packet = 8 * k + PLAIN.header_bytes
    assert sum(threads.run(P, work)) == (P - 1) * (packet + 2 * 8 + packet + k // 8)


def test_a_frame_of_another_length_is_refused():
    frame = frames.join([message(1, 2), message(), message(3)])
    assert [part.tolist() for part in frames.split(frame, 3)] == [[1, 2], [], [3]]
    with pytest.raises(ValueError, match="a frame of 3 messages"):
        frames.split(frame[:-1], 3)


def test_a_missing_rank_ends_in_a_deadline_that_names_both():
    def work(comm):
        if comm.rank == 0:
            comm.recv(1)

    begin = time.monotonic()
    with pytest.raises(DeadlineError, match="rank 0 of 2 waits for a message of rank 1"):
        threads.run(2, work, timeout=0.2)
    assert time.monotonic() - begin < 10


def test_one_failing_rank_ends_the_others():
    def work(comm):
        if comm.rank == 2:
            raise KeyError("lost")
        messages.barrier(comm)

    with pytest.raises(KeyError, match="lost"):
        threads.run(4, work)


def test_an_aborted_job_says_why():
    def work(comm):
        if comm.rank == 0:
            comm.abort("out of patience")
        comm.recv((comm.rank + 1) % comm.size)

    with pytest.raises(CommunicationError, match="out of patience"):
        threads.run(3, work)


def test_groups_of_a_split_do_not_hear_each_other():
    def work(comm):
        group = comm.split(comm.rank % 2, -comm.rank)
        again = group.duplicate()
        heard = messages.gather_objects(group, comm.rank)
        return heard, messages.gather_objects(again, group.rank), group.bytes_sent > 0

    evens, odds = [4, 2, 0], [3, 1]
    for rank, (heard, ranks, counted) in enumerate(threads.run(5, work)):
        assert heard == (odds if rank % 2 else evens)
        assert ranks == list(range(len(heard)))
        assert counted


def test_a_single_rank_has_nobody_to_talk_to():
    with pytest.raises(ValueError, match="a single rank has no peers"):
        SingleCommunicator().recv(1)


def test_threads_need_at_least_one_rank():
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        threads.run(0, lambda comm: None)


@pytest.mark.mpi
def test_mpi_deadlines_aborts_and_counts(mpirun, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import ddl\n"
        "comm = ddl.init(timeout=1)\n"
        "assert comm.bytes_sent == 0\n"
        "if comm.rank == 0:\n"
        "    comm.recv(1)\n"
        "import time; time.sleep(60)\n"
    )
    begin = time.monotonic()
    done = mpirun(2, [str(script)], timeout=60)
    assert time.monotonic() - begin < 40
    assert done.returncode != 0
    assert "rank 0 of 2 waits for a message of rank 1: nothing within 1 s" in done.stderr


@pytest.mark.mpi
def test_mpi_messages_larger_than_any_eager_limit_arrive(mpirun, tmp_path):
    script = tmp_path / "large.py"
    script.write_text(
        "import torch, ddl\n"
        "comm = ddl.init(timeout=60)\n"
        "peer = 1 - comm.rank\n"
        "sent = torch.arange(20_000_000).remainder(251).to(torch.uint8) + comm.rank\n"
        "received = comm.sendrecv(sent, peer, peer)\n"
        "assert torch.equal(received - peer, sent - comm.rank)\n"
        "assert comm.bytes_sent == 20_000_000\n"
        "assert (comm.local_rank, comm.local_size) == (comm.rank, 2)\n"
        "empty = comm.sendrecv(sent[:0], peer, peer)\n"
        "assert empty.numel() == 0\n"
    )
    done = mpirun(2, [str(script)])
    assert done.returncode == 0, done.stderr


def interrupt_the_main_thread():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_an_interrupted_caller_has_the_ranks_end_first():
    ended = []

    def work(comm):
        try:
            messages.all_gather(comm, message(comm.rank))  # so that all have begun
            if comm.rank == 0:
                interrupt_the_main_thread()
            while True:
                messages.all_gather(comm, message(comm.rank))
                time.sleep(0.2)
        finally:
            ended.append(comm.rank)

    with pytest.raises(KeyboardInterrupt):
        threads.run(3, work)
    assert sorted(ended) == [0, 1, 2]


def test_an_interrupted_caller_does_not_wait_forever_for_a_rank_that_does(monkeypatch):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.1)
    over = threading.Event()

    def work(comm):
        interrupt_the_main_thread()
        assert over.wait(60)

    with pytest.raises(KeyboardInterrupt):
        threads.run(1, work)
    over.set()
