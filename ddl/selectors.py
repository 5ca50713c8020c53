"""Selectors: which entries of scale * flat + residual this rank sends.

`select` moves what it picks out of the residual and leaves the rest in it, in one pass of
ddl.kernels. A selector belongs to one bucket; its state only makes the next selection faster.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

from torch import Tensor

from ddl import kernels
from ddl.sparse import Packet, SparseVector


class Selector(Protocol):
    """Chooses entries of one bucket, step after step."""

    def select(self, flat: Tensor, residual: Tensor, k: int, scale: float) -> Packet:
        """Split accumulated = scale * flat + residual into what is sent and what is owed.

        Args:
            flat: [numel] gradient, float32, bfloat16 or float16; unchanged.
            residual: float32 [numel]; afterwards 0 where picked, else accumulated. An entry whose
                accumulated value is not finite keeps its old residual and is never picked.
            k: entries wanted.
            scale: factor that brings `flat` to the residual's units.

        Returns:
            The picks, and whether every accumulated value was finite.
        """


class TopK:
    """The k largest magnitudes, exactly; ties to the lower index; zeros never."""

    def __init__(self) -> None:
        """Without a prediction for the first selection."""
        self._prediction = Prediction()

    def select(self, flat: Tensor, residual: Tensor, k: int, scale: float) -> Packet:
        """See `Selector.select`."""
        selection = kernels.accumulate_topk(
            flat, residual, k, scale=scale, threshold=self._prediction.threshold(k)
        )
        self._prediction.learn(k, selection)
        return _packet(selection, flat.numel())


class Prediction:
    """Next step's threshold: the last k-th magnitude, lowered until few enough candidates pass.

    Too few candidates cost a second pass over memory; too many only a longer settlement of O(k). So
    the factor falls fast and rises slowly. Counts near k scatter by sqrt(k), so small k get more
    room. After a miss the kernel is left to take a sample, which costs less than another miss. The
    constants were chosen on drifting gradients of layered scale: none but a hundredfold jump in
    scale then costs a second pass.
    """

    FEWEST_CANDIDATES, STEP_DOWN, STEP_DOWN_AFTER_MISS = 1.15, 0.02, 0.05
    MOST_CANDIDATES, STEP_UP = 1.6, 0.003
    LARGEST_REPORT = 1.9  # kernels report up to twice k
    LOWEST_FACTOR = 0.5

    def __init__(self) -> None:
        """Nothing known yet."""
        self._k = 0
        self._last = 0.0
        self._missed = False
        self._factor = 0.95

    def threshold(self, k: int) -> float | None:
        """The prediction for `k`, or None if there is no basis for one."""
        if k != self._k or self._missed or self._last == 0:
            return None
        return self._last * self._factor

    def learn(self, k: int, selection: kernels.Selection) -> None:
        """Take in the outcome of a selection of `k`."""
        if k == self._k:
            change = 0.0
            ratio = selection.candidates / max(1, k)
            scatter = 1 / math.sqrt(max(1, k))
            if selection.repaired:
                change = -self.STEP_DOWN_AFTER_MISS
            elif ratio < self.FEWEST_CANDIDATES + scatter:
                change = -self.STEP_DOWN
            elif ratio > min(self.LARGEST_REPORT, self.MOST_CANDIDATES + 2 * scatter):
                change = self.STEP_UP
            self._factor = min(1.0, max(self.LOWEST_FACTOR, self._factor + change))
        self._k = k
        self._missed = selection.repaired
        self._last = selection.threshold


class GaussianK:
    """What exceeds mean + std * ppf(1 - density/2) in magnitude; about k, always near it.

    Shi et al., arXiv 1911.08772, Algorithm 1, with counts bounded to [2/3 k, 4/3 k] on every
    distribution, which the published rule does only on bell-shaped ones.
    """

    def select(self, flat: Tensor, residual: Tensor, k: int, scale: float) -> Packet:
        """See `Selector.select`."""
        if k == flat.numel():  # everything is wanted; the rule would leave up to a third behind
            selection = kernels.accumulate_topk(flat, residual, k, scale=scale)
        else:
            selection = kernels.accumulate_gaussiank(flat, residual, k, scale=scale)
        return _packet(selection, flat.numel())


class RandomK:
    """k entries drawn uniformly, the same on every rank and others at every step.

    Attributes:
        drawn: draws so far, the same on every rank.
    """

    def __init__(self, seed: int) -> None:
        """Start a sequence of draws; give every rank the same seed, every bucket another."""
        self._seed = seed
        self.drawn = 0

    def next_seed(self) -> int:
        """The seed of one more draw, the same on every rank."""
        # Both numbers spread over all 64 bits, so that no two buckets and steps share draws.
        name = f"{self._seed} {self.drawn}".encode()
        self.drawn += 1
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")

    def select(self, flat: Tensor, residual: Tensor, k: int, scale: float) -> Packet:
        """See `Selector.select`; zeros are picked too."""
        indices = kernels.random_indices(flat.numel(), k, self.next_seed()).to(flat.device)
        return _packet(kernels.accumulate_at(flat, residual, indices, scale=scale), flat.numel())


def _packet(selection: kernels.Selection, numel: int) -> Packet:
    vector = SparseVector(selection.indices, selection.values, numel)
    return Packet(vector, selection.finite)
