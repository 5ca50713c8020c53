"""Looks into every sparse bucket of one rank, at some of the steps."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddl.aggregation.aggregator import Observation
from ddl.diagnostics.ages import Ages
from ddl.diagnostics.bells import bell_of
from ddl.diagnostics.output import Output
from ddl.diagnostics.plots import plot
from ddl.diagnostics.statistics import contraction, gaussian_count, norm_of, shape_of
from ddl.optimizer import DistributedOptimizer
from ddl.reduction.buckets import Bucket

logger = logging.getLogger(__name__)

AGE_QUANTILES = (0.5, 0.9, 0.99)


class Diagnostics:
    """Records what sparsification does to each layer, on this rank.

        diagnostics = ddl.diagnostics.Diagnostics(optimizer, every=50, directory="run/diagnostics")

    From then on each sampled step appends a line per layer to `diagnostics.jsonl`, and histograms
    and curves to TensorBoard where that is installed; `close()` draws `diagnostics.png` where
    matplotlib is. Training is not changed by a bit. Ranks are independent: watch one of them, or
    each with a directory of its own. A line holds

    * `step` (as in `optimizer.metrics`), `bucket` (its number; entries are selected from a bucket
      as a whole), `layer` (the parameter), `numel`, `picked`, `density` (picked / numel);
    * `included` (the share of the picks that the average contains) and `overlap` (the share of the
      picks whose index the average contains, from whichever rank: of the local top-k, what is in
      the global one); null where nothing was picked;
    * `contraction`, `bound_random`, `bound_topk`: see `statistics.Contraction`, of this layer's
      part of the accumulated values and of those picked from it;
    * `dip`, `bell_shaped`: see `bells.Bell`, of the accumulated values; whether `bound_topk`
      is promised for them;
    * `gaussian_count`: entries beyond the threshold that would select `picked` of normal values;
    * `gradient`, `accumulated`: see `statistics.Shape`, both in the units of the unscaled gradient;
    * `residual_norm`: Euclidean norm of what the rank owes after the step, before rounding errors
      of a compact wire; 0 without error feedback;
    * `age`: steps since this rank's part of an entry was last applied: the rank picked it, and the
      average contained it. Over a sample of the layer's entries: quantiles `median`, `p90`, `p99`,
      `max`, the `mean`, and `never`, the share never applied since the watch began; those are as
      old as the watch.

    With `whole_buckets` each bucket gets a line as well, whose `layer` and `age` are null; a sample
    then costs twice as much.

    Each step costs a pass over the picks; a sampled one a few over bucket and residual, on the
    engine's background thread: less than a second of one core for a ResNet-50, and 200 KB of
    lines and as much of events. Kept are at most 16,384 numbers a layer. A step that was skipped,
    as where gradients are not finite, is not recorded, nor is a bucket in a step that sent it
    whole. A watch that fails, as on a full disk, ends with a warning; training goes on.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        *,
        every: int = 50,
        directory: str | os.PathLike[str],
        whole_buckets: bool = False,
    ) -> None:
        """Begin to watch.

        Args:
            optimizer: between two steps; of a run that is resumed, after `load_checkpoint`.
            every: steps from one sample to the next.
            directory: for the files; is made if it is missing. What another run has left in it of
                this step and later ones is replaced.
            whole_buckets: whether to record each bucket as a whole, too: entries are selected from
                it, and so it is what theorems about a selection speak of.

        Raises:
            ValueError: nothing is sparsified on this rank in a way that can be watched, or it is
                watched already.
            OSError: the directory cannot be written.
        """
        if not isinstance(optimizer, DistributedOptimizer):
            raise ValueError(
                f"diagnostics watch a ddl.DistributedOptimizer, got {type(optimizer).__name__}; "
                "wrap it first"
            )
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"every must be an integer of at least 1, got {every!r}; it is a number of steps"
            )
        self._optimizer = optimizer
        self._every, self._whole_buckets = every, whole_buckets
        self._watched: list[_WatchedBucket] = []
        self._closed = self._failed = False
        self._find_buckets()
        if not self._watched:
            raise ValueError(
                "diagnostics found no bucket to watch, expected sparse ones, aggregated in one "
                "level and through host memory; use another compressor than none, or "
                "hierarchical=False"
            )
        self._directory = Path(directory)
        try:
            self._output = Output(self._directory, optimizer.reducer.step)
        except BaseException:
            self._look_away()
            raise
        self._taken = optimizer.reducer.taken
        self._hook = optimizer.register_step_post_hook(lambda *_: self._after_step())

    def close(self) -> None:
        """Look away, close the files and draw the picture; once is enough."""
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        self._look_away()
        try:
            self._output.close()
            plot(self._directory)
        except (ImportError, ValueError):  # no matplotlib, or no step was sampled
            pass
        except OSError as error:
            logger.warning("diagnostics in %s are not complete: %s", self._directory, error)

    def _look_away(self) -> None:
        for bucket in self._watched:
            bucket.release()
        self._watched = []

    def _find_buckets(self) -> None:
        """Watch the buckets that the optimizer has now: it may have made others."""
        known = {id(watched.aggregator): watched for watched in self._watched}
        self._watched = []
        for bucket, aggregator in self._optimizer.reducer.owing:
            watched = known.pop(id(aggregator), None)
            if watched is None and hasattr(aggregator, "observer"):
                watched = _WatchedBucket(
                    bucket, aggregator, self._optimizer, self._every, self._whole_buckets
                )
            if watched is not None:
                self._watched.append(watched)
        for left in known.values():
            left.release()

    def _after_step(self) -> None:
        if self._failed:
            return
        try:
            self._write_step()
        except Exception as error:  # whatever it is, training must not end by it
            self._failed = True
            self._look_away()
            logger.warning(
                "diagnostics end after step %d, training goes on: %r",
                self._optimizer.reducer.step - 1,
                error,
            )

    def _write_step(self) -> None:
        reducer = self._optimizer.reducer
        taken, self._taken = self._taken, reducer.taken
        for bucket in self._watched:
            if self._taken != taken:
                for record in bucket.end_step(reducer.step - 1):
                    self._output.write(record)
            bucket.forget()
        self._find_buckets()


class _WatchedBucket:
    """One bucket; `begin` of its aggregator is seen on the background thread.

    Attributes:
        aggregator: of the bucket.
    """

    def __init__(
        self,
        bucket: Bucket,
        aggregator: Any,
        optimizer: DistributedOptimizer,
        every: int,
        whole: bool,
    ) -> None:
        self._bucket, self.aggregator, self._whole = bucket, aggregator, whole
        self._reducer, self._every = optimizer.reducer, every
        lengths = [member.parameter.numel() for member in bucket.members]
        self._bounds = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
        self._ages = Ages(lengths, self._reducer.step)
        self._began = self._reducer.step
        if aggregator.observer is not None:
            raise ValueError(
                f"{bucket} is watched already, expected one watch of an optimizer; close the other "
                "Diagnostics first"
            )
        aggregator.observer = self._observe
        self.forget()

    def release(self) -> None:
        """Look away."""
        self.aggregator.observer = None

    def forget(self) -> None:
        """What was seen belongs to a step that is over."""
        self._seen_step = -1
        self._included: Tensor | None = None
        self._records: list[tuple[int | None, dict[str, Any]]] = []
        self._failure: Exception | None = None

    def end_step(self, step: int) -> Iterator[dict[str, Any]]:
        """The gradients of a step were applied: what was seen of it, if it is sampled.

        Raises:
            Exception: whatever went wrong when it was looked at.
        """
        if self._failure is not None:
            raise self._failure
        if self._seen_step != step or self._included is None:
            self._ages.applied_all(step)
            return
        self._ages.applied(self._included, step)
        for place, record in self._records:
            yield {**record, "age": None if place is None else self._age(place, step)}

    def _observe(self, seen: Observation) -> None:
        self.forget()  # of gradients that were discarded
        self._seen_step = self._reducer.step
        try:
            self._look(seen)
        except Exception as error:  # raised in `end_step`, where it does no harm
            self._failure = error

    def _look(self, seen: Observation) -> None:
        picks, included = seen.picks, seen.collected.included
        self._included = picks.indices[included]
        if self._reducer.step % self._every or not seen.collected.finite:
            return
        in_total = torch.isin(picks.indices, seen.collected.total.indices)
        bounds = torch.tensor(self._bounds, device=picks.indices.device, dtype=torch.int32)
        cuts = torch.searchsorted(picks.indices, bounds).tolist()
        for place, (low, high) in enumerate(pairwise(cuts)):
            if self._bounds[place] == self._bounds[place + 1]:
                continue  # a parameter without entries
            mine = slice(low, high)
            record = self._describe(place, seen, mine, included[mine], in_total[mine])
            self._records.append((place, record))
        if self._whole:
            everything = slice(0, picks.count)
            record = self._describe(None, seen, everything, included, in_total)
            self._records.append((None, record))

    def _describe(
        self, place: int | None, seen: Observation, mine: slice, included: Tensor, in_total: Tensor
    ) -> dict[str, Any]:
        """One layer, or the whole bucket; `mine` are its picks."""
        begin, end = (0, self._bounds[-1]) if place is None else self._bounds[place : place + 2]
        residual, gradient = seen.residual[begin:end], seen.flat[begin:end]
        values, picked = seen.picks.values[mine], mine.stop - mine.start
        norm_left = norm_of(residual)
        norm_dropped = norm_of(values[~included])
        owes = self.aggregator.residual is not None
        accumulated = residual.clone()
        accumulated[seen.picks.indices[mine].long() - begin] = values
        shape, bell, numel = shape_of(accumulated), bell_of(accumulated), residual.numel()
        measured = contraction(norm_left, shape.norm, picked, numel)
        return {
            "step": self._reducer.step,
            "bucket": self._bucket.index,
            "layer": None if place is None else self._bucket.members[place].name,
            "numel": numel,
            "picked": picked,
            "density": picked / numel,
            "included": float(included.float().mean()) if picked else math.nan,
            "overlap": float(in_total.float().mean()) if picked else math.nan,
            "contraction": measured.left,
            "bound_random": measured.bound_random,
            "bound_topk": measured.bound_topk,
            "dip": bell.dip,
            "bell_shaped": bell.shaped,
            "gaussian_count": gaussian_count(accumulated, shape.norm, picked),
            "gradient": vars(shape_of(gradient.float() / seen.loss_scale)),
            "accumulated": vars(shape),
            "residual_norm": math.hypot(norm_left, norm_dropped) if owes else 0.0,
        }

    def _age(self, place: int, step: int) -> dict[str, float]:
        ages = self._ages.of_layer(place, step)
        median, p90, p99 = torch.quantile(
            ages.double(), torch.tensor(AGE_QUANTILES, dtype=torch.float64)
        ).tolist()
        return {
            "median": median,
            "p90": p90,
            "p99": p99,
            "max": float(ages.max()),
            "mean": float(ages.double().mean()),
            "never": float((ages == step - self._began + 1).double().mean()),
        }
