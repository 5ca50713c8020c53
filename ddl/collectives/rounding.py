"""What a rounding wire leaves out of a message, and which rank owes it.

One rank sends a vector, or several send copies of the same vector: exactly one of them owes what
the format rounded away, and only for those entries that end up in the result. An entry that does
not is owed whole by the ranks that picked it, as if it had never been sent.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ddl.sparse import SparseVector
from ddl.wires import WireFormat


class Rounded(NamedTuple):
    """A vector before it is sent.

    Attributes:
        vector: what arrives; its indices are those of the vector before.
        lost: float32 [count], what each entry lacks; None where the format is exact.
    """

    vector: SparseVector
    lost: Tensor | None

    def owed(self, reached: Tensor) -> tuple[SparseVector, ...]:
        """What the sender owes: at most one vector, none if nothing was lost.

        Args:
            reached: bool [count], which of the entries are in the result and this rank's to owe.
        """
        if self.lost is None:
            return ()
        lacking = SparseVector(self.vector.indices, self.lost, self.vector.numel)
        return (lacking.where(reached & (self.lost != 0)),)


def round_off(vector: SparseVector, wire: WireFormat) -> Rounded:
    """Round a vector to what a wire can carry."""
    if wire.exact:
        return Rounded(vector, None)
    arriving = wire.rounded(vector)
    lost = vector.values - arriving.values
    if not math.isfinite(float(lost.sum())):
        # What is not finite travels as it is; inf - inf would be a gradient of NaN.
        lost = torch.nan_to_num(lost, nan=0.0, posinf=0.0, neginf=0.0)
    return Rounded(arriving, lost)
