"""A small network of VGG's kind (Simonyan and Zisserman 2014, arXiv 1409.1556): few, large layers.

Its sparsified gradients behave unlike a ResNet's: most of the parameters lie in one linear layer,
and nothing normalises activations.
"""

from torch import Tensor, nn


class SmallVGG(nn.Module):
    """Three pairs of 3x3 convolutions, each pair halving the image, then two linear layers."""

    def __init__(self, num_classes: int = 10, channels: int = 3, size: int = 32) -> None:
        """Random weights.

        Args:
            num_classes: length of the output.
            channels: of the images.
            size: their height and width, at least 8.
        """
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for width in (16, 32, 64):
            for _ in range(2):
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(before * (size // 8) ** 2, 512), nn.ReLU(), nn.Linear(512, num_classes)
        )
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """float32 [N, channels, size, size] -> logits, float32 [N, num_classes]."""
        return self.classifier(self.features(images).flatten(1))
