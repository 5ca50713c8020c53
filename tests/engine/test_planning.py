"""`bucket_bytes="auto"`: buckets planned from the first steps, with nothing lost in the move."""

import logging

import pytest
import torch
from toy import backward, digests_equal, make_model, wrap

from ddl.comm import threads
from ddl.compressors import make_compressor
from ddl.links import Line, Links
from ddl.perfmodel import plans
from ddl.reduction import planning
from ddl.reduction.planning import LEAST_GAIN, Watched, choose

SIZES = [1_000_000] * 4
LINKS = Links(Line(1e-4, 1e-8))


def seen(t_b=(0.1,) * 4, select=0.02, communicate=0.2, busy=1.0, step=0.7, crowded=False):
    return Watched(list(t_b), [select], [communicate], busy, step, crowded)


def chosen(watched, old=None, links=LINKS):
    """The plan, and the share of a step that it saves."""
    old = plans.single(4) if old is None else old
    plan, gain = choose(watched, SIZES, old, make_compressor("topk"), 0.01, 4, links)
    return plan, gain / watched.step


def test_a_single_bucket_is_cut_where_cores_are_free():
    plan, gain = chosen(seen())
    assert len(plan) == 4
    assert gain == pytest.approx(0.22 * 3 / 4 / 0.7, rel=0.05)  # three of four layers can hide


def test_nothing_is_gained_where_the_background_thread_computes_on_cores_that_are_taken():
    slow, fast = Links(Line(1e-4, 1e-7)), Links(Line(1e-6, 1e-10))
    assert chosen(seen(crowded=True), links=slow)[1] < LEAST_GAIN
    assert chosen(seen(crowded=True, busy=0.1), links=slow)[1] > LEAST_GAIN  # on the network
    # What it waits for is other ranks' threads, since the links are fast.
    assert chosen(seen(crowded=True, busy=0.1), links=fast)[1] < LEAST_GAIN


def test_messages_that_cost_more_than_they_hide_are_merged():
    watched = Watched([0.001] * 4, [0.001] * 4, [0.05] * 4, 0.1, 0.3, False)
    plan, _ = chosen(watched, plans.layerwise(4), Links(Line(0.02, 1e-9)))
    assert len(plan) < 4


@pytest.fixture
def moving(monkeypatch):
    """Plans that give every parameter a bucket of its own, whatever was measured."""
    monkeypatch.setattr(
        planning, "choose", lambda seen, sizes, *rest: (plans.layerwise(len(sizes)), 1e6)
    )
    monkeypatch.setattr(planning, "measure_links", lambda comm, wire: LINKS)


def owed(optimizer):
    return {
        member.name: bucket.part(aggregator.residual, place).clone()
        for bucket, aggregator in optimizer.reducer.owing
        for place, member in enumerate(bucket.members)
    }


def kept(owing):
    """What aggregators keep, by its kind and the name of the parameter."""
    return {
        (kind, member.name): bucket.part(getattr(aggregator, kind), place).clone()
        for bucket, aggregator in owing
        for kind in ("residual", "velocity")
        if getattr(aggregator, kind) is not None
        for place, member in enumerate(bucket.members)
    }


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("compressor", ["none", "topk", "gtopk", "gaussiank-gtopk", "randomk"])
def test_what_is_kept_moves_with_its_parameter_to_the_bit(
    moving, monkeypatch, compressor, momentum
):
    moves = []
    real = planning.carry_over

    def spied(old, new):
        before = kept(old)
        real(old, new)
        moves.append((before, kept(new)))

    monkeypatch.setattr("ddl.reduction.holdings.carry_over", spied)

    def work(comm):
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(
            model,
            sgd,
            compressor=compressor,
            bucket_bytes="auto",
            momentum_correction=momentum,
        )
        for step in range(9):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
            buckets = len(list(optimizer.reducer.owing))
            assert buckets == (1 if step < planning.LAST_STEP - 1 else 6)
        return model

    assert digests_equal(threads.run(3, work))
    assert len(moves) == 3
    for before, after in moves:
        expected = (compressor != "none") + (momentum > 0)
        assert len({kind for kind, _ in before}) == expected
        assert before.keys() == after.keys()
        assert all(torch.equal(part, after[key]) for key, part in before.items())
        assert not expected or any(part.any() for part in before.values())


@pytest.mark.parametrize("P", [2, 3])
def test_every_gradient_is_applied_or_owed_across_the_move(moving, P):
    # Gradients of ones: after t steps each entry has P t, some of it applied, the rest owed.
    def work(comm):
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = wrap(model, optimizer, bucket_bytes="auto", compressor="topk", density=0.2)
        begin = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(8):
            optimizer.zero_grad()
            sum((p * 1.0).sum() for p in model.parameters()).backward()
            optimizer.step()
        assert len(list(optimizer.reducer.owing)) == 4
        applied = {name: begin[name] - p.detach() for name, p in model.named_parameters()}
        return applied, owed(optimizer)

    ranks = threads.run(P, work)
    for name, applied in ranks[0][0].items():
        owing = sum(residuals[name] for _, residuals in ranks)
        torch.testing.assert_close(P * applied.flatten() + owing, torch.full_like(owing, P * 8.0))


def test_at_density_one_the_move_changes_nothing(moving):
    def work(comm, bucket_bytes):
        model = make_model()
        optimizer = wrap(model, density=1.0, bucket_bytes=bucket_bytes)
        for step in range(8):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        return model

    usual, planned = (threads.run(2, lambda comm, b=b: work(comm, b))[0] for b in (None, "auto"))
    for a, b in zip(usual.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_averages_survive_the_move_for_whoever_clips_them(moving):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="none", bucket_bytes="auto")
        for step in range(planning.LAST_STEP):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.synchronize()
            averages = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        assert len(list(optimizer.reducer.owing)) == 6
        return averages

    first, second = threads.run(2, work)
    assert all(a.any() and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_random_draws_go_on_after_the_move(moving):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="randomk", bucket_bytes="auto")
        for step in range(7):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        return [aggregator.draws.drawn for _, aggregator in optimizer.reducer.owing]

    assert threads.run(2, work) == [[7] * 6] * 2


def test_nothing_moves_for_a_gain_of_less_than_three_percent(moving, monkeypatch):
    monkeypatch.setattr(
        planning, "choose", lambda seen, sizes, *rest: (plans.layerwise(6), 0.02 * seen.step)
    )

    def work(comm):
        model = make_model()
        optimizer = wrap(model, bucket_bytes="auto")
        for step in range(7):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        return len(list(optimizer.reducer.owing))

    assert threads.run(2, work) == [1, 1]


def test_the_first_rank_says_what_it_decided(moving, caplog):
    caplog.set_level(logging.INFO, logger="ddl")

    def work(comm):
        model = make_model()
        optimizer = wrap(model, bucket_bytes="auto")
        for step in range(6):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()

    threads.run(2, work)
    lines = [r.getMessage() for r in caplog.records if r.name == "ddl.reduction.planning"]
    assert len(lines) == 1 and lines[0].startswith("buckets: leaving those of ")


def test_ranks_decide_alike_from_what_they_measure():
    def work(comm):
        model = make_model()
        optimizer = wrap(model, bucket_bytes="auto")
        for step in range(8):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        return model, [b.flat.numel() for b, _ in optimizer.reducer.owing]

    results = threads.run(3, work)
    assert digests_equal([model for model, _ in results])
    assert len({tuple(buckets) for _, buckets in results}) == 1


@pytest.mark.parametrize("value", ["best", 0, 1.5])
def test_another_word_than_auto_is_refused(value):
    with pytest.raises(ValueError, match=r'must be at least 1, got .*; or "auto"'):
        threads.run(1, lambda comm: wrap(make_model(), comm=comm, bucket_bytes=value))


def test_parameters_of_several_kinds_stay_where_they_are(caplog):
    threads.run(2, lambda comm: wrap(make_model(), bucket_bytes="auto", dense_below=20))
    assert 'bucket_bytes="auto" has no effect' in caplog.text
