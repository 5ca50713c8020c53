"""torch.amp: a loss scale changes nothing but what half precision can hold."""

import pytest
import torch
from device_jobs import emulated, run
from laws import SPARSE_COMPRESSORS
from torch import nn
from toy import batch, digests_equal, make_model, sgd, wrap

import ddl
from ddl import kernels
from ddl.comm import SingleCommunicator, threads
from ddl.comm.current import use
from ddl.errors import GradientError
from ddl.reduction import agreement
from ddl.reduction.loss_scale import LossScale

KINDS = [("none", None, None, None), *SPARSE_COMPRESSORS, ("gtopk", "auto", "plain", None)]


def make_scaler(**kwargs):
    """One whose scale is a power of two, and changes every third step."""
    settings = {"init_scale": 2.0**10, "growth_interval": 3, **kwargs}
    return torch.amp.GradScaler("cpu", **settings)


def run_steps(comm, scaler, steps=10, overflow=None, clip=None, passes=1, **kwargs):
    """The documented order: scale, backward, unscale, clip, step, update.

    Args:
        comm: the ranks.
        scaler: None to train without.
        steps: how many.
        overflow: rank and step of a loss that is not finite.
        clip: norm to clip the average to.
        passes: backward passes a step.
        kwargs: of DistributedOptimizer.
    """
    model = make_model()
    kwargs = {"bucket_bytes": 200, "dense_below": 4, **kwargs}
    optimizer = wrap(model, scaler=scaler, backward_passes_per_step=passes, **kwargs)
    for step in range(steps):
        optimizer.zero_grad()
        for one in range(passes):
            inputs, labels = batch(comm.rank, step * passes + one)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            if overflow == (comm.rank, step):
                loss = loss * float("inf")
            (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            optimizer.synchronize() if scaler is None else scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    residuals = [a.residual for _, a in optimizer.reducer.owing if a.residual is not None]
    skipped = optimizer.skipped_steps
    optimizer.close()
    return model, residuals, skipped


def same_bits(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def check_scale_changes_nothing(launch, **kwargs):
    """Power-of-two scales are exact in float32, so nothing may differ, residuals included."""
    scaled = launch(lambda comm: run_steps(comm, make_scaler(), **kwargs))
    plain = launch(lambda comm: run_steps(comm, None, **kwargs))
    for (model, residuals, _), (bare, bare_residuals, _) in zip(scaled, plain, strict=True):
        assert same_bits(model.parameters(), bare.parameters())
        assert same_bits(residuals, bare_residuals)


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_changing_scale_changes_no_bit_of_parameters_or_residuals(kind, P, monkeypatch):
    monkeypatch.setenv("DDL_LINKS", "5e-5,1e-9")
    name, collective, wire, ratio = kind
    check_scale_changes_nothing(
        lambda work: threads.run(P, work),
        compressor=name,
        collective=collective,
        wire=wire,
        global_density=ratio and 0.1 * ratio,
    )


def test_a_changing_scale_changes_no_bit_in_two_levels(monkeypatch):
    nodes = lambda comm: tuple(rank // 2 for rank in range(comm.size))  # noqa: E731
    monkeypatch.setattr(agreement, "find_nodes", nodes)
    check_scale_changes_nothing(lambda work: threads.run(4, work), hierarchical=True)


@pytest.mark.parametrize("compressor", ["none", "gtopk", "gaussiank", "randomk"])
def test_a_changing_scale_changes_no_bit_on_the_device(compressor, monkeypatch):
    monkeypatch.setattr(kernels, "device_operations", lambda device: emulated())

    def launch(work):
        def on_rank(comm):
            with use(comm):
                return work(comm)

        return run(2, on_rank)

    check_scale_changes_nothing(launch, compressor=compressor, steps=5)


def test_a_changing_scale_changes_no_bit_with_what_can_be_combined():
    check_scale_changes_nothing(
        lambda work: threads.run(2, work), clip=0.5, passes=2, local_clip_norm=0.5
    )
    check_scale_changes_nothing(lambda work: threads.run(2, work), error_feedback=False)


@pytest.mark.parametrize("compressor", ["none", "topk", "gtopk", "gaussiank", "randomk"])
def test_an_overflow_on_one_rank_skips_one_step_of_200_on_all(compressor):
    def work(comm):
        scaler = make_scaler(growth_interval=1000)
        model, residuals, skipped = run_steps(
            comm, scaler, steps=200, overflow=(1, 77), compressor=compressor, dense_below=0
        )
        return model, residuals, skipped, scaler.get_scale()

    results = threads.run(2, work)
    assert digests_equal([model for model, *_ in results])
    for model, residuals, skipped, scale in results:
        assert skipped == 1
        assert scale == 2.0**9  # halved once
        assert all(bool(kept.isfinite().all()) for kept in [*residuals, *model.parameters()])


def test_two_optimizers_share_a_scaler_and_discard_each_others_gradients():
    """A GAN's: the generator's loss gives the discriminator gradients that nobody applies."""

    def work(comm, scaled):
        scaler = make_scaler() if scaled else torch.amp.GradScaler("cpu", enabled=False)
        generator, critic = make_model(1), nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.fill_(0.3)
        ours, theirs = (wrap(model, scaler=scaler) for model in (generator, critic))
        for step in range(6):
            inputs, _ = batch(comm.rank, step)
            theirs.zero_grad()
            loss = critic(generator(inputs).detach()).square().mean()
            scaler.scale(loss + critic(inputs[:, :3]).mean()).backward()
            scaler.step(theirs)
            ours.zero_grad()
            scaler.scale(critic(generator(inputs)).mean()).backward()
            scaler.step(ours)
            theirs.zero_grad()
            scaler.update()
        return nn.ModuleList([generator, critic])

    scaled = threads.run(2, lambda comm: work(comm, True))
    plain = threads.run(2, lambda comm: work(comm, False))
    assert digests_equal(scaled)
    for ours, theirs in zip(scaled[0].parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_models_train_under_a_scale():
    model = make_model().to(torch.float16)
    scale = 2.0**12
    optimizer = wrap(model, sgd(model), scaler=Fixed(scale), comm=SingleCommunicator(), density=0.1)
    inputs, _ = batch(0, 0)
    for _ in range(3):
        optimizer.zero_grad()
        (model(inputs.half()).square().mean() * scale).backward()
        gradient = torch.cat([p.grad.flatten().clone() for p in model.parameters()])
        optimizer.synchronize()
    [(_, aggregator)] = optimizer.reducer.owing
    # Owed in true units, smaller than the scaled gradients by far.
    assert aggregator.residual.abs().max() < gradient.abs().max() / 100
    optimizer.close()


class Fixed:
    """A scaler of one's own."""

    def __init__(self, scale):
        self.scale = scale

    def get_scale(self):
        return self.scale

    def unscale_(self, optimizer):
        pass


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_makes_no_sense_is_refused(scale):
    with pytest.raises(GradientError, match="expected a positive number"):
        LossScale(Fixed(scale)).read()


def test_a_scaler_that_the_optimizer_was_not_told_of_is_pointed_out():
    model = make_model()
    optimizer = wrap(model, comm=SingleCommunicator())
    scaler = make_scaler()
    inputs, labels = batch(0, 0)
    scaler.scale(nn.functional.cross_entropy(model(inputs), labels)).backward()
    with pytest.raises(GradientError, match="as scaler="):
        scaler.step(optimizer)
    optimizer.close()


def test_what_is_no_scaler_is_refused():
    with pytest.raises(ValueError, match=r"must be a torch\.amp\.GradScaler or None, got float"):
        wrap(make_model(), scaler=1024.0, comm=SingleCommunicator())
    with pytest.raises(ValueError, match=r"must be a torch\.amp\.GradScaler or None, got float"):
        ddl.SparseHookState(make_model(), scaler=1024.0)


def test_autocast_in_bfloat16_trains_to_the_same_bits_on_all_ranks():
    def work(comm):
        model = make_model(comm.rank)
        optimizer = wrap(model)
        for step in range(5):
            optimizer.zero_grad()
            inputs, labels = batch(comm.rank, step)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        return model

    assert digests_equal(threads.run(3, work))
