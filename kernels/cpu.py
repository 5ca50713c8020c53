"""The operations on the CPU: views, buffers and order of calls, around compiled loops.

The arguments are those of the public functions in `ddl.kernels`, already checked. The loops are
native (native.py) where a compiler was found at installation, otherwise Numba's: then importing
this module compiles them, once per machine.

An exact selection in one pass:

1. Predict the key of the k-th largest magnitude: the caller's threshold, or a small sample.
2. `collect` accumulates: each thread takes contiguous pieces, ascending, until none is left. What
   passes the prediction is moved to the thread's candidates; a full buffer is tightened, which
   raises the threshold. Put together by index they are the same for any number of threads.
3. Fewer than k candidates: give them back and collect again from the residual alone, with a
   lower threshold, the last time with none.
4. Find the exact k-th key among the candidates and give the others back to the residual.
"""

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddl.kernels import cpu_layout as layout
from ddl.kernels import native, reference
from ddl.kernels.cpu_layout import BLOCK
from ddl.kernels.keys import INFINITE, key_of, magnitude_of
from ddl.kernels.results import Merged, Selection
from ddl.kernels.threads import split, workers


def _compiled_loops() -> Any:
    """Return the loops to use: `native.Loops` or the module `numba_loops`, which are alike."""
    loops = native.load()
    if loops is not None:
        return loops
    from ddl.kernels import numba_loops  # compiles, or loads from the cache

    return numba_loops


loops = _compiled_loops()

GRANULE = layout.CHUNK  # pieces begin at its multiples, so that no two share a sum
SLACK = 1024  # room beyond 2k candidates, so that a tiny k does not tighten all the time
SAMPLE = 1 << 17  # entries; 512 KB of keys
SAMPLE_MARGIN = 4.0  # standard deviations by which a sampled rank is lowered: too low is cheaper

_FORMS = {
    torch.float32: layout.FLOAT32,
    torch.bfloat16: layout.BFLOAT16,
    torch.float16: layout.FLOAT16,
}


class _Accumulation:
    """The arrays of one call: its pieces, the threads' candidates and their state."""

    def __init__(
        self, flat: Tensor, residual: Tensor, scale: float, k: int, moments: bool = False
    ) -> None:
        self.numel = flat.numel()
        self.k = k
        self.form = _FORMS[flat.dtype]
        bits = flat.detach()
        self.flat = (
            bits.numpy()
            if self.form == layout.FLOAT32
            else bits.view(torch.int16).numpy().view(np.uint16)
        )
        self.residual = residual.detach().numpy()
        self.scale = np.float32(scale)
        self.pieces = split(self.numel, GRANULE, workers.count)
        self.threads = min(workers.count, len(self.pieces))
        self.room = (min(self.numel, 2 * k + SLACK) if k else 0) + BLOCK
        self.buffers = [
            (np.empty(self.room, np.int32), np.empty(self.room, np.float32))
            for _ in range(self.threads)
        ]
        self.state = np.zeros((self.threads, layout.STATE_SIZE), np.int64)
        self.poisoned = np.empty(0, np.uint64)
        chunks = -(-self.numel // layout.CHUNK) if moments else 0
        self.sums = np.zeros((chunks, 2, layout.LANES), np.float64)
        # The candidates, once a pass is over; they ascend.
        self.indices, self.values = np.empty(0, np.int32), np.empty(0, np.float32)

    @property
    def nonfinite(self) -> int:
        """Number of accumulated values that are not finite."""
        return int(self.state[:, layout.STATE_NONFINITE].sum())

    def sampled_key(self, fresh: bool) -> int:
        """Predict a key that somewhat more than k entries reach; 1, any non-zero, if in doubt."""
        if self.k == 0:
            return INFINITE
        if self.numel <= 2 * self.k + SLACK:
            return 1  # all of them fit
        size = min(self.numel, SAMPLE)
        rank = self.k
        if size < self.numel:
            expected = self.k / self.numel * size
            rank = math.ceil(expected + SAMPLE_MARGIN * math.sqrt(expected)) + 1
        if rank > size:
            return 1
        keys = np.empty(size, np.int32)
        loops.sample(self.flat, self.residual, self.scale, self.form, fresh, keys)
        key, _ = loops.kth_largest(keys, 0, size, rank)
        return max(1, key)

    @property
    def count(self) -> int:
        """Number of candidates."""
        return self.indices.shape[0]

    def collect(self, least: int, fresh: bool) -> int:
        """Run one pass and gather the candidates; return how many entries ever were."""
        self.state[:, layout.STATE_COUNT] = 0
        self.state[:, layout.STATE_LEAST] = least
        self.state[:, layout.STATE_PASSED] = 0
        left = deque(range(len(self.pieces)))
        owners = [0] * len(self.pieces)
        unfinished: list[int | None] = [None] * self.threads

        def run(thread: int) -> None:
            state = self.state[thread]
            indices, values = self.buffers[thread]
            while True:
                piece = unfinished[thread]
                if piece is None:
                    try:
                        piece = left.popleft()
                    except IndexError:
                        return
                    state[layout.STATE_POSITION] = self.pieces[piece][0]
                owners[piece] = thread
                unfinished[thread] = piece
                stopped = loops.collect(
                    self.flat,
                    self.residual,
                    self.pieces[piece][1],
                    self.scale,
                    self.form,
                    fresh,
                    self.k,
                    indices,
                    values,
                    0,
                    self.room,
                    self.poisoned,
                    self.sums if fresh else self.sums[:0],
                    state,
                )
                if stopped:
                    return
                unfinished[thread] = None

        workers.run(run, self.threads)
        if any(piece is not None for piece in unfinished):
            self.poisoned = np.zeros(-(-self.numel // BLOCK), np.uint64)
            workers.run(run, self.threads)
        self._gather(owners)
        return int(self.state[:, layout.STATE_PASSED].sum())

    def _gather(self, owners: list[int]) -> None:
        """Put the threads' candidates together in the order of their indices."""
        counts = self.state[:, layout.STATE_COUNT].tolist()
        if sum(counts) > 2 * self.k + SLACK:  # never more than that twice over
            counts = [self._tightened(thread, count) for thread, count in enumerate(counts)]
        found = [
            (indices[:count], values[:count])
            for (indices, values), count in zip(self.buffers, counts, strict=True)
        ]
        if len(found) == 1:
            ((self.indices, self.values),) = found
            return
        ends = [hi for _, hi in self.pieces]
        upto = [np.searchsorted(indices, ends).tolist() for indices, _ in found]
        begin = [0] * len(found)
        slices = []
        for piece, thread in enumerate(owners):
            end = upto[thread][piece]
            slices.append((thread, slice(begin[thread], end)))
            begin[thread] = end
        self.indices = np.concatenate([found[thread][0][part] for thread, part in slices])
        self.values = np.concatenate([found[thread][1][part] for thread, part in slices])

    def _tightened(self, thread: int, count: int) -> int:
        """Leave a thread its k largest candidates at most; return their number."""
        if count <= self.k:
            return count
        indices, values = self.buffers[thread]
        cutoff, ties = loops.kth_largest(values.view(np.int32), 0, count, self.k)
        loops.settle(self.residual, indices, values, count, cutoff, ties, indices, values)
        return self.k

    def give_all_back(self) -> None:
        """Return every candidate to the residual, where there is a 0 in its place."""
        loops.put(self.residual.view(np.int32), self.indices, self.values.view(np.int32))

    def gather_largest(self, key: int) -> tuple[int, bool]:
        """Collect candidates that include the k largest, from a first prediction on.

        Returns:
            How many entries passed the prediction, and whether it was too high.
        """
        passed = self.collect(key, fresh=True)
        repaired = False
        while self.count < self.k and key > 1:
            lower = 1 if repaired else self.give_all_back_and_resample(key)
            if repaired:
                self.give_all_back()
            self.collect(lower, fresh=False)
            key, repaired = lower, True
        return passed, repaired

    def give_all_back_and_resample(self, key: int) -> int:
        """Return every candidate to the residual and predict anew from there."""
        self.give_all_back()
        return max(1, min(self.sampled_key(fresh=False), key - 1))

    def kth(self, k: int) -> tuple[int, int]:
        """Return the cutoff key that leaves k candidates, and how many ties with it to keep."""
        if self.count <= k or k == 0:
            return (0, 0) if k else (INFINITE, 0)
        return loops.kth_largest(self.values.view(np.int32), 0, self.count, k)

    def settle(
        self, cutoff: int, ties: int, count: int, candidates: int, repaired: bool
    ) -> Selection:
        """Output the `count` candidates above the cutoff, give the others back."""
        indices = torch.empty(count, dtype=torch.int32)
        values = torch.empty(count, dtype=torch.float32)
        least = loops.settle(
            self.residual,
            self.indices,
            self.values,
            self.count,
            cutoff,
            ties,
            indices.numpy(),
            values.numpy(),
        )
        return Selection(
            indices, values, self.nonfinite == 0, magnitude_of(least), candidates, repaired
        )


def accumulate_topk(
    flat: Tensor, residual: Tensor, k: int, scale: float, threshold: float
) -> Selection:
    """See `ddl.kernels.accumulate_topk`."""
    work = _Accumulation(flat, residual, scale, k)
    key = key_of(threshold) if threshold > 0 and k > 0 else work.sampled_key(fresh=True)
    passed, repaired = work.gather_largest(key)
    cutoff, ties = work.kth(k)
    count = min(work.count, k)
    return work.settle(cutoff, ties, count, min(passed, 2 * k), repaired)


def accumulate_gaussiank(flat: Tensor, residual: Tensor, k: int, scale: float) -> Selection:
    """See `ddl.kernels.accumulate_gaussiank`.

    The candidates of an exact selection of 4k/3 + 1 entries decide every evaluation of the rule:
    a cutoff that leaves more of them than 4k/3 is too low, whatever the exact count.
    """
    most = min(flat.numel(), 4 * k // 3 + 1) if k else 0
    work = _Accumulation(flat, residual, scale, most, moments=True)
    passed, repaired = work.gather_largest(work.sampled_key(fresh=True))

    def least_key(cutoff: float) -> int:
        return key_of(max(cutoff, 0.0)) + 1

    def count_above(cutoff: float) -> int:
        return loops.count_from(work.values, work.count, least_key(cutoff))

    cutoff = None
    finite_count = flat.numel() - work.nonfinite
    if k > 0 and finite_count > 0:
        total, squares = work.sums.sum(axis=(0, 2)).tolist()
        mean = total / finite_count
        std = math.sqrt(max(0.0, squares / finite_count - mean * mean))
        cutoff = reference.gaussian_cutoff(mean, std, k, flat.numel(), count_above)
    if cutoff is None:
        key, ties = work.kth(k)
        count = min(work.count, k)
    else:
        key, ties = least_key(cutoff) - 1, 0
        count = count_above(cutoff)
    return work.settle(key, ties, count, min(passed, 2 * k), repaired)


def accumulate_at(flat: Tensor, residual: Tensor, indices: Tensor, scale: float) -> Selection:
    """See `ddl.kernels.accumulate_at`."""
    work = _Accumulation(flat, residual, scale, 0)
    work.collect(INFINITE, fresh=True)
    values = torch.empty(indices.numel(), dtype=torch.float32)
    loops.take(work.residual, indices.numpy(), work.poisoned, values.numpy())
    threshold = float(values.abs().min()) if values.numel() else 0.0
    return Selection(
        indices.clone(), values, work.nonfinite == 0, threshold, indices.numel(), False
    )


def random_indices(numel: int, k: int, seed: int, device: torch.device) -> Tensor:
    """See `ddl.kernels.random_indices`."""
    numbers = np.empty(k, np.int32)
    keys = np.array(reference.round_keys(seed), np.uint64)
    loops.permute(numel, reference.half_bits(numel), keys, numbers)
    numbers.sort()
    return torch.from_numpy(numbers)


def merge(
    a_indices: Tensor, a_values: Tensor, b_indices: Tensor, b_values: Tensor, k: int | None
) -> Merged:
    """See `ddl.kernels.merge`."""
    room = a_indices.numel() + b_indices.numel()
    indices = torch.empty(room, dtype=torch.int32)
    values = torch.empty(room, dtype=torch.float32)
    fate_a, fate_b = torch.empty_like(a_indices), torch.empty_like(b_indices)
    count = loops.join(
        a_indices.numpy(),
        a_values.detach().numpy(),
        b_indices.numpy(),
        b_values.detach().numpy(),
        indices.numpy(),
        values.numpy(),
        fate_a.numpy(),
        fate_b.numpy(),
    )
    if k is None or k >= count:
        return Merged(indices[:count].clone(), values[:count].clone(), fate_a, fate_b)
    keys = np.empty(count, np.int32)
    loops.ranks(values.numpy(), count, keys)
    # Keys of non-finite sums are INFINITE: a cutoff above that keeps nothing.
    cutoff, ties = loops.kth_largest(keys, 0, count, k) if k else (INFINITE + 1, 0)
    kept_indices = torch.empty(k, dtype=torch.int32)
    kept_values = torch.empty(k, dtype=torch.float32)
    loops.keep(
        indices.numpy(),
        values.numpy(),
        keys,
        count,
        cutoff,
        ties,
        kept_indices.numpy(),
        kept_values.numpy(),
        fate_a.numpy(),
        fate_b.numpy(),
    )
    return Merged(kept_indices, kept_values, fate_a, fate_b)


def scatter(dense: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
    """See `ddl.kernels.scatter`."""
    dense.zero_()
    entries = (values.detach() * scale).to(dense.dtype)
    bits = torch.int32 if dense.dtype == torch.float32 else torch.int16
    loops.put(dense.detach().view(bits).numpy(), indices.numpy(), entries.view(bits).numpy())


def give_back(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """See `ddl.kernels.give_back`."""
    loops.add(residual.detach().numpy(), indices.numpy(), values.detach().numpy())
