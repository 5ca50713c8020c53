"""The timeline: one valid file of what every rank did, whatever ends the job."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch
from launch import find_mpirun, torchrun
from toy import backward, make_model, wrap

import ddl
from ddl.comm import threads
from ddl.comm.current import use
from ddl.metrics.timeline import clock_offset, decode, encode


def train(comm, steps=3, **kwargs):
    model = make_model(comm.rank)
    optimizer = wrap(model, bucket_bytes=200, **kwargs)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    return optimizer


def train_and_close(comm, **kwargs):
    train(comm, **kwargs).close()


def read(path):
    return json.loads(path.read_text())


def spans(events, name, rank=0):
    return [e for e in events if e["ph"] == "X" and e["name"] == name and e["pid"] == rank]


def steps_of(events):
    return sorted({event["args"]["step"] for event in events if event["ph"] == "X"})


@pytest.mark.parametrize("P", [1, 3])
def test_one_file_tells_what_every_rank_did_in_every_step_and_bucket(tmp_path, P):
    path = tmp_path / "trace.json"
    threads.run(P, lambda comm: train_and_close(comm, timeline=path))
    assert os.listdir(tmp_path) == ["trace.json"]
    events = read(path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {pid: name.split(",")[0] for pid, name in names.items()} == {
        rank: f"rank {rank} of {P}" for rank in range(P)
    }
    assert all(isinstance(e["tid"], int) and e.get("dur", 0) >= 0 for e in events)
    for rank in range(P):
        for name in ("select", "communicate", "wait", "apply"):
            found = [(e["args"]["step"], e["args"]["bucket"]) for e in spans(events, name, rank)]
            assert len(found) == len(set(found)) == 3 * 4  # steps, buckets
        assert [e["args"]["step"] for e in spans(events, "backward", rank)] == [0, 1, 2]
        assert [e["args"]["step"] for e in spans(events, "update", rank)] == [0, 1, 2]


def test_spans_of_a_thread_follow_each_other(tmp_path):
    path = tmp_path / "trace.json"
    threads.run(2, lambda comm: train_and_close(comm, timeline=path))
    rows = {}
    for event in read(path):
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(rows) == 4
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        for before, after in pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.3, (before, after)  # rounded


def test_the_window_is_gathered_when_it_is_over_and_nothing_is_recorded_outside(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DDL_TIMELINE", str(tmp_path / "trace.json"))
    monkeypatch.setenv("DDL_TIMELINE_STEPS", "2:4")
    threads.run(2, lambda comm: train(comm, steps=6) and None)  # nobody closes
    assert os.listdir(tmp_path) == ["trace.json"]
    assert steps_of(read(tmp_path / "trace.json")) == [2, 3]


def test_until_it_is_gathered_each_rank_has_a_valid_file_of_its_own(tmp_path):
    def work(comm):
        train(comm, steps=2, timeline=tmp_path / "trace.json")

    threads.run(2, work)
    for rank in range(2):
        events = read(tmp_path / f"trace.rank{rank}.json")
        assert {e["pid"] for e in events} == {rank} and steps_of(events) == [0, 1]
    assert not (tmp_path / "trace.json").exists()


def test_a_new_job_does_not_leave_the_timeline_of_an_old_one(tmp_path):
    path = tmp_path / "trace.json"
    for name in ("trace.json", "trace.rank7.json", "other.rank7.json"):
        (tmp_path / name).write_text("old")
    threads.run(2, lambda comm: train(comm, steps=0, timeline=path) and None)
    left = {"trace.rank0.json", "trace.rank1.json", "other.rank7.json"}
    assert {each.name for each in tmp_path.iterdir()} == left
    assert steps_of(read(tmp_path / "trace.rank0.json")) == []  # empty, and valid


def test_two_optimizers_share_the_file_in_rows_of_their_own(tmp_path):
    path = tmp_path / "trace.json"

    def work(comm):
        first, second = train(comm, timeline=path), train(comm, timeline=path)
        first.close()
        second.close()

    threads.run(2, work)
    events = read(path)
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {
        1: "main",
        2: "background",
        3: "main, optimizer 2",
        4: "background, optimizer 2",
    }
    assert {e["tid"] for e in spans(events, "select", rank=1)} == {2, 4}


def test_gradients_that_are_given_up_are_shown_and_do_not_count_as_a_step(tmp_path):
    path = tmp_path / "trace.json"

    def work(comm):
        model = make_model()
        optimizer = wrap(model, timeline=path)
        for step in (0, 1):
            backward(model, comm.rank, step)
            if step == 0:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.close()
        return ddl.metrics.summary(optimizer)

    for summary in threads.run(2, work):
        assert (summary.all.steps, summary.discarded) == (1, 1)
    events = read(path)
    assert len(spans(events, "select")) == 2
    assert len(spans(events, "discard")) == len(spans(events, "apply")) == 1


def test_a_long_timeline_stays_small(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("ddl.metrics.timeline.EVENTS_AT_MOST", 50)
    threads.run(2, lambda comm: train_and_close(comm, steps=9, timeline=tmp_path / "trace.json"))
    assert len(read(tmp_path / "trace.json")) == 100
    assert caplog.text.count("full with 50 events of rank 1") == 1


def test_after_a_failure_close_does_not_wait_for_the_other_ranks(tmp_path):
    errors = []

    def work(comm):
        model = make_model()
        optimizer = wrap(model, timeline=tmp_path / "trace.json")
        backward(model, comm.rank, 0)
        optimizer.step()
        if comm.rank == 1:
            raise RuntimeError("out of memory")
        optimizer.zero_grad()
        backward(model, comm.rank, 1)
        try:
            optimizer.step()
        except ddl.CommunicationError as error:
            errors.append(error)
        optimizer.close()

    with pytest.raises(RuntimeError, match="out of memory"):
        threads.run(2, work)
    assert len(errors) == 1
    assert steps_of(read(tmp_path / "trace.rank0.json")) == [0]


def test_a_full_disk_ends_the_timeline_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(path, events):
        if len(events) > 10:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddl.metrics.timeline.replace_file", full)
    models = threads.run(2, lambda comm: train_and_close(comm, timeline=tmp_path / "trace.json"))
    assert len(models) == 2 and "No space left on device" in caplog.text


def test_a_file_that_cannot_be_written_is_refused_on_every_rank(tmp_path):
    def work(comm):
        with pytest.raises(ValueError, match=r"rank 0 cannot write the timeline .*choose a file"):
            train(comm, timeline=tmp_path / "missing" / "trace.json")

    threads.run(2, work)


def test_ranks_that_disagree_about_the_timeline_are_told(tmp_path):
    def work(comm):
        with pytest.raises(ddl.DisagreementError, match="timeline: rank 1 has None, expected"):
            train(comm, timeline=None if comm.rank else tmp_path / "trace.json")

    threads.run(2, work)


def test_a_part_of_the_ranks_has_no_timeline(tmp_path, caplog):
    def work(comm):
        part = comm.split(comm.rank % 2, comm.rank)
        wrap(make_model(), timeline=tmp_path / "trace.json", comm=part).close()

    threads.run(4, work)
    assert os.listdir(tmp_path) == []
    assert "ranks other than those of ddl.init()" in caplog.text


@pytest.mark.parametrize("value", ["10", "5:5", "9:3", "-1:4", "a:b"])
def test_a_window_that_is_none_is_named(monkeypatch, value):
    monkeypatch.setenv("DDL_TIMELINE_STEPS", value)
    with pytest.raises(ValueError, match=r"DDL_TIMELINE_STEPS must be FIRST:END.*such as 10:20"):
        ddl.settings.Settings.from_environment()


def test_without_a_timeline_nothing_is_written_or_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def work(comm):
        optimizer = train(comm)
        return comm.timeline, optimizer.reducer.recorder.track

    assert threads.run(2, work) == [(None, None)] * 2
    assert os.listdir(tmp_path) == []


def test_clocks_that_differ_are_aligned(monkeypatch):
    fast = {0: 0.0, 1: 500.0, 2: -3.0}

    def work(comm):
        class Clock:
            @staticmethod
            def perf_counter():
                return time.perf_counter() + fast[comm.rank]

        # Each rank's function with a clock of its own.
        scope = {**clock_offset.__globals__, "time": Clock}
        with use(comm):
            return type(clock_offset)(clock_offset.__code__, scope)(comm)

    offsets = threads.run(3, work)
    assert offsets[0] == 0
    assert offsets[1:] == pytest.approx([-500.0, 3.0], abs=0.05)


def test_messages_of_events_arrive_as_they_were_sent():
    events = [json.dumps({"name": f"ü{n}"}) for n in range(1000)]
    assert decode(encode(events)) == events
    assert encode(events).dtype == torch.uint8


JOB = """
import os, signal, sys, torch, ddl
torch.set_num_threads(1)
comm = ddl.init(timeout=20)
model = torch.nn.Linear(50, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = ddl.DistributedOptimizer(optimizer, model.named_parameters(), density=0.1)
for step in range(1000):
    if step == 5 and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(2, 50)).square().sum().backward()
    optimizer.step()
"""


@pytest.mark.mpi
def test_a_killed_rank_leaves_valid_files_with_all_steps_before(mpirun, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    path = tmp_path / "trace.json"
    done = mpirun(2, [str(tmp_path / "job.py")], env={"DDL_TIMELINE": str(path)}, timeout=120)
    assert done.returncode != 0
    for rank in range(2):
        assert steps_of(read(tmp_path / f"trace.rank{rank}.json")) == [0, 1, 2, 3, 4]


@pytest.mark.mpi
def test_the_file_is_valid_json_whenever_all_ranks_are_killed(tmp_path):
    (tmp_path / "job.py").write_text(JOB.replace("step == 5", "False"))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DDL_TIMELINE": str(tmp_path / "trace.json")}
    env["DDL_TIMELINE_STEPS"] = "0:1000"
    mine = tmp_path / "trace.rank1.json"
    command = [find_mpirun(), "-np", "2", sys.executable, str(tmp_path / "job.py")]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=env, start_new_session=True, **streams) as job:
        deadline = time.monotonic() + 100
        while not (mine.exists() and steps_of(read(mine))[10:]) and time.monotonic() < deadline:
            read_while_it_is_written(mine)
        os.killpg(job.pid, signal.SIGKILL)
    assert len(steps_of(read(mine))) > 10


def read_while_it_is_written(path):
    if path.exists():
        read(path)
    time.sleep(0.01)


HOOKED = """
import sys, torch, ddl
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 40))
model = DistributedDataParallel(model, bucket_cap_mb=1e-3)
state = ddl.SparseHookState(model, density=0.1, dense_below=60)
model.register_comm_hook(state, ddl.sparse_hook)
for step in range(4):
    model.zero_grad()
    model(torch.ones(2, 50)).square().sum().backward()
summary = ddl.metrics.summary(state)
state.close()
assert (summary.all.steps, summary.skipped) == (4, 0), summary
assert summary.all.numel == 4 * sum(p.numel() for p in model.parameters())
assert summary.all.bytes_sent > 0 and 0 < summary.all.ratio < 1
assert 0 < summary.all.wait_seconds
if dist.get_rank() == 0:
    print(summary)
"""


def test_under_ddp_the_hook_records_the_same(tmp_path):
    (tmp_path / "job.py").write_text(HOOKED)
    path = tmp_path / "trace.json"
    done = torchrun(2, [str(tmp_path / "job.py")], env={"DDL_TIMELINE": str(path)}, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 steps, 0 skipped" in done.stdout and ": small" in done.stdout
    events = read(path)
    assert steps_of(events) == [0, 1, 2, 3] and {e["pid"] for e in events} == {0, 1}
    selected = spans(events, "select", rank=1)
    assert len(selected) == len(spans(events, "wait", rank=1)) >= 4 * 2
    assert not list(tmp_path.glob("trace.rank*"))
