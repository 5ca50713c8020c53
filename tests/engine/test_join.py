"""join(): ranks with different numbers of batches."""

import pytest
import torch
from join_laws import COUNTS, LAWS, state_of, train_unevenly
from launch import ROOT
from toy import backward, make_model, wrap

import ddl
from ddl.comm import SingleCommunicator, threads
from ddl.reduction import agreement


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law_of_join_holds_on_threads(law, P):
    threads.run(P, law)


def test_ranks_that_aggregate_in_two_levels_may_run_out_too(monkeypatch):
    nodes = (0, 0, 1, 1)  # threads that believe that each two of them share a node
    monkeypatch.setattr(agreement, "find_nodes", lambda comm: nodes)

    def work(comm):
        model, optimizer, _ = train_unevenly(comm, COUNTS[comm.rank], hierarchical=True)
        return state_of(model, optimizer)[:2]

    assert len(set(threads.run(4, work))) == 1


@pytest.mark.mpi
def test_laws_of_join_hold_under_mpirun(mpirun):
    done = mpirun(3, [str(ROOT / "tests" / "engine" / "join_laws.py")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(LAWS)} laws of join() hold on 3 ranks"


def run_steps(comm, optimizer, model, count):
    for step in range(count):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()


def test_one_block_may_follow_another_and_steps_outside_cost_no_round():
    def work(comm):
        model = make_model()
        optimizer = wrap(model)
        control = optimizer.reducer.control
        for counts in [(1, 2, 3), (3, 2, 1)]:
            with optimizer.join():
                run_steps(comm, optimizer, model, counts[comm.rank])
            before = control.bytes_sent
            run_steps(comm, optimizer, model, 2)
            assert control.bytes_sent == before
        return ddl.parameters_digest(model)

    assert len(set(threads.run(3, work))) == 1


def test_a_bad_gradient_within_join_skips_the_step_on_who_has_run_out_too():
    def work(comm):
        model = make_model()
        optimizer = wrap(model)
        with optimizer.join():
            for step in range(1 + 2 * comm.rank):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 6)).sum()
                (loss * (float("nan") if step == 2 else 1.0)).backward()
                optimizer.step()
        return optimizer.skipped_steps, optimizer.reducer.taken, ddl.parameters_digest(model)

    first, second = threads.run(2, work)
    assert first == second
    assert first[:2] == (1, 2)


def test_an_error_within_the_block_is_not_held_up_by_the_other_ranks():
    def work(comm):
        model = make_model()
        optimizer = wrap(model)
        with optimizer.join():
            run_steps(comm, optimizer, model, 2)
            if comm.rank == 1:
                raise OSError("disk full")
            run_steps(comm, optimizer, model, 1)

    with pytest.raises(OSError, match="disk full"):
        threads.run(2, work)


def test_a_rank_outside_the_block_ends_the_wait_with_step_and_remedy():
    def work(comm):
        model = make_model()
        optimizer = wrap(model)
        if comm.rank == 0:
            run_steps(comm, optimizer, model, 3)
        else:
            with optimizer.join():
                run_steps(comm, optimizer, model, 3)

    with pytest.raises(
        ddl.DeadlineError, match=r"step 0, within join\(\), rank 1 of 2: .*every rank must enter"
    ):
        threads.run(2, work, timeout=1)


def test_ranks_that_do_different_things_within_the_block_are_told():
    def work(comm):
        one, two = make_model(), make_model()
        first, second = wrap(one), wrap(two)
        with first.join(second):
            backward(one, comm.rank, 0)
            backward(two, comm.rank, 0)
            (first if comm.rank == 0 else second).step()

    with pytest.raises(ddl.CommunicationError, match="is at step 0 of optimizer 1, rank 0 at step"):
        threads.run(2, work, timeout=5)


def test_what_cannot_be_followed_is_refused():
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    with optimizer.join():
        with pytest.raises(ValueError, match=r"expected none within join\(\)"):
            optimizer.step(lambda: backward(model, 0, 0))
        with pytest.raises(ValueError, match="within a join"), optimizer.join():
            pass
        backward(model, 0, 0)
        late = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(ddl.DDLError, match=r"parameter 'group1.0' is new"):
            optimizer.add_param_group({"params": [late]})
