"""How many entries to keep, and when: density and its warm-up."""

from __future__ import annotations

from dataclasses import dataclass


def check_density(density: float, name: str = "density") -> float:
    """Return `density` as a float if it is one that can be kept; `name` is that of the argument.

    Raises:
        ValueError: it does not lie in (0, 1].
    """
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise ValueError(f"{name} must be a number in (0, 1], got {density!r}")
    if not 0 < density <= 1:
        raise ValueError(
            f"{name} must lie in (0, 1], got {density!r}; it is the fraction of entries kept, "
            "such as 0.001, not a percentage"
        )
    return float(density)


def entries(numel: int, density: float) -> int:
    """k: how many of `numel` entries a density keeps; at least one where there is any."""
    return min(numel, max(1, round(numel * density)))


@dataclass(frozen=True)
class DensityWarmup:
    """Densities for the first epochs, before the target: gradients are largest at the start.

    The default is the published schedule of gTop-k S-SGD (arXiv 1901.04359, Section IV): 0.25,
    0.0625, 0.015625, 0.004, one epoch each. A density below the target is raised to the target.
    """

    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)

    def __post_init__(self) -> None:
        """Check every density.

        Raises:
            ValueError: not a tuple of numbers in (0, 1].
        """
        if not isinstance(self.densities, (tuple, list)):
            raise ValueError(
                f"densities must be a tuple of numbers in (0, 1], got {self.densities!r}"
            )
        object.__setattr__(self, "densities", tuple(self.densities))
        for density in self.densities:
            check_density(density)

    def at(self, epoch: int, target: float) -> float:
        """Density in an epoch, counted from 0.

        Raises:
            ValueError: the epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}; epochs count from 0")
        if epoch < len(self.densities):
            return max(self.densities[epoch], target)
        return target
