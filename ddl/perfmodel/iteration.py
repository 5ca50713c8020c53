"""What an iteration of S-SGD consists of, what it comes to, and the ratios one reports.

Names and formulas are those of arXiv 1711.05979, section on performance models. All times are
seconds; layers are numbered 1..L in the order of the forward pass, so the backward pass runs from L
to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddl.perfmodel.dag import Span


@dataclass(frozen=True)
class LayerProfile:
    """One layer, or one parameter tensor, of a model.

    Attributes:
        name: for messages and timelines.
        numel: elements of its gradient; 0 for a layer that learns nothing.
        t_f: seconds of its forward pass.
        t_b: seconds of its backward pass.
    """

    name: str
    numel: int
    t_f: float = 0.0
    t_b: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: one of them is negative.
        """
        for what, value in (("numel", self.numel), ("t_f", self.t_f), ("t_b", self.t_b)):
            if not value >= 0:
                raise ValueError(f"layer {self.name!r}: {what} must be at least 0, got {value}")


@dataclass(frozen=True)
class IterationProfile:
    """What one worker does in one iteration, apart from communication and selection.

    Attributes:
        layers: in the order of the forward pass.
        t_io: seconds to read and decode the samples of one worker, if it reads alone.
        t_h2d: seconds to copy them to the device.
        t_u: seconds of the optimizer's update.
        batch: samples a worker and iteration, accumulated passes included.
        readers: workers of a node that share its disk and its decoding cores.
    """

    layers: tuple[LayerProfile, ...]
    t_io: float = 0.0
    t_h2d: float = 0.0
    t_u: float = 0.0
    batch: int = 1
    readers: int = 1

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: no layer, a negative time, or no sample or reader.
        """
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("a profile needs at least one layer, got none")
        for what in ("t_io", "t_h2d", "t_u"):
            if not getattr(self, what) >= 0:
                raise ValueError(f"{what} must be at least 0 s, got {getattr(self, what)}")
        for what in ("batch", "readers"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1, got {getattr(self, what)}")

    @property
    def t_f(self) -> float:
        """Seconds of the forward pass."""
        return sum(layer.t_f for layer in self.layers)

    @property
    def t_b(self) -> float:
        """Seconds of the backward pass."""
        return sum(layer.t_b for layer in self.layers)

    @property
    def numel(self) -> int:
        """Elements of the gradient."""
        return sum(layer.numel for layer in self.layers)

    @property
    def t_io_shared(self) -> float:
        """Seconds of reading when all `readers` of a node read at once.

        t_io' = readers * t_io (arXiv 1711.05979, performance models): the worst case, in which
        one reader alone keeps the disk or the decoding cores busy.
        """
        return self.readers * self.t_io

    def alone(self) -> float:
        """Seconds of an iteration on one worker: t_io + t_h2d + t_f + t_b + t_u.

        Source: arXiv 1711.05979, performance models.
        """
        return self.t_io + self.t_h2d + self.t_f + self.t_b + self.t_u

    def at_speed(self, seconds: float) -> IterationProfile:
        """The same profile with all times scaled so that `alone()` lasts `seconds`.

        Raises:
            ValueError: `seconds` is not above 0, or the profile has no time to scale.
        """
        if not seconds > 0 or not self.alone() > 0:
            raise ValueError(
                f"cannot scale an iteration of {self.alone()} s to {seconds} s; both must be "
                "above 0"
            )
        factor = seconds / self.alone()
        layers = tuple(
            replace(layer, t_f=layer.t_f * factor, t_b=layer.t_b * factor) for layer in self.layers
        )
        return replace(
            self,
            layers=layers,
            t_io=self.t_io * factor,
            t_h2d=self.t_h2d * factor,
            t_u=self.t_u * factor,
        )


@dataclass(frozen=True)
class Iteration:
    """What an iteration comes to under a schedule.

    Attributes:
        schedule: its name.
        seconds: of one iteration, in the steady state.
        exposed: seconds of selection and communication that the backward pass does not hide
            (t_c_no of the papers): from the end of the bare backward pass to the last average.
        t_c: seconds of communication in all, hidden or not.
        t_s: seconds of selection in all, hidden or not.
        buckets: in the order of launch, each the range of its layers in `IterationProfile.layers`.
        spans: the timeline.
        batch: samples a worker.
    """

    schedule: str
    seconds: float
    exposed: float
    t_c: float
    t_s: float
    buckets: tuple[range, ...]
    spans: tuple[Span, ...]
    batch: int

    @property
    def throughput(self) -> float:
        """Samples a second of one worker."""
        return self.batch / self.seconds


def speedup(P: int, t_1: float, t_P: float) -> float:
    """How many times more samples a second P workers handle: P t_1 / t_P (weak scaling).

    Source: arXiv 1711.05979, performance models.

    Args:
        P: workers.
        t_1: seconds of an iteration on one worker.
        t_P: seconds of an iteration on P workers, each with the same batch.

    Raises:
        ValueError: fewer than one worker, or a time that is not above 0.
    """
    if P < 1 or not t_1 > 0 or not t_P > 0:
        raise ValueError(f"P must be at least 1 and times above 0 s, got P={P}, {t_1}, {t_P}")
    return P * t_1 / t_P


def efficiency(t_1: float, t_P: float) -> float:
    """Scaling efficiency: speedup / P, which is t_1 / t_P; 1 is perfect.

    Source: arXiv 1711.05979, performance models.

    Args:
        t_1: seconds of an iteration on one worker.
        t_P: seconds of an iteration on P workers, each with the same batch.
    """
    return speedup(1, t_1, t_P)


def perfect_overlap_gain(t_f: float, t_b: float, t_c: float) -> float:
    """How many times faster an iteration gets if communication and backward overlap perfectly.

    (t_f + t_b + t_c) / (t_f + max(t_b, t_c)); at most 1 + t_b / (t_f + t_b), reached at
    t_c = t_b (arXiv 1711.05979, performance models). It bounds what any order of launches can win.

    Args:
        t_f: seconds of the forward pass.
        t_b: seconds of the backward pass.
        t_c: seconds of communication.

    Raises:
        ValueError: a negative time, or nothing but zeros.
    """
    if min(t_f, t_b, t_c) < 0 or t_f + t_b + t_c <= 0:
        raise ValueError(f"times must be at least 0 s and not all 0, got {t_f}, {t_b}, {t_c}")
    return (t_f + t_b + t_c) / (t_f + max(t_b, t_c))


def uniform(
    numels: Sequence[int], t_f: float, t_b: float, batch: int = 1, **more: float
) -> IterationProfile:
    """A profile whose times are spread over its layers in proportion to their sizes.

    A stand-in for measured layer times. Right for fully connected nets; in convolutional ones the
    early layers, small and slow, are the last of the backward pass, so it overrates the overlap.

    Args:
        numels: gradient elements of each layer, in the order of the forward pass.
        t_f: seconds of the forward pass.
        t_b: seconds of the backward pass.
        batch: samples a worker.
        **more: t_io, t_h2d, t_u, readers of `IterationProfile`.

    Raises:
        ValueError: no layer with an element.
    """
    total = sum(numels)
    if total <= 0:
        raise ValueError("a profile needs at least one layer with elements, got none")
    layers = tuple(
        LayerProfile(f"layer {place}", numel, t_f * numel / total, t_b * numel / total)
        for place, numel in enumerate(numels, start=1)
    )
    return IterationProfile(layers, batch=batch, **more)  # type: ignore[arg-type]
