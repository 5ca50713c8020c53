"""A run that was saved and resumed is the run that was not interrupted."""

import logging
import random

import numpy as np
import pytest
import torch
from checkpoint_runs import KINDS, SAVED_AT, STEPS, Run, owed, owed_by_all, resumed, written
from torch import nn
from toy import backward, make_model, sgd

import ddl
from ddl.comm import threads
from ddl.errors import DDLError, DisagreementError
from ddl.reduction import agreement


@pytest.fixture
def nodes_of_two(monkeypatch):
    nodes_of = lambda comm: tuple(rank // 2 for rank in range(comm.size))  # noqa: E731
    monkeypatch.setattr(agreement, "find_nodes", nodes_of)


def same_as_never_interrupted(P, tmp_path, **kwargs):
    def work(comm):
        run = Run(comm, **kwargs).go(0, SAVED_AT)
        run.save(tmp_path, SAVED_AT)  # which changes nothing, see below
        run.go(SAVED_AT, STEPS).close()
        again = Run(comm, **kwargs).load(tmp_path)
        assert again.restored.step == SAVED_AT
        again.go(SAVED_AT, STEPS).close()
        assert again.bits() == run.bits()

    threads.run(P, work)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(kind, optimizer, tmp_path, monkeypatch):
    monkeypatch.setenv("DDL_LINKS", "1e-4,1e-7")
    P = {"sgd": 3, "adam": 2}[optimizer]
    same_as_never_interrupted(P, tmp_path, kind=kind, optimizer=optimizer)


@pytest.mark.parametrize("kind", [("gtopk", "exact", "plain", None), ("randomk", None, None, None)])
def test_two_levels_resume_to_the_bit(kind, tmp_path, nodes_of_two):
    same_as_never_interrupted(4, tmp_path, kind=kind, hierarchical=True)


@pytest.mark.parametrize("kind", [("gtopk", "exact", "plain", None), ("none", None, None, None)])
def test_velocities_are_resumed_to_the_bit(kind, tmp_path):
    momentum = {"optimizer": "plain sgd", "momentum_correction": 0.9}
    same_as_never_interrupted(2, tmp_path, kind=kind, **momentum)


@pytest.mark.parametrize("P", [2, 6])
def test_on_other_ranks_the_average_velocity_is_the_same(P, tmp_path):
    arguments = {
        "kind": ("topk", None, None, None),
        "optimizer": "plain sgd",
        "momentum_correction": 0.9,
    }
    before = [owed(run, "velocity") for run in written(4, tmp_path, 8, **arguments)]
    after = [owed(run, "velocity") for run in resumed(P, tmp_path, **arguments)]
    for name in before[0]:
        old, new = (sum(share[name] for share in shares) for shares in (before, after))
        torch.testing.assert_close(new / P, old / 4, rtol=1e-6, atol=1e-7)
        assert old.any()
    # What is sent whole has one velocity, the same on every rank: that of the average.
    small = "4.bias"
    assert all(torch.equal(share[small], before[0][small]) for share in [*before, *after])


def test_velocities_that_come_or_go_are_told(tmp_path, caplog):
    moving = {"optimizer": "plain sgd", "momentum_correction": 0.9}
    written(2, tmp_path / "still", 3, optimizer="plain sgd", kind=("topk", None, None, None))
    written(2, tmp_path / "moving", 3, kind=("topk", None, None, None), **moving)
    with caplog.at_level(logging.WARNING, "ddl"):
        resumed(2, tmp_path / "still", kind=("topk", None, None, None), **moving)
        resumed(2, tmp_path / "moving", kind=("topk", None, None, None), optimizer="plain sgd")
    text = [r.getMessage() for r in caplog.records if "checkpoint" in r.name]
    assert sum("starts without the velocity of momentum correction" in line for line in text) == 1
    assert sum("drops the velocity of momentum correction" in line for line in text) == 1


@pytest.mark.parametrize("P", [2, 4, 6])
def test_what_a_ddp_hook_owes_goes_to_other_ranks_as_well(P, tmp_path):
    def state_of(comm, model):
        return ddl.SparseHookState(model, "gtopk", density=0.1, comm=comm)

    def save(comm):
        model = make_model()
        state = state_of(comm, model)
        owed = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        state.restore(owed, step=7, skipped_steps=1)
        ddl.save_checkpoint(tmp_path, model=model, optimizer=sgd(model), hook=state)
        return owed

    def load(comm):
        model = make_model(1)
        state = state_of(comm, model)
        ddl.load_checkpoint(tmp_path, model=model, optimizer=sgd(model), hook=state)
        assert (state.step, state.skipped_steps) == (7, 1)
        return state.residuals()

    before, after = threads.run(4, save), threads.run(P, load)
    for name in before[0]:
        average = sum(owed[name] for owed in before) / 4
        now = [owed[name] for owed in after if name in owed]
        torch.testing.assert_close(sum(now) / P, average)
        if P == 4:
            assert all(torch.equal(a[name], b[name]) for a, b in zip(before, after, strict=True))


def test_another_models_hook_is_refused_and_a_missing_one_named(tmp_path):
    def work(comm):
        model, other = make_model(), nn.Linear(3, 3)
        state = ddl.SparseHookState(model)
        state.restore({"0.weight": torch.ones(10, 6)}, 1, 0)
        objects = {"model": model, "optimizer": sgd(model)}
        ddl.save_checkpoint(tmp_path, **objects, hook=state)
        with pytest.raises(DDLError, match="has hooks 'hook', expected none"):
            ddl.load_checkpoint(tmp_path, **objects)
        with pytest.raises(DDLError, match=r"'0\.weight' of shape \(10, 6\), the model has none"):
            ddl.load_checkpoint(tmp_path, **objects, hook=ddl.SparseHookState(other))
        with pytest.raises(ValueError, match="is a Linear, expected a ddl"):
            ddl.load_checkpoint(tmp_path, **objects, hook=other)

    threads.run(2, work)


def test_saving_changes_nothing(tmp_path):
    def work(comm, save):
        run = Run(comm, ("gtopk", None, None, None)).go(0, 10)
        if save:
            run.save(tmp_path, 10)
        run.go(10, 20).close()
        return run.bits()

    assert threads.run(2, lambda comm: work(comm, True)) == threads.run(
        2, lambda comm: work(comm, False)
    )


@pytest.mark.parametrize(
    ("P", "levels"),
    [
        *((P, (old, new)) for P in (2, 6) for old in (False, True) for new in (False, True)),
        (4, (False, True)),
        (4, (True, False)),
    ],
)
def test_on_other_ranks_the_average_owed_is_the_same_and_training_goes_on(
    P, levels, tmp_path, nodes_of_two
):
    kind = ("gtopk", "butterfly", "plain", None)
    before = owed_by_all(written(4, tmp_path, 8, kind=kind, hierarchical=levels[0]))

    def work(comm):
        run = Run(comm, kind, hierarchical=levels[1]).load(tmp_path)
        taken_up = owed(run)
        run.go(8, 12).close()
        return run, taken_up, ddl.parameters_digest(run.model)

    results = threads.run(P, work)
    for name, total in before.items():
        taken_up = sum(share[name] for _, share, _ in results)
        torch.testing.assert_close(taken_up / P, total / 4, rtol=1e-6, atol=1e-7)
    assert any(total.any() for total in before.values())
    assert len({digest for *_, digest in results}) == 1
    assert results[0][0].restored.P == 4


def test_each_residual_goes_to_the_old_rank_modulo_P(tmp_path):
    kind = ("topk", None, None, None)
    before = [owed(run) for run in written(4, tmp_path, 8, kind=kind)]
    shares = [owed(run) for run in resumed(6, tmp_path, kind=kind)]
    for name in before[0]:
        for rank in range(4):
            expected = (before[rank][name].float() * 1.5).double()
            assert torch.equal(shares[rank][name], expected)
        assert not shares[4][name].any() and not shares[5][name].any()


def test_a_change_is_told_in_one_line(tmp_path, caplog):
    written(4, tmp_path, steps=3, kind=("topk", None, None, None))
    with caplog.at_level(logging.WARNING, "ddl"):
        resumed(2, tmp_path, kind=("gtopk", None, None, None))
        resumed(4, tmp_path, kind=("none", None, None, None))
    text = [r.getMessage() for r in caplog.records if "checkpoint" in r.name]
    assert sum("4 ranks wrote it, 2 go on" in line and "times 2/4" in line for line in text) == 1
    assert any("compressor gtopk, was topk" in line for line in text)
    assert any("now sent whole" in line and "dropped" in line for line in text)


def test_parameters_may_change_their_order_in_memory(tmp_path):
    shape = (4, 3, 2, 2)

    def work(comm, write):
        model = nn.Conv2d(3, 4, 2)
        if not write:
            model = model.to(memory_format=torch.channels_last)
        optimizer = ddl.DistributedOptimizer(sgd(model), model.named_parameters(), density=0.05)
        if write:
            model(torch.randn(2, 3, 2, 2)).square().sum().backward()
            optimizer.step()
            ddl.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
        else:
            ddl.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        [(bucket, aggregator)] = optimizer.reducer.owing
        place = [member.name for member in bucket.members].index("weight")
        flat = bucket.part(aggregator.residual, place)
        optimizer.close()
        return flat.view(shape) if write else flat.view(4, 2, 2, 3).permute(0, 3, 1, 2)

    [before] = threads.run(1, lambda comm: work(comm, True))
    [after] = threads.run(1, lambda comm: work(comm, False))
    assert before.any() and torch.equal(before, after)


def test_random_states_are_restored(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    draw = lambda: (random.random(), np.random.rand(), torch.rand(3).tolist())  # noqa: E731

    def work(comm):
        ddl.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
        first = draw()
        ddl.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        return first, draw()

    [(first, second)] = threads.run(1, work)
    assert first == second


def test_several_models_and_optimizers_a_scaler_and_extra_go_by_name(tmp_path):
    class Gan:
        def __init__(self, seed):
            torch.manual_seed(seed)
            self.models = {"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)}
            self.optimizers = {
                name: ddl.DistributedOptimizer(sgd(model), model.named_parameters(), density=0.3)
                for name, model in self.models.items()
            }
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (1 + seed))

        def step(self):
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
                fake = self.models["g"](torch.ones(2, 3))
                self.models["d"](fake).square().mean().backward()
                optimizer.step()

        def objects(self):
            return {"model": self.models, "optimizer": self.optimizers, "scaler": self.scaler}

    def work(comm):
        gan, other = Gan(0), Gan(1)
        gan.step()
        gan.scaler.scale(torch.ones(1))  # makes its scale
        with pytest.raises(
            DDLError, match=r"'g' has gradients that no step has applied.*zero_grad"
        ):
            ddl.save_checkpoint(tmp_path, **gan.objects())
        for optimizer in gan.optimizers.values():
            optimizer.zero_grad()
        extra = {"best": 0.5, "names": ("a", None), "count": np.float64(3)}
        ddl.save_checkpoint(tmp_path, **gan.objects(), epoch=2, step=5, position=64, extra=extra)
        restored = ddl.load_checkpoint(tmp_path, **other.objects())
        assert (restored.epoch, restored.step, restored.position) == (2, 5, 64)
        assert restored.extra == {"best": 0.5, "names": ("a", None), "count": 3.0}
        assert other.scaler.get_scale() == 8.0
        gan.step(), other.step()
        for name, model in gan.models.items():
            assert ddl.parameters_digest(model) == ddl.parameters_digest(other.models[name])
        for optimizer in [*gan.optimizers.values(), *other.optimizers.values()]:
            optimizer.close()

    threads.run(2, work)


def test_a_step_under_way_is_refused_on_every_rank(tmp_path):
    def work(comm):
        run = Run(comm)
        backward(run.model, comm.rank, 0)
        for act in (lambda: run.save(tmp_path, 0), lambda: run.load(tmp_path)):
            with pytest.raises(DDLError, match="no step has applied, expected none; call its step"):
                act()
        run.optimizer.synchronize()
        with pytest.raises(DDLError, match="no step has applied"):
            run.save(tmp_path, 0)
        run.optimizer.step()
        run.save(tmp_path, 1)
        run.close()

    threads.run(2, work)


def test_ranks_that_save_different_steps_are_told_so(tmp_path):
    def work(comm):
        run = Run(comm)
        with pytest.raises(DisagreementError, match=r"rank 1 saves at \(0, 1, 0\)"):
            run.save(tmp_path, comm.rank)
        run.close()

    threads.run(2, work)
