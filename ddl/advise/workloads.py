"""What is trained: a model by name or by function, and the batches it gets."""

from __future__ import annotations

import copy
import difflib
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddl.advise.arguments import BadInput

CLASSES = 1000
AUXILIARY_WEIGHT = 0.3  # Szegedy et al. 2014, arXiv 1409.4842, section 5


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        name: as the user wrote it.
        model: on the CPU, to be trained.
        make_batch: reads one batch: a tensor, or what the model takes as its arguments.
        batch: samples in it.
    """

    name: str
    model: nn.Module
    make_batch: Callable[[], Any]
    batch: int

    def copy(self) -> Workload:
        """The same with a model of its own."""
        return replace(self, model=copy.deepcopy(self.model))

    def loss(self, batch: Any) -> Tensor:
        """A number to go backward from.

        What is a number already is taken as the loss. Of two dimensions are logits: cross entropy.
        Anything else is squared. Of several outputs the later ones count 0.3.
        """
        arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
        outputs = self.model(*arguments)
        if isinstance(outputs, dict):
            outputs = tuple(outputs.values())
        if isinstance(outputs, Tensor):
            return _one_loss(outputs)
        first, *others = (output for output in outputs if isinstance(output, Tensor))
        loss = _one_loss(first)
        for other in others:
            loss = loss + AUXILIARY_WEIGHT * _one_loss(other)
        return loss


def _one_loss(output: Tensor) -> Tensor:
    if output.numel() == 1:
        return output.sum()
    if output.dim() == 2:
        labels = torch.arange(len(output), device=output.device) % output.shape[1]
        return cross_entropy(output, labels)
    return output.float().square().mean()


def load(name: str, batch: int, image_size: int | None, seed: int = 0) -> Workload:
    """Make a model and a batch of random images for it, and try them.

    Args:
        name: of a torchvision classifier, or `module:function`. The function returns the model, or
            a pair of it and its input: a tensor, a tuple of the model's arguments, or a function
            that reads a batch.
        batch: samples of a batch, where there is no input.
        image_size: pixels of a side, where there is no input; 224 if None.
        seed: of the images; every rank gets others.

    Raises:
        BadInput: no such model, or one that cannot be trained on the batch.
    """
    generator = torch.Generator().manual_seed(seed)
    side = 224 if image_size is None else image_size
    given = _from_function(name) if ":" in name else _from_torchvision(name)
    model, data = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"--model {name} returned {type(model).__name__}, expected an nn.Module, or a pair of "
            "one and its input"
        )
    if data is None:
        data = torch.randn(batch, 3, side, side, generator=generator)
    make_batch = data if callable(data) else lambda: data
    workload = Workload(name, model.train(), make_batch, batch)
    sample = _try(workload)
    if isinstance(sample, (tuple, list)):
        sample = sample[0]
    size = len(sample) if isinstance(sample, Tensor) and sample.dim() else batch
    return replace(workload, batch=size)


def _try(workload: Workload) -> Any:
    """One step, after which a parameter must have a gradient; returns the batch."""
    try:
        batch = workload.make_batch()
        workload.loss(batch).backward()
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(
            f"--model {workload.name} cannot be trained on such a batch ({first_line}); choose "
            "another --image-size or --batch-size"
        ) from error
    trained = [p for p in workload.model.parameters() if p.grad is not None]
    if not trained:
        raise BadInput(f"--model {workload.name} has no parameter to train, expected at least one")
    for parameter in trained:
        parameter.grad = None
    return batch


def _from_torchvision(name: str) -> nn.Module:
    try:
        from torchvision import models
    except ImportError as error:
        raise BadInput(
            f"--model {name} needs torchvision, which was not found; pip install torchvision, or "
            "give MODULE:FUNCTION"
        ) from error
    names = models.list_models(module=models)
    if name not in names:
        close: Sequence[str] = difflib.get_close_matches(name, names, n=3) or ["resnet50"]
        raise BadInput(
            f"unknown --model {name}, expected a classifier of torchvision such as "
            f"{', '.join(close)}, or MODULE:FUNCTION such as ddl.workloads.resnet20:ResNet20"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that are going to change
        return models.get_model(name, weights=None, num_classes=CLASSES)


def _from_function(name: str) -> Any:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        return function()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise BadInput(
            f"--model {name} could not be made ({type(error).__name__}: {error}); expected "
            "MODULE:FUNCTION, a function without arguments in a module that Python finds from here"
        ) from error
