"""What the operations return: plain tuples of tensors and a few numbers."""

from typing import NamedTuple

from torch import Tensor


class Selection(NamedTuple):
    """Entries chosen from an accumulated gradient, and what the choice cost.

    Attributes:
        indices: int32 [count], strictly ascending.
        values: float32 [count], the accumulated values at `indices`.
        finite: False if any accumulated value was NaN or infinite.
        threshold: smallest magnitude selected, 0.0 if nothing was; the next step's prediction.
        candidates: entries that passed the predicted threshold, counted to 2 k at most.
        repaired: the prediction was too high, so that a second pass over the residual was needed.
    """

    indices: Tensor
    values: Tensor
    finite: bool
    threshold: float
    candidates: int
    repaired: bool


class Merged(NamedTuple):
    """The sum of two sparse vectors, and what became of every entry of each.

    Attributes:
        indices: int32 [count], strictly ascending.
        values: float32 [count].
        fate_a: int32 [count of a], position of each entry of a in the output, -1 where dropped.
        fate_b: int32 [count of b], likewise for b.
    """

    indices: Tensor
    values: Tensor
    fate_a: Tensor
    fate_b: Tensor
