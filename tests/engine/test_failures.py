"""When a rank fails, every rank ends soon, a line says which one and where, and none is left.

A call of a launcher returns once no process that could print is left.
"""

import re
import time

import pytest
import torch
from launch import ROOT, torchrun
from laws import LAWS
from toy import backward, make_model, wrap

import ddl
from ddl.comm import threads
from ddl.comm.suspects import GONE, Waiting, suspicion

DEADLINE = 4.0
SLACK = 30.0  # the ranks may share few cores with others; on an idle machine 5 s do

WHERE = r"ddl: rank \d of \d: ended by \w+: step 3, bucket 0 \(bias ... weight\), rank \d of \d: .*"
STALLED = WHERE + r"nothing within 4 s; .*rank 1 waits for nobody: it is stalled, dead, or"
LEFT = WHERE + r"rank 1 has left: its script has ended; .* optimizer.join\(\)"
GONE_UNDER_TORCHRUN = WHERE + r"rank 1 is gone; .* optimizer.join\(\)"
OUT_OF_BATCHES = (
    r"ended by DeadlineError: .*(rank 1 \(ddl.allreduce_mean\) waits for rank|"
    r"\(step 3, bucket 0\) waits for rank 1 in turn: they are out of step; .*join\(\))"
)
DIED = r"ddl: rank 1 of 3 died without a word on .*it was killed"
# What fails (see failing_job.py), under which launcher, and what is said.
FAILURES = [
    ("mpich", "stalls", STALLED),
    ("mpich", "is killed", DIED),
    ("mpich", "vanishes 5", DIED),
    ("mpich", "runs out", OUT_OF_BATCHES),
    ("open mpi", "stalls", STALLED),
    ("open mpi", "leaves 3", LEFT),
    ("open mpi", "is killed", r"process rank 1 .*exited on\s+signal 9"),
    ("open mpi", "runs out", OUT_OF_BATCHES),
    ("torchrun", "stalls", STALLED),
    ("torchrun", "leaves 0", GONE_UNDER_TORCHRUN),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("launcher", "how", "said"), FAILURES)
def test_a_rank_that_fails_ends_all_in_time_and_is_named(launcher, how, said, request):
    fixtures = {"mpich": "mpirun", "open mpi": "open_mpirun"}
    launch = request.getfixturevalue(fixtures[launcher]) if launcher in fixtures else torchrun
    env = {"DDL_STALL_SHUTDOWN_TIME_SECONDS": str(DEADLINE)}
    script = str(ROOT / "tests" / "engine" / "failing_job.py")
    done = launch(3, [script, how], env=env, timeout=120)
    ended = time.time()
    assert done.returncode != 0
    assert re.search(said, done.stdout + done.stderr), done.stdout + done.stderr
    failed = re.search(r"^\d{9,}\.\d+", done.stdout, re.MULTILINE)
    assert failed and ended - float(failed.group()) < DEADLINE + SLACK


@pytest.mark.mpi
def test_a_rank_that_leaves_is_noticed_at_once_not_at_the_deadline(mpirun):
    env = {"DDL_STALL_SHUTDOWN_TIME_SECONDS": "600"}
    script = str(ROOT / "tests" / "engine" / "failing_job.py")
    done = mpirun(3, [script, "leaves 3"], env=env, timeout=120)
    assert done.returncode != 0
    assert re.search(LEFT, done.stderr), done.stderr


@pytest.mark.mpi
def test_laws_hold_under_open_mpi(open_mpirun):
    script = str(ROOT / "tests" / "engine" / "laws_under_mpirun.py")
    done = open_mpirun(3, [script, "5"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(LAWS)} laws hold on 3 ranks"


# Ends that are none of these.

PRELUDE = """
import sys, time, torch, ddl
torch.set_num_threads(1)
comm = ddl.init(timeout=20)
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = ddl.DistributedOptimizer(optimizer, model.named_parameters(), density=0.1)
def backward():
    model(torch.ones(2, 100)).square().sum().backward()
backward()
optimizer.step()
"""


@pytest.fixture
def job(mpirun, tmp_path):
    def run(ending, P=2):
        script = tmp_path / "job.py"
        script.write_text(PRELUDE + ending)
        begin = time.monotonic()
        done = mpirun(P, [str(script)], timeout=120)
        return done, time.monotonic() - begin

    return run


@pytest.mark.mpi
@pytest.mark.parametrize(
    "ending",
    [
        "",  # with a bucket under way
        "time.sleep(3 * comm.rank)\n",  # one rank after the other
        "time.sleep(3 * comm.rank)\noptimizer.step()\n",  # rank 0 waits, and asks rank 1
    ],
)
def test_a_job_that_ends_as_it_should_says_nothing(job, ending):
    done, _ = job("optimizer.zero_grad()\nbackward()\n" + ending)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.mpi
def test_an_uncaught_exception_on_one_rank_ends_the_job_and_is_shown(job):
    done, seconds = job(
        "if comm.rank == 1:\n    raise RuntimeError('disk full')\nbackward()\noptimizer.step()\n",
        P=3,
    )
    assert done.returncode != 0
    assert "rank 1 of 3: ended by RuntimeError: disk full" in done.stderr
    assert "Traceback" in done.stderr
    assert seconds < 60


# What is said.


def test_unequal_numbers_of_batches_end_with_rank_step_and_remedy():
    def work(comm):
        model = make_model()
        optimizer = wrap(model)
        for step in range(3 + comm.rank):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        ddl.allreduce_mean(torch.ones(1))

    with pytest.raises(ddl.DeadlineError) as caught:
        threads.run(2, work, timeout=0.5)
    said = str(caught.value)
    assert "step 3, bucket 0" in said
    assert "rank 0" in said and "rank 1" in said and "ddl.allreduce_mean" in said
    assert "with unequal numbers of batches train within optimizer.join()" in said


@pytest.mark.parametrize(
    ("waits", "story"),
    [
        ({}, "rank 1 waits for nobody: it is stalled, dead, or at something else"),
        (
            {1: Waiting(3, "step 7, bucket 0")},
            "rank 1 (step 7, bucket 0) waits for rank 3, rank 3 waits for nobody: it is stalled",
        ),
        ({1: Waiting(2, ""), 2: Waiting(GONE, "")}, "rank 1 waits for rank 2, rank 2 has left"),
        ({1: Waiting(0, "ddl.barrier")}, "rank 1 (ddl.barrier) waits for rank 0 in turn: they are"),
        (
            {1: Waiting(2, ""), 2: Waiting(1, "")},
            "rank 1 waits for rank 2, rank 2 waits for rank 1 in turn: they are out of step",
        ),
    ],
)
def test_a_chain_of_waits_is_followed_to_its_end(waits, story):
    assert suspicion(0, 1, waits.get).startswith(story)


def test_a_stall_report_names_who_is_waited_for(monkeypatch, caplog):
    monkeypatch.setenv("DDL_STALL_CHECK_TIME_SECONDS", "0.2")

    def late(comm):
        model = make_model()
        optimizer = wrap(model)
        if comm.rank == 1:
            time.sleep(1.0)
        backward(model, comm.rank, 0)
        optimizer.step()

    threads.run(2, late, timeout=20)
    assert "step 0, bucket 0 (3.bias ... 0.weight), rank 0 of 2: has waited 0 s" in caplog.text
    assert "for rank 1" in caplog.text
