"""DistributedOptimizer with all kinds of models, and what a step costs."""

import threading
import time

import pytest
import torch
from torch import nn
from toy import backward, batch, digests_equal, make_model, sgd, train_seed, wrap

import ddl
from ddl.comm import SingleCommunicator, threads


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


def test_graphs_of_gradients_can_be_made():
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    inputs, labels = batch(0, 0)
    before = ddl.parameters_digest(model)
    nn.functional.cross_entropy(model(inputs), labels).backward(create_graph=True)
    optimizer.step()
    assert ddl.parameters_digest(model) != before


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
        optimizer = wrap(model, compressor="gtopk", density=0.1, collective="butterfly")
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


def test_a_rank_that_used_no_embedding_meets_one_that_has_a_sparse_gradient():
    def work(comm):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)
        model = nn.ModuleList([embedding, head])
        optimizer = wrap(model, density=0.2, unused_parameters="zero")
        before = embedding.weight.clone()
        for step in range(3):
            optimizer.zero_grad()
            used = embedding(torch.tensor([5 + step])) if comm.rank == 0 else torch.ones(1, 4)
            head(used).sum().backward()
            optimizer.step()
        assert not torch.equal(embedding.weight, before)
        return model

    assert digests_equal(threads.run(2, work))


@pytest.mark.parametrize("compressor", ["none", "topk", "gtopk", "randomk"])
def test_half_precision_averages_do_not_overflow_where_their_sums_would(compressor):
    def work(comm):
        model = nn.Linear(64, 1, bias=False).half()
        optimizer = wrap(model, compressor=compressor, density=1.0)
        model.weight.grad = torch.full((1, 64), 40_000.0, dtype=torch.float16)  # 4 of them: inf
        (model.weight * 0).sum().backward()  # so that the hooks see it
        optimizer.synchronize()
        assert bool((model.weight.grad == 40_000.0).all())
        optimizer.zero_grad()
        return True

    assert all(threads.run(4, work))


def test_entries_beyond_what_a_float_counts_are_found_again():
    """An index above 2^24 kept as a float32 would be off by one."""
    numel = 2**24 + 10

    def work(comm):
        weight = nn.Parameter(torch.zeros(numel))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        optimizer = ddl.DistributedOptimizer(optimizer, [("weight", weight)], density=2 / numel)
        places = torch.tensor([2**24 + 1 + 2 * comm.rank, 2**24 + 5])
        (weight[places] * torch.tensor([1.0, 2.0])).sum().backward()
        optimizer.step()
        optimizer.close()
        moved = weight.detach().nonzero().flatten()
        return dict(zip(moved.tolist(), weight[moved].tolist(), strict=True))

    applied, again = threads.run(2, work)
    assert applied == again
    assert applied[2**24 + 5] == -2.0
    assert set(applied) <= {2**24 + 1, 2**24 + 3, 2**24 + 5} and len(applied) == 2


def test_the_density_is_the_one_that_was_asked_for_from_the_first_step_on():
    def work(comm):
        model = nn.Linear(100, 100, bias=False)
        optimizer = wrap(model, sgd(model), density=0.001)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(8, 100, generator=torch.Generator().manual_seed(step))
            model(inputs).square().sum().backward()
            optimizer.step()
            seen.append((optimizer.density, optimizer.metrics.density_actual))
        return seen

    for seen in threads.run(2, work):
        assert seen == [(0.001, 0.001)] * 3
