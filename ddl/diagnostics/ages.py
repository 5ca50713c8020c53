"""Ages: how many steps ago an entry of a bucket was last applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST_SAMPLE = 2**14  # entries of a layer that are followed; every so-manyth


class Ages:
    """Follows a sample of each layer's entries; an entry never applied is as old as the watch."""

    def __init__(self, lengths: Sequence[int], step: int) -> None:
        """Begin to watch.

        Args:
            lengths: of the bucket's layers, in their order.
            step: the first step that is watched.
        """
        # Odd strides, so that they do not fall in step with the even sizes of layers.
        strides = [1 if n <= LARGEST_SAMPLE else -(-n // LARGEST_SAMPLE) | 1 for n in lengths]
        followed = [-(-n // stride) for n, stride in zip(lengths, strides, strict=True)]
        ends = torch.tensor(lengths).cumsum(0)
        self._ends = ends
        self._begins = ends - torch.tensor(lengths)
        self._strides = torch.tensor(strides)
        slots = torch.tensor([0, *followed]).cumsum(0)
        self._slots = slots[:-1]
        self._bounds = slots.tolist()
        self._numel = int(ends[-1])
        self._last = torch.full((self._bounds[-1],), step - 1, dtype=torch.int64)

    def applied(self, indices: Tensor, step: int) -> None:
        """Entries of the bucket, int32 [any number], were applied in a step."""
        indices = indices.long().cpu()
        layer = torch.bucketize(indices, self._ends, right=True)
        place, stride = indices - self._begins[layer], self._strides[layer]
        followed = place % stride == 0
        self._last[(self._slots[layer] + place // stride)[followed]] = step

    def applied_all(self, step: int) -> None:
        """The bucket was sent whole."""
        self._last.fill_(step)

    def of_layer(self, layer: int, step: int) -> Tensor:
        """int64 [entries followed], at the end of a step; 0: applied in that step."""
        return step - self._last[self._bounds[layer] : self._bounds[layer + 1]]
