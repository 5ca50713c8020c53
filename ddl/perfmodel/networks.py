"""Networks by their layers: what each tensor weighs and works.

Every tensor that has a gradient is a layer here, as in the engine's buckets, in the order of the
forward pass: its elements, and the multiply-adds of the forward pass that use it, for one sample.
Counts follow from the architectures and are tested against torchvision where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from ddl.perfmodel.iteration import IterationProfile, LayerProfile

BACKWARD_SHARE = 2 / 3
"""Of the computing time: a backward pass multiplies twice as much as a forward pass, for the
gradients of the inputs and of the weights."""


@dataclass(frozen=True)
class Tensor:
    """A parameter tensor.

    Attributes:
        name: of the tensor.
        numel: its elements.
        macs: multiply-adds of the forward pass with it, for one sample.
    """

    name: str
    numel: int
    macs: int = 0


@dataclass(frozen=True)
class Network:
    """A network.

    Attributes:
        name: as in the papers.
        tensors: in the order of the forward pass.
        source: of the architecture.
    """

    name: str
    tensors: tuple[Tensor, ...]
    source: str

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def macs(self) -> int:
        """Multiply-adds of a forward pass, for one sample."""
        return sum(tensor.macs for tensor in self.tensors)

    def profile(self, seconds: float, batch: int = 1) -> IterationProfile:
        """An iteration of `seconds` on one worker, spread over the layers by their multiply-adds.

        A stand-in for measured layer times: it takes every multiply-add as equally fast, and
        normalisation and activations as free.

        Args:
            seconds: of forward and backward pass together.
            batch: samples in it.
        """
        forward = (1 - BACKWARD_SHARE) * seconds / self.macs
        backward = BACKWARD_SHARE * seconds / self.macs
        layers = tuple(
            LayerProfile(t.name, t.numel, t.macs * forward, t.macs * backward) for t in self.tensors
        )
        return IterationProfile(layers, batch=batch)


def _conv(
    name: str, inputs: int, outputs: int, kernel: int, side: int, bias: bool = False
) -> list[Tensor]:
    """A convolution whose output is `side` by `side`."""
    weights = inputs * outputs * kernel * kernel
    return [
        Tensor(f"{name}.weight", weights, weights * side * side),
        *([Tensor(f"{name}.bias", outputs)] if bias else []),
    ]


def _norm(name: str, channels: int) -> list[Tensor]:
    """Batch normalisation."""
    return [Tensor(f"{name}.weight", channels), Tensor(f"{name}.bias", channels)]


def _linear(name: str, inputs: int, outputs: int) -> list[Tensor]:
    """A fully connected layer."""
    return [
        Tensor(f"{name}.weight", inputs * outputs, inputs * outputs),
        Tensor(f"{name}.bias", outputs),
    ]


def alexnet() -> Network:
    """AlexNet on 224 x 224 images, in the form of one tower (torchvision, arXiv 1404.5997)."""
    shapes = [(3, 64, 11, 55), (64, 192, 5, 27), (192, 384, 3, 13), (384, 256, 3, 13)]
    tensors: list[Tensor] = []
    for place, (inputs, outputs, kernel, side) in enumerate([*shapes, (256, 256, 3, 13)]):
        tensors += _conv(f"conv{place + 1}", inputs, outputs, kernel, side, bias=True)
    for place, (inputs, outputs) in enumerate([(9216, 4096), (4096, 4096), (4096, 1000)]):
        tensors += _linear(f"fc{place + 6}", inputs, outputs)
    return Network("AlexNet", tuple(tensors), "arXiv 1404.5997; torchvision alexnet")


VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of the convolutions; 0 halves the image (arXiv 1409.1556, configuration D)."""


def _vgg16_convolutions(side: int, norms: bool) -> list[Tensor]:
    tensors: list[Tensor] = []
    inputs, place = 3, 0
    for outputs in VGG16:
        if outputs == 0:
            side //= 2
            continue
        place += 1
        tensors += _conv(f"conv{place}", inputs, outputs, 3, side, bias=True)
        tensors += _norm(f"bn{place}", outputs) if norms else []
        inputs = outputs
    return tensors


def vgg16() -> Network:
    """VGG-16 on 224 x 224 images."""
    tensors = _vgg16_convolutions(224, norms=False)
    for place, (inputs, outputs) in enumerate([(25088, 4096), (4096, 4096), (4096, 1000)]):
        tensors += _linear(f"fc{place + 1}", inputs, outputs)
    return Network("VGG-16", tuple(tensors), "arXiv 1409.1556; torchvision vgg16")


def vgg16_cifar() -> Network:
    """VGG-16 for 32 x 32 images: batch normalisation, one fully connected layer of 10 classes."""
    tensors = [*_vgg16_convolutions(32, norms=True), *_linear("fc", 512, 10)]
    return Network("VGG-16 (CIFAR-10)", tuple(tensors), "code released with arXiv 1901.04359")


def resnet20() -> Network:
    """ResNet-20 for 32 x 32 images, with shortcuts that have no parameters."""
    tensors = [*_conv("conv1", 3, 16, 3, 32), *_norm("bn1", 16)]
    inputs = 16
    for stage, (channels, side) in enumerate([(16, 32), (32, 16), (64, 8)], start=1):
        for block in range(3):
            for place, come in ((1, inputs), (2, channels)):
                name = f"stage{stage}.{block}"
                tensors += _conv(f"{name}.conv{place}", come, channels, 3, side)
                tensors += _norm(f"{name}.bn{place}", channels)
            inputs = channels
    tensors += _linear("fc", 64, 10)
    return Network("ResNet-20", tuple(tensors), "arXiv 1512.03385, Section 4.2, option A")


def resnet50() -> Network:
    """ResNet-50 on 224 x 224 images, with the stride in the 3 x 3 convolutions."""
    tensors = [*_conv("conv1", 3, 64, 7, 112), *_norm("bn1", 64)]
    inputs = 64
    stages = [(64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)]
    for stage, (width, blocks, side) in enumerate(stages, start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            before = side * 2 if block == 0 and stage > 1 else side
            tensors += _conv(f"{name}.conv1", inputs, width, 1, before)
            tensors += _norm(f"{name}.bn1", width)
            tensors += _conv(f"{name}.conv2", width, width, 3, side)
            tensors += _norm(f"{name}.bn2", width)
            tensors += _conv(f"{name}.conv3", width, 4 * width, 1, side)
            tensors += _norm(f"{name}.bn3", 4 * width)
            if block == 0:
                tensors += _conv(f"{name}.downsample", inputs, 4 * width, 1, side)
                tensors += _norm(f"{name}.downsample.bn", 4 * width)
            inputs = 4 * width
    tensors += _linear("fc", 2048, 1000)
    return Network("ResNet-50", tuple(tensors), "arXiv 1512.03385; torchvision resnet50")


def lstm_ptb(words: int = 35) -> Network:
    """The large LSTM for the Penn Treebank: 2 layers of 1500, 10,000 words.

    Args:
        words: unrolled steps, which make up one sample.
    """
    width, vocabulary = 1500, 10_000
    tensors = [Tensor("embedding", vocabulary * width)]
    for layer in (0, 1):
        for part in ("ih", "hh"):
            weights = 4 * width * width
            tensors.append(Tensor(f"lstm{layer}.weight_{part}", weights, weights * words))
        for part in ("ih", "hh"):
            tensors.append(Tensor(f"lstm{layer}.bias_{part}", 4 * width))
    weights = width * vocabulary
    tensors += [Tensor("fc.weight", weights, weights * words), Tensor("fc.bias", vocabulary)]
    return Network("LSTM-PTB", tuple(tensors), "arXiv 1409.2329, large; code of 1901.04359")


def fully_connected(widths: tuple[int, ...] = (784, 2048, 4096, 1024, 10)) -> Network:
    """A fully connected net; by default for 28 x 28 images in 10 classes, with 14 M parameters.

    Args:
        widths: of the input, the hidden layers and the output.
    """
    tensors: list[Tensor] = []
    for place, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        tensors += _linear(f"fc{place}", inputs, outputs)
    return Network("FCN", tuple(tensors), "a plain stack of linear layers")


NETWORKS: Mapping[str, Callable[[], Network]] = MappingProxyType(
    {
        "alexnet": alexnet,
        "vgg16": vgg16,
        "vgg16-cifar": vgg16_cifar,
        "resnet20": resnet20,
        "resnet50": resnet50,
        "lstm-ptb": lstm_ptb,
        "fcn": fully_connected,
    }
)
"""By the names of the command line."""

GOOGLENET_NUMEL = 13_379_136
"""Parameters of GoogLeNet with its auxiliary classifiers, as counted in arXiv 1811.11141."""


def find(name: str) -> Network:
    """The network of a name.

    Raises:
        ValueError: there is none; lists those there are.
    """
    try:
        return NETWORKS[name]()
    except KeyError:
        raise ValueError(f"network {name!r} is not one of {', '.join(NETWORKS)}") from None
