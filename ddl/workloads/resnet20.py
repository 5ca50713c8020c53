"""ResNet-20 for 32x32 images (He et al. 2015, arXiv 1512.03385, section 4.2): 0.27 M parameters.

torchvision's ResNets open with a stride-2 7x7 convolution and a pooling, made for 224x224 images.
The CIFAR form opens with one 3x3 convolution and runs three stages of 16, 32 and 64 channels, three
blocks each.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (the paper's option A)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        """Random weights."""
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.stride = stride
        self.new_channels = channels_out - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """float32 [N, channels_in, h, w] -> float32 [N, channels_out, h / stride, w / stride]."""
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        out = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(out)) + shortcut)


class ResNet20(nn.Module):
    """Convolution, nine blocks, mean over the image, linear layer."""

    def __init__(self, num_classes: int = 10) -> None:
        """Random weights, fan-out normal (He et al. 2015, arXiv 1502.01852)."""
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        self.blocks = nn.Sequential(
            *(
                BasicBlock(before, after, stride=1 if before == after else 2)
                for before, after in pairwise(widths)
            )
        )
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """float32 [N, 3, h, w] -> logits, float32 [N, num_classes]."""
        out = self.blocks(relu(self.bn(self.conv(images))))
        return self.linear(torch.mean(out, dim=(2, 3)))
