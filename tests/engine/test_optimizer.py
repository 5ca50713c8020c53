"""DistributedOptimizer as users use it: on threads, each rank with a model and data of its own."""

import copy

import pytest
import torch
from torch import nn
from toy import backward, batch, digests_equal, make_model, sgd, train, wrap

import ddl
from ddl.comm import SingleCommunicator, threads


@pytest.mark.parametrize("compressor", ddl.COMPRESSORS)
@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_ranks_that_start_apart_end_with_the_same_bits(P, compressor):
    models = threads.run(P, lambda comm: train(comm, compressor=compressor, bucket_bytes=200))
    assert digests_equal(models)


def test_without_compression_it_is_large_batch_sgd():
    P = 4
    models = threads.run(P, lambda comm: train(comm, compressor="none"))
    model = make_model(seed=0)
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(P):
            inputs, labels = batch(rank, step)
            (nn.functional.cross_entropy(model(inputs), labels) / P).backward()
        optimizer.step()
    for ours, theirs in zip(models[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compressor", ddl.COMPRESSORS)
@pytest.mark.parametrize("make", [sgd, lambda m: torch.optim.Adam(m.parameters(), lr=0.01)])
def test_one_rank_with_density_one_is_the_bare_optimizer_to_the_bit(make, compressor):
    bare, wrapped = make_model(), make_model()
    optimizer = make(bare)
    with_ddl = wrap(
        wrapped, make(wrapped), compressor=compressor, density=1.0, comm=SingleCommunicator()
    )
    for step in range(10):
        for model, stepper in ((bare, optimizer), (wrapped, with_ddl)):
            stepper.zero_grad()
            backward(model, 0, step)
            stepper.step()
    assert ddl.parameters_digest(bare) == ddl.parameters_digest(wrapped)


def test_training_goes_down_with_every_compressor():
    def work(comm, compressor):
        model = make_model()
        # A step small enough for random-k, whose gradients arrive 1 / density steps late.
        slow = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(model, slow, compressor=compressor, density=0.2)
        losses = []
        for step in range(100):
            optimizer.zero_grad()
            losses.append(backward(model, comm.rank, step).item())
            optimizer.step()
        return losses

    for compressor in ddl.COMPRESSORS:
        for losses in threads.run(3, lambda comm, c=compressor: work(comm, c)):
            assert sum(losses[-5:]) < 0.6 * sum(losses[:5]), compressor


def test_it_is_an_optimizer_that_shares_groups_and_state():
    model = make_model()
    inner = sgd(model)
    optimizer = wrap(model, inner, comm=SingleCommunicator())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    backward(model, 0, 0)
    optimizer.step()
    assert optimizer.state is inner.state
    assert len(optimizer.state) == len(list(model.parameters()))
    assert optimizer.state_dict()["state"].keys() == inner.state_dict()["state"].keys()
    assert "SGD" in repr(inner)
    assert repr(optimizer)


def test_state_loaded_into_either_reaches_both():
    model = make_model()
    inner = sgd(model)
    optimizer = wrap(model, inner, comm=SingleCommunicator())
    backward(model, 0, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.5
    saved["param_groups"][0]["lr"] = 0.25
    inner.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.25
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert len(momenta) == 6


@pytest.mark.parametrize("before", [True, False])
def test_schedulers_work_whether_built_before_or_after_wrapping(before, recwarn):
    model = make_model()
    inner = sgd(model)
    if before:
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = wrap(model, inner, comm=SingleCommunicator())
    if not before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, 0, step)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.2 * 0.5**3
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_wrapping_twice_changes_nothing():
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    assert wrap(model, optimizer, density=0.5) is optimizer
    assert optimizer.density == 0.1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_flat_buckets_however_they_are_zeroed(set_to_none):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="none")
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, comm.rank, step)
            optimizer.step()
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        return len(storages), model

    results = threads.run(2, work)
    assert [count for count, _ in results] == [1, 1]
    expected = threads.run(2, lambda comm: train(comm, steps=3, compressor="none"))
    assert digests_equal([results[0][1], results[1][1], *expected])


def test_gradient_accumulation_sums_and_a_short_last_window_works():
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="none", backward_passes_per_step=3)
        for window in ([0, 1, 2], [3]):
            optimizer.zero_grad()
            for step in window:
                backward(model, comm.rank, step)
            optimizer.step()
        return model

    models = threads.run(2, work)
    model = make_model()
    optimizer = sgd(model)
    for window in ([0, 1, 2], [3]):
        optimizer.zero_grad()
        for step in window:
            for rank in range(2):
                inputs, labels = batch(rank, step)
                (nn.functional.cross_entropy(model(inputs), labels) / 2).backward()
        optimizer.step()
    assert digests_equal(models)
    for ours, theirs in zip(models[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_can_be_clipped_between_synchronize_and_step():
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="none")
        optimizer.zero_grad()
        backward(model, comm.rank, 0)
        assert optimizer.synchronize()
        before = model[0].weight.detach().clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert norm > 1e-3
        with optimizer.skip_synchronize():
            optimizer.step()
        moved = (model[0].weight - before).norm()
        assert 0 < moved <= 0.2 * 1e-3 * 1.01
        return model

    assert digests_equal(threads.run(2, work))


@pytest.mark.parametrize("make", [sgd, lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3)])
def test_closures_are_evaluated_and_aggregated(make):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, make(model), compressor="none")

        def closure():
            optimizer.zero_grad()
            return backward(model, comm.rank, 0)

        losses = [optimizer.step(closure).item() for _ in range(2)]
        assert losses[1] < losses[0]
        return model

    assert digests_equal(threads.run(2, work))


def test_fused_optimizers_get_unscaled_gradients_from_a_scaler():
    def run(optimizer, model, synchronize):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            inputs, labels = batch(0, step)
            scaler.scale(nn.functional.cross_entropy(model(inputs), labels)).backward()
            synchronize()
            scaler.step(optimizer)
            scaler.update()

    bare, model = make_model(), make_model()
    run(torch.optim.SGD(bare.parameters(), lr=0.1, fused=True), bare, lambda: None)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    optimizer = wrap(model, inner, density=1.0, comm=SingleCommunicator())
    run(optimizer, model, optimizer.synchronize)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_synchronizing_twice_aggregates_once():
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="none")
        backward(model, comm.rank, 0)
        optimizer.synchronize()
        before = [p.grad.clone() for p in model.parameters()]
        assert optimizer.synchronize()
        assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
        optimizer.step()
        return model

    assert digests_equal(threads.run(2, work))
