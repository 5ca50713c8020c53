"""Networks of VGG's kind (Simonyan and Zisserman 2014, arXiv 1409.1556) for small images."""

from torch import Tensor, nn

VGG16_BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # convolutions, channels


class SmallVGG(nn.Module):
    """Three pairs of 3x3 convolutions, each pair halving the image, then two linear layers.

    Its sparsified gradients behave unlike a ResNet's: most of the parameters lie in one linear
    layer, and nothing normalises activations.
    """

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


class VGG16(nn.Module):
    """VGG-16 as it is trained on CIFAR-10: 14.7 million parameters.

    The convolutions of configuration D (Table 1), each with batch norm, and one linear layer in
    place of three, since five halvings leave one pixel of a 32x32 image.
    """

    def __init__(self, num_classes: int = 10) -> None:
        """Random weights; `num_classes` is the length of the output."""
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for convolutions, width in VGG16_BLOCKS:
            for _ in range(convolutions):
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """float32 [N, 3, size, size] -> logits, float32 [N, num_classes]; size from 32 to 63."""
        return self.classifier(self.features(images).flatten(1))
