"""The operations on the CPU: views, buffers and order of calls; the loops are compiled by Numba.

The arguments are those of the public functions in `ddl.kernels`, already checked. Importing this
module compiles the kernels, once per machine.

An exact selection in one pass:

1. Predict the key of the k-th largest magnitude: the caller's threshold, or a small sample.
2. `collect` accumulates, on each thread over one contiguous part. What passes the prediction is
   moved to that part's candidates; a full buffer is tightened, which raises the threshold.
3. Fewer than k candidates: give them back and collect again from the residual alone, with a
   lower threshold, the last time with none.
4. Find the exact k-th key among the candidates and give the others back to the residual.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ddl.kernels import reference
from ddl.kernels.jit import compile_once
from ddl.kernels.results import Merged, Selection
from ddl.kernels.threads import split, workers

with compile_once():
    from ddl.kernels import cpu_accumulate, cpu_select, cpu_sparse

BLOCK = int(cpu_accumulate.BLOCK)
GRANULE = cpu_accumulate.CHUNK  # parts begin at its multiples, so that no two share a sum
INFINITE = int(cpu_select.INFINITE)
SLACK = 1024  # room beyond 2k candidates, so that a tiny k does not tighten all the time
SAMPLE = 1 << 17  # entries; 512 KB of keys
SAMPLE_MARGIN = 4.0  # standard deviations by which a sampled rank is lowered: too low is cheaper

_FORMS = {
    torch.float32: cpu_accumulate.FLOAT32,
    torch.bfloat16: cpu_accumulate.BFLOAT16,
    torch.float16: cpu_accumulate.FLOAT16,
}


def _key(magnitude: float) -> int:
    """Return the bits of a non-negative float32 magnitude, which order like the magnitude."""
    return int(np.array([magnitude], dtype=np.float32).view(np.int32)[0])


def _magnitude(key: int) -> float:
    return float(np.array([key], dtype=np.int32).view(np.float32)[0])


class _Accumulation:
    """The arrays of one call: where its parts begin, their candidates and their state."""

    def __init__(
        self, flat: Tensor, residual: Tensor, scale: float, k: int, moments: bool = False
    ) -> None:
        self.numel = flat.numel()
        self.k = k
        self.form = _FORMS[flat.dtype]
        bits = flat.detach()
        self.flat = (
            bits.numpy()
            if self.form == cpu_accumulate.FLOAT32
            else bits.view(torch.int16).numpy().view(np.uint16)
        )
        self.residual = residual.detach().numpy()
        self.scale = np.float32(scale)
        self.parts = split(self.numel, GRANULE, workers.count)
        longest = max(hi - lo for lo, hi in self.parts)
        self.room = (min(longest, 2 * k + SLACK) if k else 0) + BLOCK
        self.indices = np.empty(len(self.parts) * self.room, np.int32)
        self.values = np.empty(len(self.parts) * self.room, np.float32)
        self.state = np.zeros((len(self.parts), cpu_accumulate.STATE_SIZE), np.int64)
        self.poisoned = np.empty(0, np.uint64)
        chunks = -(-self.numel // cpu_accumulate.CHUNK) if moments else 0
        self.sums = np.zeros((chunks, 2), np.float64)
        self.count = 0  # candidates, once gathered

    @property
    def nonfinite(self) -> int:
        """Number of accumulated values that are not finite."""
        return int(self.state[:, cpu_accumulate.STATE_NONFINITE].sum())

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
        cpu_accumulate.sample(self.flat, self.residual, self.scale, self.form, fresh, keys)
        key, _ = cpu_select.kth_largest(keys, 0, size, rank)
        return max(1, key)

    def collect(self, least: int, fresh: bool) -> int:
        """Run one pass and gather the candidates; return how many entries ever were."""
        state = self.state
        for part, (lo, _) in enumerate(self.parts):
            state[part, cpu_accumulate.STATE_POSITION] = lo
            state[part, cpu_accumulate.STATE_COUNT] = 0
            state[part, cpu_accumulate.STATE_LEAST] = least
            state[part, cpu_accumulate.STATE_PASSED] = 0
        stopped = [False] * len(self.parts)

        def run(part: int) -> None:
            stopped[part] = cpu_accumulate.collect(
                self.flat,
                self.residual,
                self.parts[part][1],
                self.scale,
                self.form,
                fresh,
                self.k,
                self.indices,
                self.values,
                part * self.room,
                self.room,
                self.poisoned,
                self.sums if fresh else self.sums[:0],
                state[part],
            )

        workers.run(run, len(self.parts))
        if any(stopped):
            # Finished parts have nothing left to do and return at once.
            self.poisoned = np.zeros(-(-self.numel // BLOCK), np.uint64)
            workers.run(run, len(self.parts))
        self._gather()
        return int(state[:, cpu_accumulate.STATE_PASSED].sum())

    def _gather(self) -> None:
        """Move the parts' candidates together; their order is that of the index."""
        self.count = 0
        for part in range(len(self.parts)):
            count = int(self.state[part, cpu_accumulate.STATE_COUNT])
            first, to = part * self.room, self.count
            if first != to:
                self.indices[to : to + count] = self.indices[first : first + count]
                self.values[to : to + count] = self.values[first : first + count]
            self.count += count

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

    def give_all_back(self) -> None:
        """Return every candidate to the residual, where there is a 0 in its place."""
        cpu_sparse.put(
            self.residual.view(np.int32),
            self.indices[: self.count],
            self.values.view(np.int32)[: self.count],
        )

    def give_all_back_and_resample(self, key: int) -> int:
        """Return every candidate to the residual and predict anew from there."""
        self.give_all_back()
        return max(1, min(self.sampled_key(fresh=False), key - 1))

    def kth(self, k: int) -> tuple[int, int]:
        """Return the cutoff key that leaves k candidates, and how many ties with it to keep."""
        if self.count <= k or k == 0:
            return (0, 0) if k else (INFINITE, 0)
        return cpu_select.kth_largest(self.values.view(np.int32), 0, self.count, k)

    def settle(
        self, cutoff: int, ties: int, count: int, candidates: int, repaired: bool
    ) -> Selection:
        """Output the `count` candidates above the cutoff, give the others back."""
        indices = torch.empty(count, dtype=torch.int32)
        values = torch.empty(count, dtype=torch.float32)
        least = cpu_select.settle(
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
            indices, values, self.nonfinite == 0, _magnitude(least), candidates, repaired
        )


def accumulate_topk(
    flat: Tensor, residual: Tensor, k: int, scale: float, threshold: float
) -> Selection:
    """See `ddl.kernels.accumulate_topk`."""
    work = _Accumulation(flat, residual, scale, k)
    key = _key(threshold) if threshold > 0 and k > 0 else work.sampled_key(fresh=True)
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
        with np.errstate(over="ignore"):
            return _key(max(cutoff, 0.0)) + 1

    def count_above(cutoff: float) -> int:
        return cpu_select.count_from(work.values, work.count, least_key(cutoff))

    cutoff = None
    finite_count = flat.numel() - work.nonfinite
    if k > 0 and finite_count > 0:
        total, squares = work.sums.sum(axis=0).tolist()
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
    cpu_accumulate.take(work.residual, indices.numpy(), work.poisoned, values.numpy())
    threshold = float(values.abs().min()) if values.numel() else 0.0
    return Selection(
        indices.clone(), values, work.nonfinite == 0, threshold, indices.numel(), False
    )


def random_indices(numel: int, k: int, seed: int, device: torch.device) -> Tensor:
    """See `ddl.kernels.random_indices`."""
    numbers = np.empty(k, np.int32)
    keys = np.array(reference.round_keys(seed), np.uint64)
    cpu_sparse.permute(numel, reference.half_bits(numel), keys, numbers)
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
    count = cpu_sparse.join(
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
    cpu_sparse.ranks(values.numpy(), count, keys)
    # Keys of non-finite sums are INFINITE: a cutoff above that keeps nothing.
    cutoff, ties = cpu_select.kth_largest(keys, 0, count, k) if k else (INFINITE + 1, 0)
    kept_indices = torch.empty(k, dtype=torch.int32)
    kept_values = torch.empty(k, dtype=torch.float32)
    cpu_sparse.keep(
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
    cpu_sparse.put(dense.detach().view(bits).numpy(), indices.numpy(), entries.view(bits).numpy())


def give_back(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """See `ddl.kernels.give_back`."""
    cpu_sparse.add(residual.detach().numpy(), indices.numpy(), values.detach().numpy())
