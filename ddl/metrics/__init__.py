"""What steps cost and moved: one step, one bucket of it, and all steps of a run so far.

`summary(optimizer)` answers where the time goes: selection, wire or wait?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddl.aggregation.aggregator import Outcome

Span = tuple[float, float]  # begin and end, on the clock time.perf_counter

SLOWEST = 5  # buckets that a printed summary names


@dataclass(frozen=True)
class BucketMetrics:
    """One bucket in one step of one rank.

    Attributes:
        index: place in the order of launches.
        name: first and last parameter in it.
        numel: entries.
        bytes_dense: bytes a dense ring all-reduce sends for it, on average over ranks.
        outcome: what was selected and sent, and when.
        waited: when the main thread waited for this bucket, after those before it.
        applied: when the gradient became the average, or was given up.
    """

    index: int
    name: str
    numel: int
    bytes_dense: int
    outcome: Outcome
    waited: Span
    applied: Span

    @property
    def picked(self) -> int:
        """Entries this rank selected."""
        return self.outcome.picked

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sent."""
        return self.outcome.bytes_sent

    @property
    def select_seconds(self) -> float:
        """Time on the background thread, accumulating and selecting."""
        return self.outcome.select_seconds

    @property
    def communicate_seconds(self) -> float:
        """Time on the background thread, on the wire or waiting for other ranks."""
        return self.outcome.ended - self.outcome.started

    @property
    def wait_seconds(self) -> float:
        """How long the main thread waited."""
        return self.waited[1] - self.waited[0]

    @property
    def apply_seconds(self) -> float:
        """How long it took to make the gradient the average."""
        return self.applied[1] - self.applied[0]


@dataclass(frozen=True)
class StepMetrics:
    """One step of one rank.

    Attributes:
        step: aggregations before this one.
        finite: whether the step was taken; False where a gradient of any rank was not finite.
        select_seconds: selecting, summed over buckets (on the background thread).
        communicate_seconds: aggregating, summed over buckets (on the background thread).
        wait_seconds: how long the main thread waited for both.
        bytes_sent: bytes this rank sent.
        bytes_dense: bytes it would have sent, on average, in dense ring all-reduces.
        density_actual: entries selected / parameters.
        overlap_fraction: share of the communication time, the last bucket's left out, that
            passed before the backward pass ended; 0 with a single bucket.
        residual_norm: Euclidean norm of all residuals of this rank.
        buckets: the same, bucket by bucket, in the order of launches.
    """

    step: int
    finite: bool
    select_seconds: float
    communicate_seconds: float
    wait_seconds: float
    bytes_sent: int
    bytes_dense: int
    density_actual: float
    overlap_fraction: float
    residual_norm: float
    buckets: tuple[BucketMetrics, ...] = ()

    @classmethod
    def of(
        cls,
        step: int,
        buckets: Sequence[BucketMetrics],
        backward_ended: float,
        residual_norm: float,
    ) -> StepMetrics:
        """Sums over buckets.

        Args:
            step: see the attribute.
            buckets: all of them, in the order of launches.
            backward_ended: clock (time.perf_counter) at the last gradient.
            residual_norm: see the attribute.
        """
        outcomes = [bucket.outcome for bucket in buckets]
        return cls(
            step=step,
            finite=all(outcome.finite for outcome in outcomes),
            select_seconds=sum(bucket.select_seconds for bucket in buckets),
            communicate_seconds=sum(bucket.communicate_seconds for bucket in buckets),
            wait_seconds=sum(bucket.wait_seconds for bucket in buckets),
            bytes_sent=sum(bucket.bytes_sent for bucket in buckets),
            bytes_dense=sum(bucket.bytes_dense for bucket in buckets),
            density_actual=_share(sum(b.picked for b in buckets), sum(b.numel for b in buckets)),
            overlap_fraction=overlap_fraction(outcomes, backward_ended),
            residual_norm=residual_norm,
            buckets=tuple(buckets),
        )

    @property
    def ratio(self) -> float:
        """bytes_sent / bytes_dense; 0 where nothing needs to be sent."""
        return _share(self.bytes_sent, self.bytes_dense)

    def as_dict(self) -> dict[str, float]:
        """Under the names of the metrics log."""
        return {
            "time/select": self.select_seconds,
            "time/communicate": self.communicate_seconds,
            "time/wait": self.wait_seconds,
            "comm/bytes_sent": self.bytes_sent,
            "comm/bytes_dense": self.bytes_dense,
            "comm/ratio": self.ratio,
            "comm/density_actual": self.density_actual,
            "comm/overlap_fraction": self.overlap_fraction,
            "residual/norm": self.residual_norm,
        }

    def by_bucket(self) -> dict[str, list[float]]:
        """A list for each quantity, with a number for each bucket; seconds to the microsecond."""
        return {
            "bucket/numel": [b.numel for b in self.buckets],
            "bucket/picked": [b.picked for b in self.buckets],
            "bucket/bytes_sent": [b.bytes_sent for b in self.buckets],
            "bucket/select": [round(b.select_seconds, 6) for b in self.buckets],
            "bucket/communicate": [round(b.communicate_seconds, 6) for b in self.buckets],
            "bucket/wait": [round(b.wait_seconds, 6) for b in self.buckets],
        }


def overlap_fraction(outcomes: Sequence[Outcome], backward_ended: float) -> float:
    """Share of the communication time, the last bucket's left out, before `backward_ended`.

    Args:
        outcomes: in the order of launches.
        backward_ended: clock (time.perf_counter) at the last gradient.
    """
    spans = [(outcome.started, outcome.ended) for outcome in outcomes[:-1]]
    total = math.fsum(ended - started for started, ended in spans)
    hidden = math.fsum(max(0.0, min(ended, backward_ended) - started) for started, ended in spans)
    return _share(hidden, total)


# All steps so far.


@dataclass
class Totals:
    """Sums over the steps of a rank, of one bucket or of all of them.

    Attributes:
        steps: aggregations that were counted, those of skipped steps included.
        numel: entries, summed over steps; so are all that follow.
        picked: entries this rank selected.
        bytes_sent: bytes this rank sent.
        bytes_dense: bytes it would have sent, on average, in dense ring all-reduces.
        select_seconds: see `BucketMetrics`, as for those below.
    """

    steps: int = 0
    numel: int = 0
    picked: int = 0
    bytes_sent: int = 0
    bytes_dense: int = 0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    wait_seconds: float = 0.0
    apply_seconds: float = 0.0

    def add(self, bucket: BucketMetrics) -> None:
        """Count one bucket of one step; `steps` is the caller's."""
        self.numel += bucket.numel
        self.picked += bucket.picked
        self.bytes_sent += bucket.bytes_sent
        self.bytes_dense += bucket.bytes_dense
        self.select_seconds += bucket.select_seconds
        self.communicate_seconds += bucket.communicate_seconds
        self.wait_seconds += bucket.wait_seconds
        self.apply_seconds += bucket.apply_seconds

    @property
    def ratio(self) -> float:
        """bytes_sent / bytes_dense; 0 where nothing needs to be sent."""
        return _share(self.bytes_sent, self.bytes_dense)

    @property
    def density_actual(self) -> float:
        """Entries selected / entries."""
        return _share(self.picked, self.numel)

    @property
    def exposed_fraction(self) -> float:
        """Share of the time of selecting and communicating for which the main thread waited."""
        return min(1.0, _share(self.wait_seconds, self.select_seconds + self.communicate_seconds))


@dataclass
class RunTotals:
    """Running sums of one optimizer on one rank, kept by whatever aggregates its gradients."""

    all: Totals = field(default_factory=Totals)
    skipped: int = 0
    discarded: int = 0
    # DDP and new parameters may change the buckets of a run: these are known by what is in them.
    by_bucket: dict[tuple[str, int], Totals] = field(default_factory=dict)

    def add(
        self, buckets: Sequence[BucketMetrics], *, finite: bool = True, kept: bool = True
    ) -> None:
        """Count a step.

        Args:
            buckets: what happened to each.
            finite: whether the step could be taken.
            kept: False for gradients that were given up while under way; their time passed, too.
        """
        self.all.steps += kept
        self.skipped += not finite
        self.discarded += not kept
        for bucket in buckets:
            totals = self.by_bucket.setdefault((bucket.name, bucket.numel), Totals())
            totals.steps += kept
            totals.add(bucket)
            self.all.add(bucket)


@dataclass(frozen=True)
class Summary:
    """Where the time of one optimizer went, on this rank, in all steps so far.

    The first step is among them, which may also compile, allocate and start threads.

    Attributes:
        all: sums over steps and buckets.
        skipped: steps skipped because a gradient was not finite.
        discarded: gradients given up while under way, as by `zero_grad()`; what they cost counts.
        buckets: sums over steps of each bucket, by its name, the slowest first.
    """

    all: Totals
    skipped: int
    discarded: int
    buckets: tuple[tuple[str, Totals], ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and texts, for JSON: means over steps, and every bucket."""
        return {
            **_means(self.all),
            "skipped": self.skipped,
            "discarded": self.discarded,
            "exposed_fraction": self.all.exposed_fraction,
            "ratio": self.all.ratio,
            "density_actual": self.all.density_actual,
            "buckets": [{"name": name, **_means(totals)} for name, totals in self.buckets],
        }

    def __str__(self) -> str:
        """A table, times in milliseconds a step."""
        every = self.all
        lines = [
            f"{every.steps} steps, {self.skipped} skipped, {self.discarded} discarded; "
            "a step on this rank, on average:",
            f"  select      {_ms(every.select_seconds, every.steps)} ms  in the background",
            f"  communicate {_ms(every.communicate_seconds, every.steps)} ms  in the background",
            f"  wait        {_ms(every.wait_seconds, every.steps)} ms  "
            f"exposed: {every.exposed_fraction:.0%} of both",
            f"  apply       {_ms(every.apply_seconds, every.steps)} ms",
            f"  sent        {_mb(every.bytes_sent, every.steps)} MB  "
            f"{every.ratio:.2%} of a dense all-reduce's, density {every.density_actual:.3g}",
            "  select communicate      wait   entries  slowest buckets",
        ]
        for name, totals in self.buckets[:SLOWEST]:
            times = (totals.select_seconds, totals.communicate_seconds, totals.wait_seconds)
            select, communicate, wait = (_ms(seconds, totals.steps) for seconds in times)
            numel = totals.numel // max(1, totals.steps)
            lines.append(f"{select}  {communicate}  {wait} {numel:9d}  {name}")
        if len(self.buckets) > SLOWEST:
            lines.append(f"  and {len(self.buckets) - SLOWEST} more")
        return "\n".join(lines)


def summary(source: Any) -> Summary:
    """Where the time went in all steps so far, on this rank. Costs no pass over the residuals.

    Args:
        source: a `ddl.DistributedOptimizer` or a `ddl.SparseHookState`.

    Raises:
        ValueError: something else.
    """
    totals = getattr(source, "totals", None)
    if not isinstance(totals, RunTotals):
        raise ValueError(
            "summary expects a ddl.DistributedOptimizer or a ddl.SparseHookState, got "
            f"{type(source).__name__}; pass what aggregates the gradients"
        )
    buckets = [(name, replace(each)) for (name, _), each in totals.by_bucket.items()]
    buckets.sort(key=lambda item: -(item[1].select_seconds + item[1].communicate_seconds))
    return Summary(replace(totals.all), totals.skipped, totals.discarded, tuple(buckets))


def _means(totals: Totals) -> dict[str, float]:
    steps = max(1, totals.steps)
    sums = {name: value for name, value in asdict(totals).items() if name != "steps"}
    return {"steps": totals.steps, **{name: value / steps for name, value in sums.items()}}


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _ms(seconds: float, steps: int) -> str:
    return f"{1e3 * seconds / max(1, steps):8.2f}"


def _mb(sent: int, steps: int) -> str:
    return f"{1e-6 * sent / max(1, steps):8.3f}"
