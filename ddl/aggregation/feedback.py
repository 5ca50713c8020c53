"""Error feedback: what was not applied is owed, and goes into a later step.

What a rank sends is selected from what it has accumulated. With g the gradient, m the coefficient
of momentum correction, u the velocity and v the residual, a step of one rank is

1. *Momentum.* u = m u + g. Without momentum correction u is g.
2. *Accumulate.* v = v + u; what is selected goes out of v, the rest stays.
3. *Repay.* What was selected and not applied goes back into v.
4. *Mask.* Where an entry was applied, u = 0: it would otherwise push the same entry again, in a
   direction that is as old as the entry.

Momentum correction and masking are those of Deep Gradient Compression (Lin et al., arXiv
1712.01887, Section 3.1 and 3.2): without the correction an optimizer's momentum acts on averages in
which an entry shows up once in 1 / density steps, and forgets what has happened in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddl import kernels
from ddl.sparse import SparseVector


@dataclass(frozen=True)
class Feedback:
    """What becomes of gradients that are not applied at once."""

    momentum: float = 0.0
    """m of momentum correction, in [0, 1); costs a velocity of the residual's size, and a pass."""
    errors: bool = True
    """Whether what was not applied is owed; if not, it is dropped, for study."""

    @classmethod
    def beside(
        cls, optimizer: Optimizer, momentum: float, errors: bool, hierarchical: bool | None
    ) -> Feedback:
        """What the user has asked for, if it fits the optimizer that applies the averages.

        Args:
            optimizer: the user's.
            momentum: see the attribute.
            errors: see there.
            hierarchical: whether ranks aggregate in two levels; None: where it pays.

        Raises:
            ValueError: settings out of range, or that contradict each other.
        """
        if isinstance(momentum, bool) or not isinstance(momentum, (int, float)):
            raise ValueError(f"momentum_correction must be a number, got {momentum!r}")
        if not 0 <= momentum < 1:
            raise ValueError(
                f"momentum_correction must lie in [0, 1), got {momentum}; it replaces the "
                "optimizer's momentum"
            )
        if not isinstance(errors, bool):
            raise ValueError(f"error_feedback must be True or False, got {errors!r}")
        if momentum:
            for group in optimizer.param_groups:
                for name in ("momentum", "betas"):
                    if group.get(name):
                        raise ValueError(
                            f"momentum_correction={momentum} with {type(optimizer).__name__} of "
                            f"{name}={group[name]}, expected momentum in one place; use SGD "
                            "without momentum, or leave momentum_correction out"
                        )
            if not errors:
                raise ValueError(
                    "momentum_correction with error_feedback=False, expected error feedback: "
                    "momentum is corrected for what is delayed; leave one of them out"
                )
            if hierarchical:
                raise ValueError(
                    "momentum_correction with hierarchical=True, expected one level: only the "
                    "ranks that aggregate across nodes know what was applied; leave one of them out"
                )
        return cls(momentum, bool(errors))

    @property
    def is_plain(self) -> bool:
        """Whether it is error feedback and nothing else."""
        return self.errors and not self.momentum

    def of_bucket(self, numel: int, device: torch.device) -> ErrorFeedback:
        """For one bucket on one rank."""
        if not self.errors:
            return NoFeedback(numel, device)
        if self.momentum:
            return CorrectedFeedback(numel, device, self.momentum)
        return ErrorFeedback(numel, device)


class ErrorFeedback:
    """The residual of one bucket on one rank.

    Attributes:
        residual: float32 [numel], in the units of the unscaled gradient. Selectors accumulate what
            `bring` returns into it, and take out what they pick.
        velocity: float32 [numel], of momentum correction; None without.
    """

    velocity: Tensor | None = None

    def __init__(self, numel: int, device: torch.device) -> None:
        """Owe nothing."""
        self.residual: Tensor = torch.zeros(numel, dtype=torch.float32, device=device)

    @property
    def owed(self) -> Tensor | None:
        """The residual; None where nothing is ever owed."""
        return self.residual

    def bring(self, flat: Tensor, scale: float) -> tuple[Tensor, float]:
        """Take a gradient in.

        Args:
            flat: [numel] gradient, float32, bfloat16 or float16; unchanged.
            scale: factor that brings `flat` to the residual's units.

        Returns:
            A tensor and a factor; the selector is to accumulate their product. Where `flat` is not
            finite, neither is the tensor.
        """
        return flat, scale

    def owe(self, picks: SparseVector) -> None:
        """Take back entries that were picked and not applied."""
        if picks.count:
            kernels.give_back(self.residual, picks.indices, picks.values)

    def applied(self, picks: SparseVector) -> None:
        """Entries of this rank were applied."""

    def applied_all(self) -> None:
        """All that was accumulated was applied."""
        self.residual.zero_()

    def take_back(self, flat: Tensor, scale: float) -> None:
        """The gradient that was brought last never was; to rounding. Arguments as `bring`'s."""
        self.residual.sub_(_finite(flat).mul_(scale))


class CorrectedFeedback(ErrorFeedback):
    """With momentum correction."""

    velocity: Tensor

    def __init__(self, numel: int, device: torch.device, momentum: float) -> None:
        """Owe nothing, and stand still."""
        super().__init__(numel, device)
        self.velocity = torch.zeros_like(self.residual)
        self._momentum = momentum

    def bring(self, flat: Tensor, scale: float) -> tuple[Tensor, float]:
        """See `ErrorFeedback.bring`. Where it would not be finite, the velocity stays."""
        moved = advance(self.velocity, flat, scale, self._momentum)
        if moved is None:
            return self.velocity, 1.0
        return moved, 1.0

    def applied(self, picks: SparseVector) -> None:
        """See `ErrorFeedback.applied`: they stand still."""
        self.velocity[picks.indices.long()] = 0.0

    def applied_all(self) -> None:
        """See `ErrorFeedback.applied_all`."""
        super().applied_all()
        self.velocity.zero_()

    def take_back(self, flat: Tensor, scale: float) -> None:
        """See `ErrorFeedback.take_back`."""
        gradient = _finite(flat).mul_(scale)
        # An entry that was not finite has neither moved nor been accumulated.
        spoiled = ~torch.isfinite(flat)
        self.residual.sub_(self.velocity.masked_fill(spoiled, 0.0))
        before = self.velocity.sub(gradient).div_(self._momentum)
        torch.where(spoiled, self.velocity, before, out=self.velocity)


class NoFeedback(ErrorFeedback):
    """What is not applied is dropped."""

    @property
    def owed(self) -> None:
        """Nothing."""
        return None

    def bring(self, flat: Tensor, scale: float) -> tuple[Tensor, float]:
        """See `ErrorFeedback.bring`. What selectors have left in the residual is dropped."""
        self.residual.zero_()
        return flat, scale

    def owe(self, picks: SparseVector) -> None:
        """See `ErrorFeedback.owe`; dropped."""

    def take_back(self, flat: Tensor, scale: float) -> None:
        """See `ErrorFeedback.take_back`; nothing has been kept."""


def advance(velocity: Tensor, flat: Tensor, scale: float, momentum: float) -> Tensor | None:
    """Move on, in place: velocity = momentum * velocity + scale * flat.

    Args:
        velocity: float32 [numel].
        flat: [numel] gradient, float32, bfloat16 or float16.
        scale: factor of `flat`.
        momentum: m.

    Returns:
        None where all of the new velocity is finite. Else float32 [numel], the new velocity with
        what is not finite in it; those entries of `velocity` are unchanged.
    """
    moved = torch.add(velocity * momentum, flat, alpha=scale)
    # One pass without a mask: what is not finite makes the sum so. Large sums may be, too.
    if torch.isfinite(moved.sum()) or bool(torch.isfinite(moved).all()):
        velocity.copy_(moved)
        return None
    torch.where(torch.isfinite(moved), moved, velocity, out=velocity)
    return moved


def _finite(flat: Tensor) -> Tensor:
    """A float32 copy, 0 where it is not finite."""
    return torch.nan_to_num(flat.to(torch.float32, copy=True), nan=0.0, posinf=0.0, neginf=0.0)
