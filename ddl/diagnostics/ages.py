"""Ages: how many steps ago a rank's entry of a bucket was last applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddl.diagnostics.samples import places, row_length

LARGEST_SAMPLE = 2**14  # entries of a layer that are followed


class Ages:
    """Follows a sample of each layer's entries; an entry never applied is as old as the watch."""

    def __init__(self, lengths: Sequence[int], step: int) -> None:
        """Begin to watch.

        Args:
            lengths: of the bucket's layers, in their order.
            step: the first step that is watched.
        """
        followed = [places(n, LARGEST_SAMPLE) for n in lengths]
        self._rows = torch.tensor([row_length(n, LARGEST_SAMPLE) for n in lengths])
        self._ends = torch.tensor(lengths).cumsum(0)
        self._begins = self._ends - torch.tensor(lengths)
        slots = torch.tensor([0, *map(len, followed)]).cumsum(0)
        self._slots = slots[:-1]
        self._bounds = slots.tolist()
        self._followed = torch.cat(followed)
        self._last = torch.full((self._bounds[-1],), step - 1, dtype=torch.int64)

    def applied(self, indices: Tensor, step: int) -> None:
        """Entries of the bucket, int32 [any number], were applied in a step."""
        indices = indices.long().cpu()
        layer = torch.bucketize(indices, self._ends, right=True)
        place = indices - self._begins[layer]
        slot = self._slots[layer] + place // self._rows[layer]
        self._last[slot[self._followed[slot] == place]] = step

    def applied_all(self, step: int) -> None:
        """The bucket was sent whole."""
        self._last.fill_(step)

    def of_layer(self, layer: int, step: int) -> Tensor:
        """int64 [entries followed], at the end of a step; 0: applied in that step."""
        return step - self._last[self._bounds[layer] : self._bounds[layer + 1]]
