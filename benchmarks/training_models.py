"""What bench_training trains: models by name, what they are fed, and batches of the papers' size.

The batches of a worker on a GPU: those of VGG-16 and ResNet-20 are of arXiv 1901.04359 (breakdown
of an iteration), 100 for the LSTM is `ddl.perfmodel.published`'s; those of the others are usual
sizes that fill a GPU, not checked against a table. CPUs get small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddl.workloads.fcn import FullyConnected
from ddl.workloads.lstm import SIZES, LSTMLanguageModel
from ddl.workloads.resnet20 import ResNet20

CLASSES = 1000
WORDS = 10_000
BPTT = 35  # words of a sequence
AUXILIARY_WEIGHT = 0.3  # Szegedy et al. 2014, arXiv 1409.4842, section 5


@dataclass(frozen=True)
class Scale:
    """What a worker handles at once.

    Attributes:
        batch: samples of an iteration.
        size: pixels of an image's side; hidden units of the LSTM.
    """

    batch: int
    size: int


@dataclass(frozen=True)
class Model:
    """A model by name.

    Attributes:
        title: as the papers write it.
        make: a new one; its argument is a `Scale.size`.
        gpu: what a GPU gets by default.
        cpu: what a CPU gets by default.
        channels: of its images; 0 for text.
        fixed_size: whether it takes images of one size only.
        torchvision: whether it is torchvision's.
    """

    title: str
    make: Callable[[int], nn.Module]
    gpu: Scale
    cpu: Scale
    channels: int = 3
    fixed_size: bool = False
    torchvision: bool = False

    @property
    def unit(self) -> str:
        """What is counted."""
        return "Img" if self.channels else "Seq"


def _torchvision(name: str, **more: bool) -> Callable[[int], nn.Module]:
    def make(size: int) -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=CLASSES, **more)

    return make


def _lstm(hidden: int) -> nn.Module:
    dropout = next((size.dropout for size in SIZES.values() if size.hidden == hidden), 0.0)
    return LSTMLanguageModel(WORDS, hidden, dropout)


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "alexnet": Model(
            "AlexNet", _torchvision("alexnet"), Scale(1024, 224), Scale(8, 64), torchvision=True
        ),
        "googlenet": Model(
            "GoogLeNet",
            # Initialised as torch does: the published way takes a minute, and times are the same.
            _torchvision("googlenet", init_weights=False),
            Scale(64, 224),
            Scale(4, 64),
            torchvision=True,
        ),
        "vgg16": Model(
            "VGG-16", _torchvision("vgg16"), Scale(128, 224), Scale(4, 32), torchvision=True
        ),
        "resnet50": Model(
            "ResNet-50", _torchvision("resnet50"), Scale(32, 224), Scale(4, 64), torchvision=True
        ),
        "resnet20": Model("ResNet-20", lambda size: ResNet20(), Scale(128, 32), Scale(16, 32)),
        "fcn": Model(
            "FCN",
            lambda size: FullyConnected(),
            Scale(1024, 28),
            Scale(32, 28),
            channels=1,
            fixed_size=True,
        ),
        "lstm": Model("LSTM", _lstm, Scale(100, 1500), Scale(4, 200), channels=0),
    }
)
"""By the names of the command line."""


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy.

    Args:
        model: gives logits; or a tuple of them, of which later ones count 0.3 (GoogLeNet), or of
            them and a state (LSTM).
        inputs: float32 [N, channels, size, size], or int64 [N, words].
        targets: int64 [N], or int64 [N, words].
    """
    if isinstance(model, LSTMLanguageModel):
        logits, _ = model(inputs.t())
        return cross_entropy(logits.flatten(0, 1), targets.t().flatten())
    output = model(inputs)
    if isinstance(output, Tensor):
        return cross_entropy(output, targets)
    first, *auxiliary = output
    loss = cross_entropy(first, targets)
    for other in auxiliary:
        loss = loss + AUXILIARY_WEIGHT * cross_entropy(other, targets)
    return loss


def why_refused(name: str, scale: Scale) -> str:
    """Why a model cannot train on such batches; empty if it can.

    Shapes are worked out and nothing is computed.
    """
    model = MODELS[name]
    if model.torchvision and find_spec("torchvision") is None:
        own = ", ".join(other for other in MODELS if not MODELS[other].torchvision)
        return (
            f"{name} needs torchvision, which is not installed; pip install torchvision, or choose "
            f"among {own}"
        )
    if not model.channels:
        return ""
    with torch.device("meta"):
        made = model.make(scale.size).train()
        images = torch.empty(scale.batch, model.channels, scale.size, scale.size)
        try:
            made(images)
        except (RuntimeError, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split())
            return (
                f"{name} cannot train on {scale.batch} images of {scale.size} x {scale.size} "
                f"({reason}); choose another --image-size or --batch-size"
            )
    return ""
