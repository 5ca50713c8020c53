"""Messages over torch.distributed's gloo, on threads of one process; jobs under torchrun."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from launch import ROOT, torchrun
from laws import LAWS

from ddl.collectives import messages
from ddl.comm import process_group
from ddl.comm.process_group import ProcessGroupCommunicator, local_places
from ddl.errors import CommunicationError, DDLError, DeadlineError
from ddl.world import _check_local_ranks, _detect


def run(P, work, *, timeout=30.0, environ=None, store=None):
    """Results of `work(comm)` in rank order; each rank is a thread with sockets of its own."""
    store = store or dist.HashStore()

    def rank_main(rank):
        comm = ProcessGroupCommunicator.join(store, rank, P, timeout, environ or {})
        try:
            return work(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(P) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(P)]
    return [future.result() for future in futures]


def numbers(count, first=0):
    return torch.arange(first, first + count).remainder(251).to(torch.uint8)


@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_messages_of_any_length_arrive_in_the_order_sent(P):
    lengths = [0, 1, process_group.INLINE_BYTES, process_group.INLINE_BYTES + 1, 3, 700_000]

    def work(comm):
        right, left = (comm.rank + 1) % P, (comm.rank - 1) % P
        for length in lengths if P > 1 else ():
            received = comm.sendrecv(numbers(length, comm.rank), right, left)
            assert torch.equal(received, numbers(length, left))
        if comm.rank == 0 and P > 1:  # no answers in between
            for length in lengths:
                comm.send(numbers(length), 1)
        if comm.rank == 1:
            for length in lengths:
                assert torch.equal(comm.recv(0), numbers(length))
        return messages.gather_objects(comm, comm.rank), comm.local_rank, comm.local_size

    for rank, result in enumerate(run(P, work)):
        assert result == (list(range(P)), rank, P)


def test_a_message_larger_than_any_buffer_of_the_network_arrives_both_ways():
    sent = numbers(70_000_000)

    def work(comm):
        peer = 1 - comm.rank
        received = comm.sendrecv(sent[comm.rank :], peer, peer)
        assert comm.bytes_sent == len(sent) - comm.rank
        return torch.equal(received, sent[peer:])

    assert run(2, work) == [True, True]


def test_two_threads_use_two_duplicates_at_once():
    def work(comm):
        peer = 1 - comm.rank
        wrong = []

        def talk(own, seed):
            for i in range(200):
                length = (seed + 37 * i) % 5000 + (300_000 if i % 50 == 0 else 0)
                received = own.sendrecv(numbers(length, seed + comm.rank), peer, peer)
                if not torch.equal(received, numbers(length, seed + peer)):
                    wrong.append((seed, i))

        own = [comm.duplicate() for _ in range(2)]
        threads = [threading.Thread(target=talk, args=(own[i], 100 * i)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert own[0].bytes_sent > 0 and comm.bytes_sent == 0
        return wrong

    assert run(2, work) == [[], []]


def test_groups_of_a_split_do_not_hear_each_other():
    def work(comm):
        group = comm.split(comm.rank % 2, -comm.rank)
        again = group.duplicate()
        heard = messages.gather_objects(group, comm.rank)
        places = messages.gather_objects(again, (again.rank, again.local_rank, again.local_size))
        return heard, places

    evens, odds = [4, 2, 0], [3, 1]
    for rank, (heard, places) in enumerate(run(5, work)):
        assert heard == (odds if rank % 2 else evens)
        assert places == [(i, i, len(heard)) for i in range(len(heard))]


def test_ranks_out_of_step_are_told_so_and_may_go_on():
    def work(comm):
        comm.label = 7 + comm.rank
        peer = 1 - comm.rank
        for length in (3, 600_000):
            with pytest.raises(CommunicationError, match="out of step") as caught:
                comm.sendrecv(numbers(length), peer, peer)
            assert f"rank {comm.rank} is at message group {7 + comm.rank}" in str(caught.value)
        comm.label = 0
        return messages.gather_objects(comm, "in step")

    assert run(2, work) == [["in step"] * 2] * 2


def test_a_stalled_rank_ends_in_a_deadline_that_names_both():
    done = threading.Event()

    def work(comm):
        if comm.rank == 1:
            done.wait(20)
            return None
        begin = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            comm.recv(1)
        done.set()
        assert time.monotonic() - begin < 5
        return str(caught.value)

    message = run(2, work, timeout=0.5)[0]
    assert message.startswith("rank 0 of 2 waits for a message of rank 1: nothing within 0.5 s")


def test_a_rank_that_does_not_split_ends_the_others_at_their_deadline():
    def work(comm):
        if comm.rank == 1:
            return time.sleep(2)
        with pytest.raises(DeadlineError, match="rank 0 of 2 waits"):
            comm.split(0, 0)

    run(2, work, timeout=0.5)


def test_ranks_that_never_come_end_the_start_at_its_deadline():
    with pytest.raises(DeadlineError, match="rank 0 of 2 waits to meet the other ranks: nothing"):
        ProcessGroupCommunicator.join(dist.HashStore(), 0, 2, 0.5, {})


def test_a_rank_that_is_gone_is_named_at_once_with_what_it_said():
    store = dist.HashStore()

    def work(comm):
        if comm.rank == 1:
            comm._job.announce("rank 1 of 2: ended by RuntimeError: disk full")
            return
        for _ in range(2):
            with pytest.raises(CommunicationError) as caught:
                comm.recv(1)
            assert not isinstance(caught.value, DeadlineError)
            assert "rank 0 of 2 waits" in str(caught.value)
            words = "rank 1 is gone; the first to end was rank 1 of 2: ended by RuntimeError: disk"
            assert words in str(caught.value)

    begin = time.monotonic()
    run(2, work, store=store, environ={"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert time.monotonic() - begin < 10
    run(2, messages.barrier, store=store)  # joined again, nothing is left of the failure


def test_a_wait_that_is_cancelled_ends_and_others_go_on():
    def work(comm):
        waits = comm.duplicate()
        if comm.rank == 0:
            threading.Timer(0.3, waits.cancel).start()
            with pytest.raises(CommunicationError, match="message of rank 1: cancelled"):
                waits.recv(1)
            with pytest.raises(CommunicationError, match="cancelled"):
                waits.send(numbers(1), 1)
        return messages.gather_objects(comm, comm.rank)

    assert run(2, work) == [[0, 1]] * 2


def test_waiting_costs_next_to_no_processor_time():
    def work(comm):
        if comm.rank == 1:
            time.sleep(1)
            comm.send(numbers(1), 0)
        else:
            comm.recv(1)

    used, waited = time.process_time(), time.monotonic()
    run(2, work)
    used, waited = time.process_time() - used, time.monotonic() - waited
    assert used < 0.2 * waited


def test_a_closed_communicator_says_so():
    comm = ProcessGroupCommunicator.join(dist.HashStore(), 0, 1, 5.0, {})
    comm.close()
    with pytest.raises(CommunicationError, match="rank 0 of 1: closed"):
        comm.recv(0)


@pytest.mark.parametrize(
    ("ranks", "places"),
    [
        ([(7, -1, -1), (8, -1, -1), (7, -1, -1)], [(0, 2), (0, 1), (1, 2)]),
        ([(7, 1, 2), (8, 0, 1), (7, 0, 2)], [(1, 2), (0, 1), (0, 2)]),
        ([(7, 1, -1), (8, 0, -1), (7, 0, -1)], [(1, 2), (0, 1), (0, 2)]),
    ],
    ids=["by host", "by launcher", "by launcher without sizes"],
)
def test_local_ranks_come_from_the_launcher_else_from_the_hosts(ranks, places):
    assert local_places(ranks) == places


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([(7, 0, 2), (7, -1, -1)], "rank 0 has a LOCAL_RANK, rank 1 has none"),
        ([(7, 0, 2), (8, 0, 1), (7, 0, 2)], "ranks 0 and 2 are on the same host with the same"),
    ],
)
def test_local_ranks_from_two_sources_are_refused(ranks, message):
    with pytest.raises(CommunicationError, match=message):
        local_places(ranks)


def test_a_local_rank_that_mpi_contradicts_is_refused():
    def work(comm):
        _check_local_ranks({}, comm)
        _check_local_ranks({"LOCAL_RANK": str(comm.rank)}, comm)
        with pytest.raises(DDLError, match="rank 1 has LOCAL_RANK=0, MPI counts it as 1"):
            _check_local_ranks({"LOCAL_RANK": "0"}, comm)

    run(2, work)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "backend"),
    [
        ({}, "single"),
        ({"PMI_RANK": "0"}, "mpi"),
        (TORCHRUN, "torch"),
        ({**TORCHRUN, "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}, "torch"),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, "single"),
        ({"RANK": "0", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "mpi"),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}, "torch"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "single"),
    ],
)
def test_the_environment_tells_the_launcher(environ, backend):
    assert _detect(environ) == backend


@pytest.mark.parametrize("P", [2, 3])
def test_laws_hold_under_torchrun(P):
    script = str(ROOT / "tests" / "engine" / "laws_under_mpirun.py")
    done = torchrun(P, [script, "5"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(LAWS)} laws hold on {P} ranks"


def test_the_example_trains_under_torchrun(tmp_path):
    script = str(ROOT / "examples" / "train_resnet50.py")
    options = ["--model", "resnet20", "--max-steps", "2", "--log-dir", str(tmp_path)]
    done = torchrun(2, [script, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["P"], summary["steps"], summary["parameters_agree"]) == (2, 2, True)


def test_a_default_group_is_joined_and_survives_and_a_bucket_may_be_under_way_at_the_end(tmp_path):
    script = tmp_path / "guest.py"
    script.write_text(
        "import torch, torch.distributed as dist, ddl\n"
        "dist.init_process_group('gloo')\n"
        "def total():\n"
        "    ranks = torch.tensor([dist.get_rank()])\n"
        "    dist.all_reduce(ranks)\n"
        "    return int(ranks)\n"
        "for _ in range(2):\n"
        "    comm = ddl.init(timeout=20)\n"
        "    assert (ddl.rank(), ddl.size()) == (dist.get_rank(), 2)\n"
        "    assert (ddl.local_rank(), ddl.local_size()) == (dist.get_rank(), 2)\n"
        "    assert ddl.gather_object(ddl.rank()) == [0, 1] and total() == 1\n"
        "    ddl.shutdown()\n"
        "    assert total() == 1\n"
        "ddl.init()\n"
        "model = torch.nn.Linear(100, 100)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optimizer = ddl.DistributedOptimizer(optimizer, model.named_parameters(), density=0.1)\n"
        "model(torch.ones(2, 100)).square().sum().backward()\n"
        "print('reached the end', flush=True)\n"
    )
    done = torchrun(2, [str(script)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached the end") == 2  # lines of two ranks may run together


LAST_WORDS = """
import os, signal, sys, time, torch, ddl
comm = ddl.init(timeout=20)
ddl.barrier()
if comm.rank == 1:
    print(time.time(), flush=True)
    {ending}
ddl.barrier()
"""


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 is gone; look for the first rank that"),
        ("raise RuntimeError('disk full')", "ddl: rank 1 of 3: ended by RuntimeError: disk full"),
    ],
    ids=["killed", "raises"],
)
def test_a_rank_that_fails_ends_the_job_and_is_named(tmp_path, ending, message):
    script = tmp_path / "job.py"
    script.write_text(LAST_WORDS.format(ending=ending))
    done = torchrun(3, [str(script)], timeout=120)
    assert time.time() - float(done.stdout) < 10  # no process is left by then
    assert done.returncode != 0
    assert message in done.stderr
