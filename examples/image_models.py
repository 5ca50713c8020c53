"""Image classifiers by name: torchvision's, and two that were made for images of 32x32 pixels."""

import difflib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from arguments import BadInput, one_line
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torchvision import models

from ddl.workloads.resnet20 import ResNet20
from ddl.workloads.vgg import VGG16

SMALL: Mapping[str, Callable[[int], nn.Module]] = MappingProxyType(
    {"resnet20": ResNet20, "vgg16-cifar": VGG16}
)
IMAGE_SIZES = (32, 64, 128, 224, 299)
AUXILIARY_WEIGHT = 0.3  # Szegedy et al. 2014, arXiv 1409.4842, section 5

# Blocks that start as identities bear large batches (Goyal et al. 2017, section 5.1).
_RESNET_ARGUMENTS = {"zero_init_residual": True}
# Without it these two warn about a default that is going to change.
_INCEPTION_ARGUMENTS = {"init_weights": True}
_ARGUMENTS = {
    "resnet": _RESNET_ARGUMENTS,
    "resnext": _RESNET_ARGUMENTS,
    "wide": _RESNET_ARGUMENTS,
    "googlenet": _INCEPTION_ARGUMENTS,
    "inception": _INCEPTION_ARGUMENTS,
}


def model_names() -> list[str]:
    """All names that `build_model` takes."""
    return [*SMALL, *models.list_models(module=models)]


def build_model(name: str, num_classes: int) -> nn.Module:
    """A new, randomly initialised model.

    Raises:
        BadInput: the name is unknown.
    """
    if name in SMALL:
        return SMALL[name](num_classes)
    if name not in model_names():
        close = difflib.get_close_matches(name, model_names(), n=3) or ["resnet50", "resnet20"]
        raise BadInput(
            f"unknown --model {name!r}, expected {', '.join(SMALL)} or a classifier of "
            f"torchvision.models, such as {', '.join(close)}"
        )
    family = re.split(r"[_\d]", name)[0]
    return models.get_model(
        name, weights=None, num_classes=num_classes, **_ARGUMENTS.get(family, {})
    )


def choose_image_size(
    model: nn.Module, batch_size: int, sizes: tuple[int, ...] = IMAGE_SIZES
) -> int:
    """The smallest of `sizes` on which the model can train, tried without computing a number.

    Raises:
        BadInput: it can train on none of them.
    """
    problem = ""
    for size in sizes:
        problem = why_refused(model, batch_size, size)
        if not problem:
            return size
    tried = ", ".join(f"{size}x{size}" for size in sizes)
    raise BadInput(
        f"the model cannot train on batches of {batch_size} images of {tried} "
        f"({problem}); choose another --image-size or --batch-size"
    )


def why_refused(model: nn.Module, batch_size: int, size: int) -> str:
    """Why the model cannot train on such a batch; empty if it can."""
    # On the meta device only shapes are worked out, and the model's own tensors stay as they are.
    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    images = torch.empty(batch_size, 3, size, size, device="meta")
    try:
        functional_call(model, state, (images,))
    except (RuntimeError, ValueError, AssertionError) as error:
        return one_line(error)
    return ""


def training_loss(
    output: Tensor | tuple[Tensor, ...], labels: Tensor, criterion: Callable = cross_entropy
) -> tuple[Tensor, Tensor]:
    """Loss, and the logits to count hits in.

    In training GoogLeNet and Inception return a tuple: logits, then those of helping classifiers.
    """
    if isinstance(output, Tensor):
        return criterion(output, labels), output
    logits, *auxiliary = output
    loss = criterion(logits, labels)
    for other in auxiliary:
        loss = loss + AUXILIARY_WEIGHT * criterion(other, labels)
    return loss, logits
