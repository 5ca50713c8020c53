"""Links and devices, by name, for predictions where nothing can be measured.

Figures are typical ones from published measurements, not promises: a switch, a driver or a virtual
machine changes latencies several times. Where a range is wide, a value inside it is taken. Measure
where you can (`fits.fit_link`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ddl.perfmodel.networks import Network, resnet50


@dataclass(frozen=True)
class Link:
    """A link between two workers.

    Attributes:
        alpha: seconds of a message, however short.
        beta: seconds per byte.
        alpha_range: seconds; what has been seen, from tuned to untuned.
        source: of the figures.
    """

    alpha: float
    beta: float
    alpha_range: tuple[float, float]
    source: str


LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "1gbe": Link(1.5e-4, 1 / 111e6, (5e-5, 4.4e-4), "arXiv 1901.04359 for the upper end"),
        "1gbe-2019": Link(4.36e-4, 9e-9, (5e-5, 4.4e-4), "fitted in arXiv 1901.04359"),
        "10gbe": Link(4.525e-5, 1 / 1.18e9, (3.3e-5, 4.525e-5), "alpha of arXiv 1811.11141"),
        "25gbe": Link(3e-5, 1 / 2.9e9, (2e-5, 4e-5), "TCP on 25 Gb/s"),
        # 4.06e-10 s/byte was fitted to an all-reduce of 16 ranks, which sends 30/16 bytes for each.
        "56gib": Link(3e-6, 4.06e-10 / (30 / 16), (1e-6, 5e-6), "code of arXiv 1811.11141"),
        "200gib": Link(1.9e-5, 1 / 24e9, (1.9e-5, 1.9e-5), "NCCL, two nodes, HDR"),
        "400gib": Link(1.9e-5, 1 / 47e9, (1.9e-5, 1.9e-5), "NCCL, two nodes, NDR"),
        "nvlink-a100": Link(3e-6, 1 / 200e9, (1e-6, 5e-6), "NCCL bus bandwidth, 8 GPUs"),
        "nvlink-h100": Link(3e-6, 1 / 425e9, (1e-6, 5e-6), "NCCL bus bandwidth, 8 GPUs"),
        "nvlink-h200": Link(3e-6, 1 / 475e9, (1e-6, 5e-6), "NCCL bus bandwidth, 8 GPUs"),
    }
)
"""By name. Bandwidths are those seen by a program, below the nominal ones."""

RESNET50_RATE: Mapping[str, float] = MappingProxyType(
    {
        "p102-100": 52.873,  # arXiv 1901.04359: 16 images a pass, reading and decoding included
        "k80": 76.85,  # arXiv 1811.11141
        "v100": 367.0,
        "v100-amp": 1200.0,
        "a100": 938.0,  # TF32
        "a100-amp": 2470.0,
    }
)
"""Images a second that one device trains of ResNet-50: published benchmarks of 2018 to 2021."""


def compute_seconds(device: str, network: Network, batch: int) -> float:
    """Seconds of forward and backward pass of `batch` samples on one device: a rough guess.

    The published rate of ResNet-50, scaled by multiply-adds. Networks of large matrices run faster
    than that, those of many small layers slower, up to 3 times each.

    Args:
        device: a name in `RESNET50_RATE`.
        network: to be trained.
        batch: samples.

    Raises:
        ValueError: the device is not known; lists those that are.
    """
    if device not in RESNET50_RATE:
        raise ValueError(f"device {device!r} is not one of {', '.join(RESNET50_RATE)}")
    return batch / RESNET50_RATE[device] * network.macs / resnet50().macs


def find_link(name: str) -> Link:
    """The link of a name.

    Raises:
        ValueError: there is none; lists those there are.
    """
    if name not in LINKS:
        raise ValueError(f"network {name!r} is not one of {', '.join(LINKS)}")
    return LINKS[name]
