"""DistributedOptimizer: the user's optimizer, whose gradients are averages over all ranks."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddl.aggregation.feedback import Feedback
from ddl.comm import Communicator
from ddl.compressors import make_compressor
from ddl.density import DensityWarmup, check_density
from ddl.errors import DDLError
from ddl.metrics import RunTotals, StepMetrics
from ddl.metrics.timeline import TimelineConfig
from ddl.reduction.agreement import ReducerConfig
from ddl.reduction.buckets import NamedParameter
from ddl.reduction.join import Join
from ddl.reduction.loss_scale import GradScaler, check_scaler, hold
from ddl.reduction.naming import mark_of, named, owned, settings_of
from ddl.reduction.reducer import Reducer
from ddl.reduction.wrapper import Wrapper
from ddl.settings import Settings
from ddl.world import communicator

logger = logging.getLogger(__name__)

UNUSED_PARAMETERS = ("error", "zero")


class DistributedOptimizer(Wrapper):
    """Wraps an optimizer so that `step()` applies the average gradient of all ranks.

    It shares the wrapped optimizer's `param_groups` and `state`, so schedulers and checkpoints made
    for either work with both. Gradients are aggregated in the background while `backward()` goes
    on; `step()` waits for them. Each rank applies the same update, to the bit.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = ddl.DistributedOptimizer(optimizer, model.named_parameters(),
                                             compressor="gtopk", density=0.001)

    Where a gradient of any rank is not finite, all ranks skip the step together; `skipped_steps`
    counts them. Wrapping a wrapped optimizer returns it unchanged.

    Gradients become averages in `step()` or `synchronize()`. Until then they are this rank's own
    and must not be changed; `zero_grad()` discards them.

    Attributes:
        compressor: the chosen pairing of selector and collective.
        density: fraction of gradient entries to keep at present; the same on every rank.
        skipped_steps: steps skipped because a gradient of any rank was not finite.
        epoch: what `set_epoch` was told last, None if nothing.
        scaler: what scales the loss, None if nothing.
    """

    def __new__(cls, optimizer: Optimizer, *args: Any, **kwargs: Any) -> DistributedOptimizer:
        """A new wrapper, or `optimizer` itself if it is one."""
        return optimizer if isinstance(optimizer, cls) else super().__new__(cls)

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        compressor: str = "gtopk",
        density: float = 0.001,
        density_warmup: DensityWarmup | None = None,
        global_density: float | None = None,
        collective: str | None = None,
        wire: str | None = None,
        hierarchical: bool | None = None,
        backward_passes_per_step: int = 1,
        unused_parameters: str = "error",
        bucket_bytes: int | str | None = None,
        dense_below: int = 0,
        scaler: GradScaler | None = None,
        momentum_correction: float = 0.0,
        local_clip_norm: float | None = None,
        error_feedback: bool = True,
        seed: int = 0,
        timeline: str | os.PathLike[str] | None = None,
        comm: Communicator | None = None,
    ) -> None:
        """Hook into the parameters, and give every rank those of rank 0. Collective.

        Args:
            optimizer: any torch optimizer over floating-point parameters.
            named_parameters: names for messages, usually `model.named_parameters()`; parameters
                that the optimizer does not have are ignored. Their order, about that of the
                forward pass, decides which gradients travel first.
            compressor: one of `ddl.COMPRESSORS`.
            density: fraction of the entries of each bucket to keep, in (0, 1].
            density_warmup: higher densities for the first epochs; tell the epoch by `set_epoch`.
            global_density: for gtopk and gaussiank-gtopk: fraction of the entries of each bucket
                to keep of the sum over ranks; default twice `density` for "exact", or where that
                is the default, otherwise `density`, also for "auto". During a warm-up it is as many
                times larger as `density` is.
            collective: for gtopk and gaussiank-gtopk: "butterfly" (default below 8 ranks, and
                between GPUs), "exact" (default from 8 ranks on), "tree", or "auto": what is
                predicted to be fastest for a bucket on this network, of these, the all-gather and
                the dense all-reduce.
            wire: for all compressors but none and randomk: "plain" (default, 8 bytes an entry),
                "compact" (4 bytes, values as bfloat16) or "compact-fp16". What rounding takes
                from the average is owed.
            hierarchical: whether the ranks of a node first add up their gradients, so that nodes
                aggregate instead of ranks. None (default): where there are several nodes, each with
                several ranks, and a byte takes more than 4 times as long between as within them.
            backward_passes_per_step: backward passes between two steps; their gradients are summed,
                as torch does without ddl. `step()` after fewer takes what there is.
            unused_parameters: "error", or "zero" for models in which some parameters get no
                gradient in some steps: it then counts as zero on this rank.
            bucket_bytes: gradient bytes aggregated together; default DDL_FUSION_THRESHOLD, 25 MiB.
                "auto" begins with that, and after five steps moves parameters into buckets planned
                from measured times, if that is predicted to save 3 % of a step.
            dense_below: parameters with fewer elements (biases, norms) are aggregated whole.
            scaler: the torch.amp.GradScaler that scales the loss, if one does. Residuals are then
                in true units, whatever the scale, and `scaler.unscale_(optimizer)` and
                `scaler.step(optimizer)` wait for the averages first. A gradient of any rank that
                is not finite makes the scaler of every rank skip the step.
            momentum_correction: m in [0, 1) of u = m u + gradient on each rank, before selection;
                what is sent is u, which becomes zero where it was applied (arXiv 1712.01887,
                Section 3). The wrapped optimizer must have no momentum of its own. Parameters
                aggregated whole get u = m u + average. Costs memory for u, and a pass over it.
            local_clip_norm: t, for the norm of the average. Each rank clips its own gradient to a
                norm of t sqrt(P) before it is added to what is owed (the same, Section 3.2). Costs
                the overlap with the backward pass, since the norm is known at its end.
            error_feedback: False drops what is not applied instead of owing it; for study.
            seed: of random-k's draws; the same on every rank.
            timeline: file for a timeline of the job (`ddl.metrics.timeline`); default
                DDL_TIMELINE.
            comm: the ranks; default those of `ddl.init()`.

        Raises:
            ValueError: an argument out of range; a parameter that cannot be handled.
            DisagreementError: ranks were given different models or settings.
        """
        if optimizer is self:
            logger.warning("the optimizer is distributed already; its first settings stay")
            return
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; the "
                "model's named_parameters() come second"
            )
        check_density(density)
        if global_density is not None:
            check_density(global_density, "global_density")
        winners_per_pick = None if global_density is None else global_density / density
        kind = make_compressor(compressor, collective, wire, winners_per_pick)
        if density_warmup is not None and not isinstance(density_warmup, DensityWarmup):
            raise ValueError(
                f"density_warmup must be a ddl.DensityWarmup or None, got {density_warmup!r}"
            )
        if unused_parameters not in UNUSED_PARAMETERS:
            raise ValueError(
                f"unused_parameters must be one of {', '.join(UNUSED_PARAMETERS)}, got "
                f"{unused_parameters!r}"
            )
        check_scaler(scaler)
        feedback = Feedback.beside(optimizer, momentum_correction, error_feedback, hierarchical)
        if local_clip_norm is not None and (
            isinstance(local_clip_norm, bool) or not 0 < local_clip_norm < math.inf
        ):
            raise ValueError(
                f"local_clip_norm must be a positive number or None, got {local_clip_norm}; it is "
                "what the norm of the average is not to exceed"
            )
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise ValueError(
                "backward_passes_per_step must be a whole number, at least 1, got "
                f"{backward_passes_per_step}; it is how often backward() comes before step()"
            )
        if hierarchical not in (None, True, False):
            raise ValueError(f"hierarchical must be True, False or None, got {hierarchical!r}")
        settings = Settings.from_environment()
        planned = bucket_bytes == "auto"
        bucket_bytes = settings.bucket_bytes if bucket_bytes in (None, "auto") else bucket_bytes
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f'bucket_bytes must be at least 1, got {bucket_bytes!r}; or "auto"')
        comm = communicator() if comm is None else comm
        members = named(optimizer, named_parameters)
        trainable = [member for member in members if member.parameter.requires_grad]
        self._names = {id(member.parameter): member.name for member in members}

        super().__init__(optimizer)
        self.compressor = kind
        self._rank = comm.rank
        self._target_density = density
        self._warmup = density_warmup
        self._synchronized = False
        self._finite = True
        self._closed = False
        self.join_block: Join | None = None
        self.scaler = scaler
        self.skipped_steps = 0
        self.epoch: int | None = None
        self._reducer = Reducer(
            trainable,
            comm,
            kind,
            density,
            ReducerConfig(
                bucket_bytes=bucket_bytes,
                dense_below=dense_below,
                backward_passes_per_step=backward_passes_per_step,
                unused_parameters=unused_parameters,
                density_warmup=density_warmup.densities if density_warmup else (),
                seed=seed,
                hierarchical=hierarchical,
                plan_buckets=planned,
                timeline=TimelineConfig.of(settings, timeline),
                links=settings.links,
                feedback=feedback,
                optimizer={
                    **settings_of(optimizer),
                    "loss scale of scaler": None if scaler is None else scaler.get_scale(),
                },
                local_clip_norm=local_clip_norm,
            ),
            stall_check_seconds=settings.stall_check_seconds,
            scaler=scaler,
            mark=lambda: mark_of(optimizer),
        )
        if scaler is not None:
            hold(scaler, self)
        if density_warmup is not None:
            self.set_epoch(0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer, and aggregate them from now on. Collective."""
        super().add_param_group(param_group)
        if self._inner is not None:
            self._adopt_new_parameters(within_step=False)

    # A step.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's: gradients that no `step()` has applied are discarded.

        Collective where gradients have come since the last step.
        """
        if not self._reducer.idle:
            if self.join_block is not None and self._reducer.under_way:
                self.join_block.lead(self, "discard")
            self._reducer.discard()
        self._synchronized = False
        self._wrapped.zero_grad(set_to_none)

    def synchronize(self) -> bool:
        """Wait until every `p.grad` is the average over ranks, e.g. to clip it. Collective.

        `step()` does not aggregate again what this has aggregated.

        Returns:
            Whether the gradients of all ranks were finite; the same on every rank.

        Raises:
            GradientError: a parameter got no gradient, or one that was changed before this call.
            CommunicationError: another rank is gone, or did not take part in time.
            DDLError: the optimizer is closed.
        """
        if self._closed:
            raise DDLError("the optimizer is closed, expected an open one; wrap the inner one anew")
        if self._synchronized and self._reducer.idle:
            return self._finite
        if self.join_block is not None:
            self.join_block.lead(self, "step")
        self._adopt_new_parameters(within_step=True)
        self._finite = self._reducer.synchronize()
        self._synchronized = True
        if not self._finite:
            self.skipped_steps += 1
            logger.log(
                logging.WARNING if self._rank == 0 else logging.DEBUG,
                "step %d skipped on every rank: a gradient was not finite (%d skipped so far)",
                self._reducer.step - 1,
                self.skipped_steps,
            )
        return self._finite

    def join(self, *others: DistributedOptimizer) -> Join:
        """Let ranks take different numbers of steps: `with optimizer.join():`.

        See `ddl.reduction.join.Join`.
        """
        return Join([self, *others])

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For scripts written for others: here `step()` knows what is synchronized already."""
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Aggregate what is not aggregated yet, then step. Collective.

        Where a gradient of any rank was not finite, every rank skips the step.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch. The wrapped optimizer
                is given the average over ranks, so that a line search goes the same way on all.

        Returns:
            What the wrapped optimizer returns; the loss, or None, for a skipped step.

        Raises:
            As `synchronize`.
        """
        if closure is None:
            if not self._gradients_usable():
                return None
            return self._reducer.take(self._wrapped.step)
        if self.join_block is not None:
            raise ValueError("step() got a closure, expected none within join(); call backward()")
        first = self._evaluate(closure)
        if not self._gradients_usable():
            return first
        evaluated = [first]  # what optimizers get that evaluate but once
        return self._reducer.take(
            lambda: self._wrapped.step(
                lambda: evaluated.pop() if evaluated else self._evaluate(closure)
            )
        )

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Loss and gradients, both averages over ranks."""
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        return torch.tensor(self._reducer.average(torch.as_tensor(loss).item()))

    def _gradients_usable(self) -> bool:
        """Aggregate unless `synchronize` has."""
        self.synchronize()
        self._synchronized = False
        return self._finite

    # Density and metrics.

    @property
    def density(self) -> float:
        """Fraction of gradient entries kept at present."""
        return self._reducer.density

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch, from 0, to the density warm-up; between two steps, on every rank."""
        if self._warmup is not None:
            self._reducer.density = self._warmup.at(epoch, self._target_density)
        self.epoch = epoch

    # What checkpoints need besides.

    @property
    def reducer(self) -> Reducer:
        """What aggregates the gradients."""
        return self._reducer

    @property
    def between_steps(self) -> bool:
        """Whether no gradient waits to be applied: none has come since the last step."""
        return self._reducer.idle and not self._synchronized

    def adopt_new_parameters(self) -> None:
        """Aggregate what was unfrozen since the last step, from now on. Collective."""
        self._adopt_new_parameters(within_step=False)

    @property
    def metrics(self) -> StepMetrics:
        """What the last step cost and moved on this rank; takes a pass over the residuals."""
        return self._reducer.metrics()

    @property
    def totals(self) -> RunTotals:
        """What all steps so far have cost, for `ddl.metrics.summary`."""
        return self._reducer.recorder.totals

    def close(self) -> None:
        """Let go of the parameters and end the background thread. Collective; once is enough."""
        if not self._closed:
            self._closed = True
            self._reducer.close()

    def _adopt_new_parameters(self, within_step: bool) -> None:
        """Take in parameters that were added or unfrozen since the last step."""
        new = [
            NamedParameter(self._names.get(id(member.parameter), member.name), member.parameter)
            for member in owned(self._wrapped)
            if member.parameter.requires_grad and not self._reducer.knows(member.parameter)
        ]
        if new:
            if self.join_block is not None:
                raise DDLError(f"parameter {new[0].name!r} is new, expected none within join()")
            self._reducer.add(new, within_step=within_step)
