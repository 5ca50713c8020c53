"""Which of P ranks is responsible for an index; P is a power of two.

The owner of an index is the exclusive or of its digits in base P. As any P neighbours differ in
the lowest digit only, each rank owns one of them, and all shares are equal. The lowest digit alone
would do for that, but not for gradients: the weights of one input of a layer often lie a power of
two apart, and would all have the same owner.

Once the low bits of an index's owner are known, as many low bits of the index tell nothing new.
`shorten` drops them, so that the indices of a share lie as close together as those of a whole
vector do, and `lengthen` finds them again.

Indices are int32 [count], not negative: tensors on any device, or arrays.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from torch import Tensor

Indices = TypeVar("Indices", Tensor, np.ndarray)


def owners(indices: Indices, P: int) -> Indices:
    """The rank that owns each index: int32 [count], in [0, P)."""
    digits = indices
    shift = P.bit_length() - 1
    while 0 < shift < 31:  # adds one digit, then two more, then four more
        digits = digits ^ (digits >> shift)
        shift *= 2
    return digits & (P - 1)


def shorten(indices: Indices, bits: int) -> Indices:
    """Indices whose owners have the same low `bits` bits, shortened; they still ascend strictly."""
    return indices >> bits


def lengthen(shortened: Indices, bits: int, owner: int, P: int) -> Indices:
    """The indices that `shorten` has shortened.

    Args:
        shortened: what it returned.
        bits: how many bits it dropped, at most log2 P.
        owner: any rank with the low `bits` bits of the indices' owners.
        P: number of ranks.
    """
    indices = shortened << bits
    # A low bit of an index flips the same bit of its owner, and no other.
    return indices | ((owners(indices, P) ^ owner) & ((1 << bits) - 1))
