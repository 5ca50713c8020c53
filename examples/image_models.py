"""Image classifiers by name: every classifier of torchvision, and resnet20 in its CIFAR form."""

import difflib
from collections.abc import Callable

import torch
from arguments import BadInput, one_line
from resnet20 import ResNet20
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torchvision import models

IMAGE_SIZES = (32, 64, 128, 224, 299)
AUXILIARY_WEIGHT = 0.3  # Szegedy et al. 2014, arXiv 1409.4842, section 5

# Without init_weights these two warn about a default that is going to change.
_EXTRA_ARGUMENTS = {"googlenet": {"init_weights": True}, "inception_v3": {"init_weights": True}}


def model_names() -> list[str]:
    """All names that `build_model` takes."""
    return ["resnet20", *models.list_models(module=models)]


def build_model(name: str, num_classes: int) -> nn.Module:
    """A new, randomly initialised model.

    Raises:
        BadInput: the name is unknown.
    """
    if name == "resnet20":
        return ResNet20(num_classes)
    if name not in model_names():
        close = difflib.get_close_matches(name, model_names(), n=3) or ["resnet50", "resnet20"]
        raise BadInput(
            f"unknown --model {name!r}, expected resnet20 or a classifier of torchvision.models, "
            f"such as {', '.join(close)}"
        )
    extra = _EXTRA_ARGUMENTS.get(name, {})
    return models.get_model(name, weights=None, num_classes=num_classes, **extra)


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
        f"{type(model).__name__} cannot train on a batch of {batch_size} images of {tried} "
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

    In training GoogLeNet and Inception return a tuple: the logits, then those of auxiliary classifiers.
    """
    if isinstance(output, Tensor):
        return criterion(output, labels), output
    logits, *auxiliary = output
    loss = criterion(logits, labels)
    for other in auxiliary:
        loss = loss + AUXILIARY_WEIGHT * criterion(other, labels)
    return loss, logits
