"""How jobs under mpirun end: with what exit status, and after which message."""

import time

import pytest

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
def test_a_job_may_end_with_a_bucket_under_way(job):
    for _ in range(3):
        done, _ = job("optimizer.zero_grad()\nbackward()\n")
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


@pytest.mark.mpi
def test_a_rank_that_leaves_early_ends_the_others_at_their_deadline(job):
    done, _ = job(
        "if comm.rank == 1:\n    time.sleep(1); sys.exit(0)\n"
        "optimizer.zero_grad()\nbackward()\noptimizer.step()\n"
    )
    assert done.returncode != 0
    assert "step 1, bucket 0 (bias ... weight), rank 0 of 2" in done.stderr
