"""DistributedOptimizer when something is wrong: one clear line, nothing lost, nothing hangs."""

import copy
import gc
import logging
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from toy import backward, batch, digests_equal, make_model, sgd, train, wrap

import ddl
from ddl.comm import SingleCommunicator, threads


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
        lambda model: [p.grad.data.mul_(0.5) for p in model.parameters()],
    ],
    ids=["replaced", "clipped", "changed as data"],
)
def test_gradients_changed_under_way_are_an_error_with_a_cure(change):
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    backward(model, 0, 0)
    change(model)
    with pytest.raises(ddl.GradientError, match=r"step 0.*was changed.*optimizer.synchronize\(\)"):
        optimizer.step()


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
    flats = [weakref.ref(bucket) for bucket, _ in optimizer.reducer.owing]
    del optimizer
    gc.collect()
    assert not [flat for flat in flats if flat() is not None]


def test_closed_and_copied_optimizers_say_what_to_do():
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copy.deepcopy(optimizer)
    optimizer.close()
    backward(model, 0, 0)
    with pytest.raises(ddl.DDLError, match="the optimizer is closed"):
        optimizer.step()


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
        (
            {"collective": "star"},
            "collective must be one of tree, butterfly, exact, auto, got 'star'",
        ),
        ({"compressor": "topk", "collective": "tree"}, "'topk' has no choice of collective"),
        (
            {"backward_passes_per_step": 0},
            "backward_passes_per_step must be a whole number, at least 1, got 0",
        ),
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
