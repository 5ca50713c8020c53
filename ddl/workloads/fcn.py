"""The fully connected net of the benchmark studies: on the digits of MNIST, 14 million parameters.

784 inputs, hidden layers of 2048, 4096 and 1024, 10 classes (Shi et al. 2016, arXiv 1608.07249).
Little to compute and much to send: the opposite of a convolutional net.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

WIDTHS = (784, 2048, 4096, 1024, 10)


class FullyConnected(nn.Module):
    """Linear layers with rectifiers between them."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        """Random weights.

        Args:
            widths: of the input, the hidden layers and the output.

        Raises:
            ValueError: fewer than two widths, or one below 1.
        """
        super().__init__()
        if len(widths) < 2 or min(widths) < 1:
            raise ValueError(
                f"widths must be two or more whole numbers of 1 or more, got {tuple(widths)}; the "
                "first is that of the input, the last that of the output"
            )
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """float32 [N, ...], widths[0] numbers a sample -> float32 [N, widths[-1]]."""
        return self.layers(inputs.flatten(1))
