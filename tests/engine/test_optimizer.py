"""DistributedOptimizer as users use it: on threads, each rank with a model and data of its own."""

import copy
import gc
import logging
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import ddl
from ddl.comm import SingleCommunicator, threads


def make_model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(rank, step, size=16):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def backward(model, rank, step):
    inputs, labels = batch(rank, step)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, **kwargs)


def wrap(model, optimizer=None, **kwargs):
    optimizer = sgd(model) if optimizer is None else optimizer
    kwargs.setdefault("density", 0.1)
    return ddl.DistributedOptimizer(optimizer, model.named_parameters(), **kwargs)


def train(comm, steps=5, **kwargs):
    model = make_model(seed=comm.rank)
    optimizer = wrap(model, **kwargs)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    optimizer.close()
    return model


def digests_equal(models):
    return len({ddl.parameters_digest(model) for model in models}) == 1


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


def test_one_backward_pass_too_many_is_an_error_with_a_cure():
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    backward(model, 0, 0)
    with pytest.raises(ddl.GradientError, match=r"backward_passes_per_step="):
        backward(model, 0, 1)
    optimizer.close()


def test_a_parameter_without_gradient_is_named_with_a_cure():
    model = make_model()
    model.spare = nn.Linear(2, 2)
    optimizer = wrap(model, comm=SingleCommunicator())
    loss = model[:4](batch(0, 0)[0]).sum()
    loss.backward()
    with pytest.raises(
        ddl.GradientError,
        match=r"'spare.bias' and 1 more got no gradient in step 0 on rank 0.*requires_grad",
    ):
        optimizer.step()


def test_parameters_unused_on_one_rank_count_as_zero_there_when_asked():
    def work(comm):
        model = make_model()
        model.spare = nn.Linear(6, 3)
        optimizer = wrap(model, compressor="none", unused_parameters="zero")
        for step in range(3):
            optimizer.zero_grad()
            inputs, _ = batch(comm.rank, step)
            output = model[:4](inputs)
            if comm.rank == step:
                output = output + model.spare(inputs)
            output.square().sum().backward()
            optimizer.step()
        return model

    assert digests_equal(threads.run(3, work))


def test_frozen_parameters_stay_and_may_be_unfrozen_on_the_way():
    def work(comm):
        model = make_model()
        model[0].requires_grad_(False)
        frozen = model[0].weight.detach().clone()
        optimizer = wrap(model, compressor="gtopk")
        for step in range(4):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
            if step == 1:
                assert torch.equal(model[0].weight, frozen)
                model[0].requires_grad_(True)
        assert not torch.equal(model[0].weight, frozen)
        return model

    assert digests_equal(threads.run(3, work))


def test_a_group_added_on_the_way_is_aggregated():
    def work(comm):
        model = make_model()
        extra = nn.Linear(3, 3)  # another on every rank, until it is added
        optimizer = wrap(model, compressor="topk")
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": extra.parameters(), "lr": 0.1})
            optimizer.zero_grad()
            inputs, labels = batch(comm.rank, step)
            output = model(inputs)
            loss = nn.functional.cross_entropy(extra(output) if step >= 2 else output, labels)
            loss.backward()
            optimizer.step()
        return nn.Sequential(model, extra)

    assert digests_equal(threads.run(3, work))


def test_two_optimizers_share_nothing():
    def work(comm):
        one, two = make_model(1), make_model(2)
        first, second = wrap(one), wrap(two)
        for step in range(3):
            for model, optimizer in ((one, first), (two, second)):
                optimizer.zero_grad()
                backward(model, comm.rank, step)
            second.step()  # in another order than the backward passes
            first.step()
        return one, two

    results = threads.run(3, work)
    alone = threads.run(3, lambda comm: train_seed(comm, 1))
    assert digests_equal([one for one, _ in results] + alone)
    assert digests_equal([two for _, two in results])


def train_seed(comm, seed):
    model = make_model(seed)
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    return model


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


def test_a_bad_gradient_on_one_rank_skips_one_step_on_all(caplog):
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="gtopk", bucket_bytes=200)
        history = []
        for step in range(6):
            optimizer.zero_grad()
            loss = backward(model, comm.rank, step) if step != 2 else None
            if loss is None:
                inputs, labels = batch(comm.rank, step)
                loss = nn.functional.cross_entropy(model(inputs), labels)
                (loss * (float("nan") if comm.rank == 1 else 1.0)).backward()
            before = ddl.parameters_digest(model)
            optimizer.step()
            history.append(before == ddl.parameters_digest(model))
        metrics = optimizer.metrics
        return model, history, optimizer.skipped_steps, metrics.residual_norm

    with caplog.at_level(logging.WARNING, logger="ddl"):
        results = threads.run(3, work)
    assert digests_equal([model for model, *_ in results])
    for _, unchanged, skipped, norm in results:
        assert unchanged == [False, False, True, False, False, False]
        assert skipped == 1
        assert 0 < norm < float("inf")
    assert "step 2 skipped on every rank" in caplog.text


def test_zero_grad_discards_a_gradient_that_no_step_has_applied():
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="gtopk")
        backward(model, comm.rank, 7)
        optimizer.zero_grad()
        assert optimizer.metrics.residual_norm < 1e-6
        for step in range(2):
            backward(model, comm.rank, step)
            optimizer.step()
            optimizer.zero_grad()
        return model

    def plain(comm):
        return train(comm, steps=2, density=0.1)

    discarded, never = threads.run(2, work), threads.run(2, plain)
    assert digests_equal(discarded)
    for ours, theirs in zip(discarded[0].parameters(), never[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gan_trains_as_with_bare_optimizers(set_to_none):
    """The generator's loss sends gradients through the discriminator, which must not apply them."""

    def train_gan(wrap_one):
        torch.manual_seed(0)
        G, D = nn.Linear(2, 3), nn.Linear(3, 1)
        oG, oD = (wrap_one(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (G, D))
        for _ in range(5):
            z, real = torch.randn(8, 2), torch.randn(8, 3)
            oD.zero_grad(set_to_none)
            (D(G(z).detach()).square() - D(real).square()).mean().backward()
            oD.step()
            oG.zero_grad(set_to_none)
            D(G(z)).square().mean().backward()
            oG.step()
        return nn.Sequential(G, D)

    bare = train_gan(lambda optimizer: optimizer)
    ours = train_gan(
        lambda optimizer: ddl.DistributedOptimizer(
            optimizer, compressor="gtopk", density=1.0, comm=SingleCommunicator()
        )
    )
    for mine, theirs in zip(ours.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: [setattr(p, "grad", p.grad * 0.5) for p in model.parameters()],
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    ],
    ids=["replaced", "clipped"],
)
def test_gradients_changed_under_way_are_an_error_with_a_cure(change):
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    backward(model, 0, 0)
    change(model)
    with pytest.raises(ddl.GradientError, match=r"changed in step 0.*optimizer.synchronize\(\)"):
        optimizer.step()


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


def test_a_parameter_frozen_on_the_way_stays_where_it_is():
    def work(comm):
        model = make_model()
        optimizer = wrap(model, sgd(model, weight_decay=0.1), compressor="gtopk")
        for step in range(5):
            if step == 2:
                model[0].requires_grad_(False)
                frozen = model[0].weight.detach().clone()
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        assert torch.equal(model[0].weight, frozen)
        return model

    assert digests_equal(threads.run(3, work))


def test_a_parameter_belongs_to_one_optimizer_only():
    model = make_model()
    first = wrap(model, comm=SingleCommunicator())
    with pytest.raises(ValueError, match="belongs to another DistributedOptimizer"):
        wrap(model, comm=SingleCommunicator())
    first.close()
    wrap(model, comm=SingleCommunicator())


def test_ranks_out_of_step_are_told_instead_of_mixing_gradients():
    def work(comm):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = wrap(model, compressor="none", bucket_bytes=80)
        for step in range(3):
            optimizer.zero_grad()
            if comm.rank == 1 and step == 1:
                # Its batch fails half-way, and it goes on with the next one.
                model[1](torch.ones(2, 4)).sum().backward()
                continue
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    with pytest.raises(ddl.CommunicationError, match="the ranks are out of step"):
        threads.run(2, work, timeout=5)


@pytest.mark.parametrize("synchronize", [False, True])
def test_a_rank_that_leaves_out_a_step_is_told(synchronize):
    def work(comm):
        model = make_model()
        optimizer = wrap(model)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            if synchronize:
                optimizer.synchronize()
            if comm.rank == 0 or step != 1:
                optimizer.step()

    with pytest.raises(ddl.CommunicationError, match="the ranks are out of step"):
        threads.run(2, work, timeout=5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_converted_after_wrapping_is_refused(dtype):
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    model.to(dtype)
    with pytest.raises(
        ddl.GradientError, match=r"expected torch.float32.*call model.to\(\) before"
    ):
        model(batch(0, 0)[0].to(dtype)).sum().backward()
    optimizer.close()


def test_a_step_without_a_backward_pass_says_so():
    optimizer = wrap(make_model(), comm=SingleCommunicator())
    with pytest.raises(ddl.GradientError, match=r"expected a backward\(\) before each"):
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda m: ddl.DistributedOptimizer(sgd(m), m.parameters(), comm=SingleCommunicator()),
        lambda m: ddl.DistributedOptimizer(sgd(m), m, comm=SingleCommunicator()),
        lambda m: ddl.DistributedOptimizer(m.named_parameters(), sgd(m), comm=SingleCommunicator()),
    ],
)
def test_arguments_in_the_wrong_place_name_the_right_ones(make):
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        make(make_model())


def test_ranks_with_different_warmups_are_told_apart():
    def work(comm):
        wrap(make_model(), density_warmup=ddl.DensityWarmup((0.5, 0.1 * (comm.rank + 1))))

    with pytest.raises(ddl.DisagreementError, match="density_warmup: rank 1"):
        threads.run(2, work)


def test_forgotten_optimizers_free_their_buckets():
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    backward(model, 0, 0)
    optimizer.step()
    flats = [weakref.ref(bucket) for bucket in optimizer._reducer._buckets]
    del optimizer
    gc.collect()
    assert not [flat for flat in flats if flat() is not None]


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


def test_closed_and_copied_optimizers_say_what_to_do():
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copy.deepcopy(optimizer)
    optimizer.close()
    backward(model, 0, 0)
    with pytest.raises(ddl.DDLError, match="the optimizer is closed"):
        optimizer.step()


def test_graphs_of_gradients_can_be_made():
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    inputs, labels = batch(0, 0)
    nn.functional.cross_entropy(model(inputs), labels).backward(create_graph=True)
    optimizer.step()


def test_backward_never_waits_for_the_network():
    """A rank whose peer is late finishes its backward pass; only its step waits."""
    late = threading.Event()

    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="gtopk", bucket_bytes=200)
        if comm.rank == 1:
            assert late.wait(30)
        backward(model, comm.rank, 0)
        late.set()  # by rank 0, after its whole backward pass
        optimizer.step()

    threads.run(2, work)


def test_communication_overlaps_the_backward_pass():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.3)
            return grad

    def work(comm):
        model = make_model()
        # Layers 2 and 1 in two buckets, layer 0, whose gradients come late, in the last.
        optimizer = wrap(model, compressor="gtopk", bucket_bytes=330)
        for step in range(2):  # the first may have to load kernels
            optimizer.zero_grad()
            hidden = model[0](batch(comm.rank, step)[0])
            model[1:](Slow.apply(hidden)).sum().backward()
            optimizer.step()
        return optimizer.metrics.overlap_fraction

    for overlap in threads.run(2, work):
        assert overlap > 0.9


def test_metrics_count_what_was_sent():
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="gtopk", density=0.1)
        backward(model, comm.rank, 0)
        optimizer.step()
        return optimizer.metrics

    numel = sum(p.numel() for p in make_model().parameters())
    k = round(0.1 * numel)
    for metrics in threads.run(8, work):
        assert metrics.bytes_sent == 3 * (8 * k + 8)
        assert metrics.bytes_dense == 2 * 7 * 4 * numel // 8
        assert metrics.ratio == metrics.bytes_sent / metrics.bytes_dense
        assert metrics.density_actual == k / numel
        assert metrics.finite and metrics.step == 0
        names = set(metrics.as_dict())
        assert {"time/wait", "comm/bytes_sent", "comm/overlap_fraction", "residual/norm"} <= names


def test_density_warms_up_by_epoch():
    model = make_model()
    optimizer = wrap(
        model, density=0.01, density_warmup=ddl.DensityWarmup(), comm=SingleCommunicator()
    )
    seen = [optimizer.density]
    for epoch in range(1, 6):
        optimizer.set_epoch(epoch)
        seen.append(optimizer.density)
    assert seen == [0.25, 0.0625, 0.015625, 0.01, 0.01, 0.01]


def test_small_parameters_can_stay_dense():
    def work(comm):
        model = make_model()
        optimizer = wrap(model, compressor="gtopk", density=0.01, dense_below=20)
        backward(model, comm.rank, 0)
        optimizer.step()
        assert all((p.grad != 0).all() for p in model.parameters() if p.numel() < 20)
        assert any((p.grad == 0).any() for p in model.parameters() if p.numel() >= 20)
        return model

    assert digests_equal(threads.run(2, work))


def test_half_precision_and_channels_last_models_train():
    def work(comm, dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)).to(dtype)
        model = model.to(memory_format=torch.channels_last)
        optimizer = wrap(model, compressor="gtopk", density=0.2)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4, 8, 8, dtype=dtype) * (comm.rank + 1)).square().mean().backward()
            optimizer.step()
        assert model[0].weight.grad.stride() == model[0].weight.stride()
        return model

    for dtype in (torch.float32, torch.bfloat16):
        assert digests_equal(threads.run(2, lambda comm, d=dtype: work(comm, d)))


def test_sparse_embedding_gradients_are_aggregated():
    def work(comm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
        optimizer = wrap(model, compressor="none")
        for step in range(2):
            optimizer.zero_grad()
            model(torch.tensor([comm.rank, 3 + step])).sum().backward()
            optimizer.step()
        return model

    assert digests_equal(threads.run(2, work))


def test_tiny_and_empty_parameters_are_no_special_case():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.one = nn.Parameter(torch.ones(1))
            self.none = nn.Parameter(torch.empty(0))

        def forward(self, x):
            return x * self.scalar * self.one + self.none.sum()

    def work(comm):
        model = Tiny()
        optimizer = wrap(model, density=0.001, bucket_bytes=1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor(comm.rank + 1.0)).backward()
            optimizer.step()
        return model

    models = threads.run(2, work)
    assert digests_equal(models)
    assert models[0].scalar.item() != 2.0


def test_ranks_with_different_models_or_settings_are_told_apart_at_the_start():
    def other_density(comm):
        wrap(make_model(), density=0.1 if comm.rank < 2 else 0.2)

    with pytest.raises(ddl.DisagreementError, match=r"density: rank 2 has 0.2, expected 0.1"):
        threads.run(3, other_density)

    def other_model(comm):
        wrap(nn.Linear(3, 3 + comm.rank))

    with pytest.raises(ddl.DisagreementError, match="names and shapes of parameters: rank 1"):
        threads.run(2, other_model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compressor": "zip"}, r"compressor must be one of none, topk, .*got 'zip'"),
        ({"density": 0.0}, r"density must lie in \(0, 1\], got 0.0"),
        ({"density": 1.5}, "not a percentage"),
        ({"density": float("nan")}, r"density must lie in \(0, 1\], got nan"),
        ({"density": True}, r"density must be a number in \(0, 1\], got True"),
        ({"density": "0.1"}, r"density must be a number in \(0, 1\], got '0.1'"),
        ({"density_warmup": 4}, r"density_warmup must be a ddl.DensityWarmup or None, got 4"),
        ({"collective": "star"}, "collective must be one of tree, butterfly, got 'star'"),
        ({"compressor": "topk", "collective": "tree"}, "'topk' has no choice of collective"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be at least 1, got 0"),
        ({"unused_parameters": "skip"}, "unused_parameters must be one of error, zero"),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
    ],
)
def test_bad_arguments_say_what_was_got_and_expected(arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        wrap(make_model(), comm=SingleCommunicator(), **arguments)
    assert "\n" not in str(raised.value)


def test_names_must_be_distinct_and_cover_the_optimizer():
    one, two = make_model(), make_model()
    both = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    single = SingleCommunicator()
    with pytest.raises(ValueError, match=r"'0.weight' 2 times"):
        ddl.DistributedOptimizer(
            both, [*one.named_parameters(), *two.named_parameters()], comm=single
        )
    with pytest.raises(ValueError, match="is not in named_parameters"):
        ddl.DistributedOptimizer(both, one.named_parameters(), comm=single)
    assert ddl.DistributedOptimizer(both, comm=single).density == 0.001


def test_double_precision_is_refused_with_a_cure():
    with pytest.raises(ValueError, match=r"'0.weight' has dtype torch.float64, expected float32"):
        wrap(nn.Sequential(nn.Linear(2, 2)).double()[0:1], comm=SingleCommunicator())


def test_it_needs_a_communicator():
    with pytest.raises(ddl.DDLError, match=r"call ddl.init\(\) first"):
        wrap(make_model())


def test_a_stalled_rank_ends_the_wait_with_step_and_bucket():
    def work(comm):
        model = make_model()
        optimizer = wrap(model)
        if comm.rank == 1:
            time.sleep(1.0)
            return
        backward(model, comm.rank, 0)
        optimizer.step()

    with pytest.raises(
        ddl.DeadlineError, match=r"step 0, bucket 0 \(3.bias ... 0.weight\), rank 0"
    ):
        threads.run(2, work, timeout=0.3)


def test_closed_and_forgotten_optimizers_leave_no_threads_and_no_hooks():
    def count():
        return sum(thread.name.startswith("ddl-reducer") for thread in threading.enumerate())

    before = count()
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    backward(model, 0, 0)
    optimizer.step()
    assert count() == before + 1
    optimizer.close()
    optimizer.close()
    assert count() == before
    optimizer = wrap(model, comm=SingleCommunicator())
    optimizer.zero_grad()
    backward(model, 0, 0)
    optimizer.step()
    del optimizer
    gc.collect()
    deadline = time.monotonic() + 10
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() == before
