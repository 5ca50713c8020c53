"""The language model of the field: embedding, LSTM layers, a linear layer over the vocabulary.

Zaremba et al. 2014, arXiv 1409.2329: dropout lies between layers, not within the recurrence. With
10,000 words the large size has 66 million parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

State = tuple[Tensor, Tensor]  # hidden and cell, each float32 [layers, N, hidden]
WEIGHT_RANGE = 0.1  # weights start uniform in +- this


@dataclass(frozen=True)
class Size:
    """A width, and the dropout that goes with it."""

    hidden: int
    dropout: float


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "tiny": Size(32, 0.0),  # for tests
        "small": Size(200, 0.2),
        "medium": Size(650, 0.5),
        "large": Size(1500, 0.65),
    }
)


class LSTMLanguageModel(nn.Module):
    """Predicts the next word, from what a stream of words has left in its state."""

    def __init__(
        self, words: int, hidden: int, dropout: float, *, layers: int = 2, tied: bool = False
    ) -> None:
        """Random weights.

        Args:
            words: size of the vocabulary.
            hidden: width of the embedding and of every layer.
            dropout: of the embedding and of every layer's output.
            layers: of the LSTM.
            tied: whether embedding and output share their weights (Press and Wolf 2016, arXiv
                1608.05859).
        """
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(words, hidden)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=between)
        self.output = nn.Linear(hidden, words)
        nn.init.uniform_(self.embedding.weight, -WEIGHT_RANGE, WEIGHT_RANGE)
        nn.init.uniform_(self.output.weight, -WEIGHT_RANGE, WEIGHT_RANGE)
        nn.init.zeros_(self.output.bias)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Go on with N streams, by T words each.

        Args:
            tokens: int64 [T, N].
            state: what the words before have left; None at the start of a stream.

        Returns:
            Logits, float32 [T, N, words], and the new state, detached: gradients end here.
        """
        outputs, (hidden, cell) = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.output(self.dropout(outputs)), (hidden.detach(), cell.detach())
