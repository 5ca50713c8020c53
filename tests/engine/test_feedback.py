"""Momentum correction, local clipping, and training without error feedback."""

import math

import pytest
import torch
from laws import EXACT_SUMS, Case, make_aggregator, same_on_every_rank, total_over_ranks
from torch import nn
from toy import backward, digests_equal, make_model, wrap

import ddl
from ddl.aggregation.aggregator import DenseAggregator, SparseAggregator, aggregate
from ddl.aggregation.clipping import clip_
from ddl.aggregation.feedback import Feedback
from ddl.comm import SingleCommunicator, threads
from ddl.compressors import make_compressor
from ddl.density import entries

M = 0.5  # sums with it are exact on whole numbers
CPU = torch.device("cpu")
CASE = Case(numel=200, density=0.05, correlation=0.3, spread=100, seed=3)


def corrected(comm, kind, momentum=M, case=CASE):
    """The aggregator of a bucket with momentum correction."""
    compressor = make_compressor(*kind)
    feedback = Feedback(momentum)
    return SparseAggregator(comm, case.numel, CPU, compressor, case.seed, feedback)


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


# Momentum correction.


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", EXACT_SUMS, ids=str)
def test_every_velocity_is_applied_or_owed_and_stands_still_where_applied(kind, P):
    def work(comm):
        aggregator = corrected(comm, kind)
        velocity = torch.zeros(CASE.numel)
        for step in range(6):
            gradient = CASE.gradient(comm.rank, step) * 64  # so that halves stay whole
            velocity = M * velocity + gradient
            before = total_over_ranks(comm, aggregator.residual + velocity)
            flat = gradient.clone()
            aggregate(aggregator, flat, CASE.density)
            after = total_over_ranks(comm, aggregator.residual)
            applied = total_over_ranks(comm, flat)
            torch.testing.assert_close(applied + after, before, rtol=0, atol=1e-3)
            assert same_on_every_rank(comm, flat)
            stopped = aggregator.velocity != velocity
            assert bool((aggregator.velocity[stopped] == 0).all())
            # What this rank has sent is gone from its residual.
            assert bool((aggregator.residual[stopped] == 0).all())
            velocity = aggregator.velocity.clone()
        return True

    assert all(threads.run(P, work))


def test_it_is_deep_gradient_compression_to_rounding():
    """Two ranks against the published algorithm, read aloud."""
    steps, lr, density = 8, 0.1, 0.1

    def work(comm):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        optimizer = wrap(
            model, optimizer, compressor="topk", density=density, momentum_correction=0.9
        )
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    got = threads.run(2, work)

    model = make_model()
    reversed_parameters = list(model.parameters())[::-1]
    numel = sum(p.numel() for p in reversed_parameters)
    k = entries(numel, density)
    u, v = torch.zeros(2, numel), torch.zeros(2, numel)
    for step in range(steps):
        total = torch.zeros(numel)
        for rank in range(2):
            model.zero_grad()
            backward(model, rank, step)
            gradient = torch.cat([p.grad.flatten() for p in reversed_parameters])
            u[rank] = 0.9 * u[rank] + gradient
            v[rank] += u[rank]
            sent = v[rank].abs().topk(k).indices
            total[sent] += v[rank, sent]
            u[rank, sent] = 0
            v[rank, sent] = 0
        with torch.no_grad():
            parts = total.split([p.numel() for p in reversed_parameters])
            for parameter, part in zip(reversed_parameters, parts, strict=True):
                parameter -= lr * part.view_as(parameter) / 2
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    for parameters in got:
        torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kwargs", [{"compressor": "none"}, {"dense_below": 10**6}], ids=str)
def test_what_is_sent_whole_gets_the_optimizers_own_momentum(kwargs):
    def work(comm, inner, momentum):
        model = make_model()
        optimizer = wrap(model, inner(model), momentum_correction=momentum, **kwargs)
        for step in range(6):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        return model

    def with_momentum(model):
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    ours = threads.run(2, lambda comm: work(comm, plain_sgd, 0.9))
    theirs = threads.run(2, lambda comm: work(comm, with_momentum, 0.0))
    assert digests_equal(ours)
    for a, b in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [("gtopk", "exact"), ("topk",), ("randomk",)], ids=str)
def test_a_gradient_that_is_discarded_never_was(kind):
    def work(comm):
        kept, tried = corrected(comm, kind), corrected(comm, kind)
        for step in range(4):
            gradient = CASE.gradient(comm.rank, step)
            if step == 2:
                other = CASE.gradient(comm.rank, 99)
                other[7] = float("nan")
                tried.begin(other, CASE.density)
                tried.discard(other)
                if kept.draws is not None:
                    kept.draws.next_seed()
            for aggregator in (kept, tried):
                aggregate(aggregator, gradient.clone(), CASE.density)
        torch.testing.assert_close(tried.residual, kept.residual, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(tried.velocity, kept.velocity, rtol=1e-5, atol=1e-3)
        return True

    assert all(threads.run(2, work))


def test_a_bad_gradient_moves_nothing_where_it_is_bad_and_is_owed_elsewhere():
    def work(comm):
        aggregator = corrected(comm, ("gtopk", "exact"))
        aggregate(aggregator, CASE.gradient(comm.rank, 0), CASE.density)
        residual, velocity = aggregator.residual.clone(), aggregator.velocity.clone()
        gradient = CASE.gradient(comm.rank, 1)
        bad = gradient.clone()
        if comm.rank == 1:
            bad[5] = float("inf")
        outcome = aggregate(aggregator, bad, CASE.density)
        assert not outcome.finite and bool(bad.isnan().all())
        expected = M * velocity + gradient
        if comm.rank == 1:
            expected[5] = velocity[5]
            assert aggregator.residual[5] == residual[5]
            residual[5] -= expected[5]
        assert torch.equal(aggregator.velocity, expected)
        assert torch.equal(aggregator.residual, residual + expected)
        return True

    assert all(threads.run(3, work))


def test_dense_steps_of_auto_stop_everything(monkeypatch):
    monkeypatch.setenv("DDL_LINKS", "1e-3,1e-12")  # latency is all, so dense gathering wins

    def work(comm):
        model = make_model()
        optimizer = wrap(
            model, plain_sgd(model), collective="auto", density=0.9, momentum_correction=0.9
        )
        backward(model, comm.rank, 0)
        optimizer.step()
        kept = [(a.residual, a.velocity) for _, a in optimizer.reducer.owing]
        return [float(tensor.abs().sum()) for pair in kept for tensor in pair]

    assert all(sums == [0.0] * len(sums) for sums in threads.run(2, work))


def test_a_frozen_parameter_does_not_move_on():
    model = make_model()
    optimizer = wrap(
        model,
        plain_sgd(model),
        momentum_correction=0.9,
        unused_parameters="zero",
        comm=SingleCommunicator(),
    )
    backward(model, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    for step in range(1, 4):
        backward(model, 0, step)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model[0].weight, before)
    optimizer.close()


# No error feedback.


@pytest.mark.parametrize("kind", [("topk",), ("gtopk", "exact"), ("gaussiank",), ("randomk",)])
def test_without_error_feedback_steps_know_nothing_of_each_other(kind):
    def aggregator(comm):
        compressor = make_compressor(*kind)
        return SparseAggregator(comm, 200, CPU, compressor, 3, Feedback(errors=False))

    def work(comm):
        one, gradients = aggregator(comm), [CASE.gradient(comm.rank, step) for step in range(3)]
        results = []
        for gradient in gradients:
            aggregate(one, gradient, 0.05)
            assert one.residual is None
            results.append(gradient)
        fresh = aggregator(comm)
        if fresh.draws is not None:
            fresh.draws.drawn = 2
        alone = CASE.gradient(comm.rank, 2)
        aggregate(fresh, alone, 0.05)
        assert torch.equal(results[2], alone)
        assert 0 < int((alone != 0).sum()) <= 2 * 2 * 0.05 * 200
        return True

    assert all(threads.run(2, work))


def test_without_error_feedback_nothing_is_owed_anywhere(tmp_path):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, error_feedback=False)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        assert optimizer.metrics.residual_norm == 0
        ddl.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=3)
        ddl.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        return model

    assert digests_equal(threads.run(2, work))


# Local clipping.


def test_a_long_gradient_is_cut_to_its_share_of_the_threshold():
    flats = [torch.full((3,), 4.0), torch.full((1,), 4.0)]  # of norm 8
    assert clip_(flats, 1.0, P=4, loss_scale=2.0) == pytest.approx(4.0)
    norm = math.sqrt(sum(float(flat.square().sum()) for flat in flats))
    assert norm / 2.0 == pytest.approx(1.0 * math.sqrt(4))
    short = [torch.full((3,), 0.1)]
    clip_(short, 1.0, P=1, loss_scale=1.0)
    assert torch.equal(short[0], torch.full((3,), 0.1))
    bad = [torch.tensor([1e9, float("nan")]), torch.tensor([5.0])]
    clip_(bad, 1.0, P=1, loss_scale=1.0)
    assert bad[1] == 5.0


@pytest.mark.parametrize("unused", ["error", "zero"])
@pytest.mark.parametrize("compressor", ["none", "gtopk"])
def test_the_norm_is_that_of_all_buckets(compressor, unused):
    def work(comm):
        model, bare = make_model(), make_model()
        optimizer = wrap(
            model,
            plain_sgd(model),
            compressor=compressor,
            density=1.0,
            bucket_bytes=100,
            local_clip_norm=0.01,
            unused_parameters=unused,
        )
        backward(bare, comm.rank, 0)
        share = 0.01 * math.sqrt(comm.size)
        nn.utils.clip_grad_norm_(bare.parameters(), share)
        backward(model, comm.rank, 0)
        optimizer.synchronize()
        for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
            average = ddl.allreduce_mean(theirs.grad)
            torch.testing.assert_close(ours.grad, average)
        optimizer.zero_grad()
        return True

    assert all(threads.run(3, work))


# Settings that contradict each other.


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            {"momentum_correction": 0.9},
            r"SGD of momentum=0\.9, expected momentum in one place; use SGD without momentum",
        ),
        (
            lambda model: torch.optim.Adam(model.parameters()),
            {"momentum_correction": 0.9},
            r"Adam of betas=\(0\.9, 0\.999\), expected momentum in one place",
        ),
        (plain_sgd, {"momentum_correction": 1.0}, r"must lie in \[0, 1\), got 1\.0"),
        (plain_sgd, {"momentum_correction": -0.1}, r"must lie in \[0, 1\), got -0\.1"),
        (
            plain_sgd,
            {"momentum_correction": 0.9, "error_feedback": False},
            "expected error feedback",
        ),
        (plain_sgd, {"momentum_correction": 0.9, "hierarchical": True}, "expected one level"),
        (plain_sgd, {"local_clip_norm": 0.0}, "must be a positive number or None, got 0"),
        (plain_sgd, {"local_clip_norm": float("inf")}, "must be a positive number or None"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(make, arguments, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        wrap(model, make(model), comm=SingleCommunicator(), **arguments)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"momentum_correction": 0.9}, r"momentum_correction: rank 1 has 0\.9, expected 0\.0"),
        ({"local_clip_norm": 1.0}, r"local_clip_norm: rank 1 has 1\.0, expected None"),
        ({"error_feedback": False}, "error_feedback: rank 1 has False, expected True"),
    ],
)
def test_ranks_that_choose_differently_are_told(kwargs, message):
    def work(comm):
        model = make_model()
        wrap(model, plain_sgd(model), **(kwargs if comm.rank else {}))

    with pytest.raises(ddl.DisagreementError, match=message):
        threads.run(2, work)


def test_a_dense_aggregator_without_momentum_keeps_nothing():
    assert DenseAggregator(SingleCommunicator()).velocity is None
    assert make_aggregator(SingleCommunicator(), CASE, ("topk", None, None, None)).velocity is None
