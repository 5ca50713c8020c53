"""What the convergence benchmark trains: a model, its data, and the recipe that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddl.workloads.idx import read_labelled
from ddl.workloads.lstm import LSTMLanguageModel, State
from ddl.workloads.resnet20 import ResNet20
from ddl.workloads.streams import judged_columns, rank_streams, windows
from ddl.workloads.text import read_corpus
from ddl.workloads.vgg import SmallVGG

Batch = tuple[Tensor, Tensor]
BPTT = 35
JUDGED_COLUMNS = 32
JUDGED_AT_ONCE = 50  # images; more would not stay in a core's cache


@dataclass(frozen=True)
class Recipe:
    """How a task is trained.

    Attributes:
        lr: peak learning rate of one worker.
        scales: whether P workers train at P times `lr`.
        momentum: of SGD.
        weight_decay: of SGD.
        clip: norm that averaged gradients are clipped to; None: they are not.
        batch_size: samples, or streams of text, per worker and step.
    """

    lr: float
    scales: bool
    momentum: float
    weight_decay: float
    clip: float | None
    batch_size: int


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "resnet20": Recipe(0.01, True, 0.9, 1e-4, None, 16),
        "vgg": Recipe(0.005, True, 0.9, 1e-4, None, 16),
        "lstm": Recipe(20.0, False, 0.0, 0.0, 0.25, 4),
    }
)


class Judged(NamedTuple):
    """Sums over what one rank has judged."""

    loss: float
    hits: float
    count: int


class Task(Protocol):
    """A model and data to train it on."""

    recipe: Recipe
    unit: str
    """What is counted: "images" or "tokens"."""
    samples: int
    """Of them, for training."""
    judged_between: int
    """Of those kept for judging, what is judged while training goes on."""

    def make_model(self) -> nn.Module:
        """A new model; its weights are drawn from torch's generator."""

    def steps(self, P: int, size: int) -> int:
        """How many batches a rank has in an epoch."""

    def batches(self, rank: int, P: int, size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """One epoch of one rank; as many batches on every rank."""

    def forward(
        self, model: nn.Module, batch: Batch, state: State | None
    ) -> tuple[Tensor, State | None]:
        """Mean loss, and what the next batch needs."""

    def judge(self, model: nn.Module, rank: int, P: int, most: int | None) -> Judged:
        """Loss and hits on this rank's share of the data kept for that, or of the first `most`."""


class Images:
    """Fashion-MNIST: the first images of its training and of its test files."""

    unit = "images"
    judged_between = 1000

    def __init__(
        self,
        make: Callable[[], nn.Module],
        recipe: Recipe,
        folder: Path,
        train: int,
        test: int,
    ) -> None:
        """Read the data.

        Raises:
            ValueError: it is not there, or broken, or too little.
        """
        self._make = make
        self.recipe = recipe
        self._train, self._labels = _images(folder, "train", train)
        self._test, self._test_labels = _images(folder, "t10k", test)
        self.samples = train

    def make_model(self) -> nn.Module:
        """See `Task.make_model`; in the order of memory that CPUs convolve fastest."""
        return self._make().to(memory_format=torch.channels_last)

    def steps(self, P: int, size: int) -> int:
        """See `Task.steps`."""
        return self.samples // (P * size)

    def batches(self, rank: int, P: int, size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """See `Task.batches`: a new order in every epoch, of which ranks take turns."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        order = torch.randperm(len(self._train), generator=generator)
        for step in range(self.steps(P, size)):
            mine = order[(step * P + rank) * size : (step * P + rank + 1) * size]
            yield _scaled(self._train[mine]), self._labels[mine]

    def forward(
        self, model: nn.Module, batch: Batch, state: State | None
    ) -> tuple[Tensor, State | None]:
        """See `Task.forward`."""
        inputs, labels = batch
        return cross_entropy(model(inputs), labels), None

    def judge(self, model: nn.Module, rank: int, P: int, most: int | None) -> Judged:
        """See `Task.judge`."""
        images, labels = self._test[rank:most:P], self._test_labels[rank:most:P]
        loss = hits = 0.0
        for part in range(0, len(images), JUDGED_AT_ONCE):
            some = slice(part, part + JUDGED_AT_ONCE)
            logits = model(_scaled(images[some]))
            loss += cross_entropy(logits, labels[some], reduction="sum").item()
            hits += int((logits.argmax(1) == labels[some]).sum())
        return Judged(loss, hits, len(images))


class Text:
    """The source code of Python's standard library, or files."""

    unit = "tokens"
    judged_between = 5000

    def __init__(
        self, files: list[Path], train: int, held_out: int, words: int, hidden: int
    ) -> None:
        """Read the text.

        Raises:
            ValueError: a file cannot be read, or there is too little text.
        """
        corpus = read_corpus(files, "words" if files else "code", words, train, held_out)
        self.recipe = RECIPES["lstm"]
        self._train, self._valid = corpus.train, corpus.valid
        self._words, self._hidden = len(corpus.words), hidden
        self.samples = len(corpus.train)

    def make_model(self) -> nn.Module:
        """See `Task.make_model`; without dropout, whose draws threads would share."""
        return LSTMLanguageModel(self._words, self._hidden, 0.0)

    def steps(self, P: int, size: int) -> int:
        """See `Task.steps`."""
        return max(0, -(-(self.samples // P // size - 1) // BPTT))

    def batches(self, rank: int, P: int, size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """See `Task.batches`: the rank's part of the text, in its order."""
        return windows(rank_streams(self._train, rank, P, size), BPTT)

    def forward(
        self, model: nn.Module, batch: Batch, state: State | None
    ) -> tuple[Tensor, State | None]:
        """See `Task.forward`."""
        inputs, targets = batch
        logits, state = model(inputs, state)
        return cross_entropy(logits.flatten(0, 1), targets.flatten()), state

    def judge(self, model: nn.Module, rank: int, P: int, most: int | None) -> Judged:
        """See `Task.judge`; of all columns the first words."""
        words = most and most // JUDGED_COLUMNS
        columns = judged_columns(self._valid, JUDGED_COLUMNS)
        inputs, targets = (part[:words, rank::P] for part in columns)
        loss, hits, count, state = 0.0, 0.0, 0, None
        for begin in range(0, len(inputs), BPTT) if inputs.shape[1] else ():
            logits, state = model(inputs[begin : begin + BPTT], state)
            flat, expected = logits.flatten(0, 1), targets[begin : begin + BPTT].flatten()
            loss += cross_entropy(flat, expected, reduction="sum").item()
            hits += int((flat.argmax(1) == expected).sum())
            count += int((expected >= 0).sum())
        return Judged(loss, hits, count)


@dataclass(frozen=True)
class Data:
    """How much of which data; part of what identifies a run."""

    folder: Path
    text: tuple[Path, ...] = ()
    train_images: int = 12_000
    test_images: int = 2_000
    train_tokens: int = 200_000
    held_out_tokens: int = 20_000
    words: int = 5_000
    hidden: int = 200


def _resnet20(data: Data) -> Task:
    return Images(ResNet20, RECIPES["resnet20"], data.folder, data.train_images, data.test_images)


def _vgg(data: Data) -> Task:
    def make() -> nn.Module:
        return SmallVGG(size=28)

    return Images(make, RECIPES["vgg"], data.folder, data.train_images, data.test_images)


def _lstm(data: Data) -> Task:
    return Text(list(data.text), data.train_tokens, data.held_out_tokens, data.words, data.hidden)


TASKS: Mapping[str, Callable[[Data], Task]] = {
    "resnet20": _resnet20,
    "vgg": _vgg,
    "lstm": _lstm,
}


def _images(folder: Path, prefix: str, count: int) -> tuple[Tensor, Tensor]:
    images, labels = read_labelled(folder, prefix)
    if len(images) < count:
        raise ValueError(
            f"{folder} has {len(images)} images in the files {prefix}-*, expected {count}; ask for "
            "fewer with --train-images or --test-images"
        )
    return images[:count], labels[:count].long()


def _scaled(images: Tensor) -> Tensor:
    """uint8 [N, h, w] -> float32 [N, 3, h, w] around zero."""
    grey = (images.float() / 127.5 - 1.0)[:, None].expand(-1, 3, -1, -1)
    return grey.contiguous(memory_format=torch.channels_last)
