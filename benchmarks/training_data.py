"""What bench_training reads: images and text, real or random, by torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, Sampler
from training_models import BPTT, MODELS, WORDS

from ddl.workloads.digits import read_digits
from ddl.workloads.idx import read_labelled
from ddl.workloads.text import read_corpus

SOURCES = ("synthetic", "digits", "fashion-mnist")
RANDOM_SAMPLES = 256  # made once and kept, so that a reader finds them in memory
TOKENS = 200_000  # of the text that stands for real data
BATCHES_AHEAD = 2  # of each loader process

Sample = tuple[Tensor, Tensor]


class Images(Dataset):
    """Images kept as uint8 [N, h, w]; scaled to float32 [channels, size, size] one at a time."""

    def __init__(self, images: Tensor, labels: Tensor, channels: int, size: int) -> None:
        self.images, self.labels = images, labels.long()
        self.channels, self.size = channels, size

    def __len__(self) -> int:  # noqa: D105
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:  # noqa: D105
        image = self.images[index].float() / 127.5 - 1.0
        if image.shape[-1] != self.size:
            shape = (self.size, self.size)
            image = interpolate(image[None, None], size=shape, mode="bilinear")[0, 0]
        return image.expand(self.channels, -1, -1), self.labels[index]


class Text(Dataset):
    """Sequences of `BPTT` tokens and of those that follow each of them."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:  # noqa: D105
        return (len(self.tokens) - 1) // BPTT

    def __getitem__(self, index: int) -> Sample:  # noqa: D105
        words = self.tokens[index * BPTT : (index + 1) * BPTT + 1]
        return words[:-1], words[1:]


class Endless(Sampler[int]):
    """Draws samples for ever, other ones on every rank."""

    def __init__(self, length: int, rank: int) -> None:
        self._length, self._rank = length, rank

    def __iter__(self) -> Iterator[int]:  # noqa: D105
        generator = torch.Generator().manual_seed(self._rank)
        while True:
            yield from torch.randperm(self._length, generator=generator).tolist()


def make_dataset(source: str, model: str, size: int, folder: Path) -> Images | Text:
    """What a model reads.

    Args:
        source: one of `SOURCES`. Where it is not synthetic the LSTM reads the source code of
            Python's standard library.
        model: a name of `MODELS`.
        size: pixels of an image's side.
        folder: of Fashion-MNIST.

    Raises:
        ValueError: the data is not there, or broken.
    """
    generator = torch.Generator().manual_seed(0)
    channels = MODELS[model].channels
    if not channels:
        if source == "synthetic":
            length = RANDOM_SAMPLES * BPTT + 1
            return Text(torch.randint(WORDS, (length,), generator=generator))
        return Text(read_corpus([], "code", WORDS, TOKENS, held_out_tokens=2).train)
    if source == "digits":
        images, labels = read_digits()
    elif source == "fashion-mnist":
        images, labels = read_labelled(folder, "train")
    else:
        shape = (RANDOM_SAMPLES, size, size)
        images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (RANDOM_SAMPLES,), generator=generator)
    return Images(images, labels, channels, size)


def make_loader(
    dataset: Images | Text, batch: int, rank: int, prefetch: int, pin_memory: bool
) -> DataLoader:
    """Batches for ever.

    Args:
        dataset: what to read.
        batch: samples at once.
        rank: this worker.
        prefetch: processes that read ahead; 0: the training process reads when it needs to.
        pin_memory: whether batches come in page-locked memory.
    """
    ahead: dict[str, Any] = {}
    if prefetch:
        # A process forked from one that runs MPI and threads may hang.
        ahead = {"prefetch_factor": BATCHES_AHEAD, "multiprocessing_context": "forkserver"}
    return DataLoader(
        dataset,
        batch_size=batch,
        sampler=Endless(len(dataset), rank),
        num_workers=prefetch,
        pin_memory=pin_memory,
        **ahead,
    )
