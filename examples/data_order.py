"""In which order training images come, so that a resumed run can go on in the middle of an epoch.

Which images come, and how they are cropped and flipped at random, depends on the seed, the epoch
and the image alone: not on loader processes, nor on how often the run was interrupted.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler


class Repeatable(Dataset):
    """A data set that is asked for (epoch, index), and draws by them what it draws at random."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seed = data, seed

    def __len__(self) -> int:  # noqa: D105
        return len(self.data)

    def __getitem__(self, place: tuple[int, int]) -> Any:  # noqa: D105
        epoch, index = place
        name = f"{self.seed} {epoch} {index}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the GPU, too
            return self.data[index]


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that gives (epoch, index), and can begin later than with the first.

    Attributes:
        start: how many of this rank's images the next pass leaves out; only the next one does.
    """

    start = 0

    def __iter__(self) -> Iterator[Any]:  # noqa: D105
        order = list(super().__iter__())[self.start :]
        self.start = 0
        return iter([(self.epoch, index) for index in order])
