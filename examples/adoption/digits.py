"""What these scripts share: scikit-learn's handwritten digits, and a check at the end."""

from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ddl

Samples = Sequence[tuple[Tensor, int]]


def load() -> Samples:
    """1,797 pairs of an image, float32 [64] in 0..1, and its label, in an order of no meaning."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    return list(zip(images, digits.target[order].tolist(), strict=True))


def stack(data: Samples) -> tuple[Tensor, Tensor]:
    """float32 [samples, 64] and int64 [samples]."""
    images, labels = zip(*data, strict=True)
    return torch.stack(images), torch.tensor(labels)


def make_classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def mean_loss(model: nn.Module, data: Samples) -> float:
    images, labels = stack(data)
    return nn.functional.cross_entropy(model(images), labels).item()


def check(model: nn.Module, what: str, first: float, last: float) -> None:
    """Fails unless `what` has halved, and all ranks, if there are several, hold one model."""
    comm = ddl.init()  # alone, in a script that does not use ddl
    digests = ddl.gather_object(ddl.parameters_digest(model))
    assert len(set(digests)) == 1, f"the ranks' parameters differ: {digests}"
    assert last < first / 2, f"{what} went from {first} to {last}, expected less than half"
    if comm.rank == 0:
        print(f"{what} {first:.3f} -> {last:.3f}, {comm.size} ranks agree")
