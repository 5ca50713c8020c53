"""Published measurements, as data with their sources, to check models against.

Sources:
    [1608.07249] Shi, Wang, Xu, Chu: Benchmarking state-of-the-art deep learning software tools.
    [1711.05979] Shi, Wang, Chu: Performance modeling and evaluation of distributed deep learning
        frameworks on GPUs.
    [1811.11141] Shi, Chu, Li: MG-WFBP. The constants of its ring with a reduction term are in the
        scripts that were released with [1901.04359].
    [1901.04359] Shi, Wang, Zhao, Tang, Wang, Huang, Chu: A distributed synchronous SGD algorithm
        with global top-k sparsification for low bandwidth networks. Throughputs are those of the
        released scripts, to the digits given there.

Times are seconds, rates images (or sequences) a second and worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

WORD_BYTES = 4
"""The papers count words; this package counts bytes."""


# --- Formulas of the collectives [1901.04359, communication complexity] --------------------------

ETHERNET_1G_ALPHA = 0.436e-3
"""Seconds; fitted by the authors between two nodes of their 1 Gb/s cluster [1901.04359]."""
ETHERNET_1G_BETA = 3.6e-8 / WORD_BYTES
"""Seconds per byte; likewise."""


@dataclass(frozen=True)
class CollectiveTime:
    """What the formulas give for m parameters at density 0.001 on that cluster, in seconds."""

    P: int
    dense: float
    all_gather: float
    tree: float


COLLECTIVES_NUMEL = 26_214_400
COLLECTIVES_K = 26_214.4
COLLECTIVES = (
    CollectiveTime(4, 1.41819, 6.534e-3, 9.294e-3),
    CollectiveTime(8, 1.65761, 14.520e-3, 13.941e-3),
    CollectiveTime(16, 1.78255, 30.056e-3, 18.587e-3),
    CollectiveTime(32, 1.85549, 60.691e-3, 23.234e-3),
    CollectiveTime(64, 1.91288, 121.525e-3, 27.881e-3),
    CollectiveTime(128, 1.98344, 242.756e-3, 32.528e-3),
)


# --- Naive S-SGD on 10 Gb/s Ethernet, K80, two GPUs a node [1811.11141] --------------------------

ETHERNET_10G_ALPHA = 45.25e-6
"""Seconds a round."""
ETHERNET_10G_BETA = 9.934e-10
"""Seconds per byte sent."""
ETHERNET_10G_GAMMA = 2.5e-9
"""Seconds per byte added up."""


def ring_with_reduction(P: int, numel: int, alpha: float, beta: float, gamma: float) -> float:
    """Seconds of a ring all-reduce of float32 whose additions take time, too.

    2 (P-1) alpha + 2 (P-1)/P M beta + (P-1)/P M gamma with M = 4 numel bytes: in the first half of
    the rounds each rank adds up what it received (scripts of [1901.04359]; [1811.11141],
    all-reduce models).

    Args:
        P: workers.
        numel: elements.
        alpha: seconds a round.
        beta: seconds per byte sent.
        gamma: seconds per byte added up.
    """
    size = WORD_BYTES * numel
    share = (P - 1) / P * size
    return 2 * (P - 1) * alpha + 2 * share * beta + share * gamma


@dataclass(frozen=True)
class NaiveRun:
    """Naive S-SGD: `alone` is the rate of one GPU by itself, the others by number of workers."""

    network: str
    numel: int
    batch: int
    alone: float
    workers: tuple[int, ...]
    predicted: tuple[float, ...]
    measured: tuple[float, ...]


NAIVE_10G = (
    NaiveRun(
        "GoogLeNet", 13_379_136, 32, 81.68, (2, 4, 8), (62.51, 55.93, 53.11), (62.57, 57.67, 55.58)
    ),
    NaiveRun(
        "ResNet-50", 25_557_032, 64, 76.85, (2, 4, 8), (60.25, 54.37, 51.83), (60.0, 55.7, 50.8)
    ),
)


# --- Throughput on 1 Gb/s Ethernet, one P102-100 a node, density 0.001 [1901.04359] --------------

THROUGHPUT_P = (4, 8, 16, 32)
THROUGHPUT_DENSITY = 0.001


@dataclass(frozen=True)
class ThroughputRun:
    """One network: samples a second and worker, alone and by method for P = 4, 8, 16, 32.

    `numel` is counted in the released models. `batch` is that of the published breakdown, except
    for LSTM-PTB, which is not in it. The 20 of the released defaults cannot be: 4 workers would
    exchange dense gradients in 1.53 s, for which a ring on 1 Gb/s needs at least 3.17 s. So it is
    at least 42, and taken as 100, unconfirmed; a test shows what follows from other values.
    """

    network: str
    numel: int
    batch: int
    alone: float
    dense: tuple[float, float, float, float]
    topk: tuple[float, float, float, float]
    gtopk: tuple[float, float, float, float]


THROUGHPUT_1G = (
    ThroughputRun(
        "VGG-16",
        14_728_266,
        128,
        1317.333,
        (104.200, 92.560, 39.480, 12.600),
        (110.576, 109.900, 97.865, 63.002),
        (131.060, 130.551, 126.434, 123.200),
    ),
    ThroughputRun(
        "ResNet-20",
        269_722,
        128,
        920.632,
        (821.700, 705.200, 520.400, 287.900),
        (908.837, 752.985, 737.594, 696.029),
        (916.260, 868.730, 808.500, 789.300),
    ),
    ThroughputRun(
        "AlexNet",
        61_100_840,
        64,
        173.469,
        (14.010, 12.118, 4.936, 1.234),
        (14.238, 13.865, 13.352, 9.236),
        (16.536, 16.446, 16.359, 15.777),
    ),
    ThroughputRun(
        "ResNet-50",
        25_557_032,
        256,
        52.873,
        (39.002, 36.989, 23.176, 10.721),
        (37.729, 35.703, 34.495, 30.583),
        (39.795, 39.713, 39.060, 39.119),
    ),
    ThroughputRun(
        "LSTM-PTB",
        66_034_000,
        100,
        392.0,
        (12.657, 8.7, 4.1, 2.1),
        (19.9, 18.6, 14.8, 5.4),
        (17.8, 17.6, 15.1, 10.8),
    ),
)


@dataclass(frozen=True)
class Breakdown:
    """gTop-k at P = 32: seconds of an iteration by part; `total_rate` is their sum as a rate."""

    network: str
    batch: int
    compute: float
    select: float
    communicate: float
    total_rate: float
    measured: float

    @property
    def rate(self) -> float:
        """Samples a second if the parts follow each other: batch / (sum of the parts)."""
        return self.batch / (self.compute + self.select + self.communicate)


BREAKDOWN_1G = (
    Breakdown("VGG-16", 128, 0.139536, 0.091353, 0.811753, 122.8, 123.2),
    Breakdown("ResNet-20", 128, 0.146005, 0.001618, 0.024686, 742.9, 789.3),
    Breakdown("AlexNet", 64, 0.257205, 0.383776, 3.362980, 15.98, 15.78),
    Breakdown("ResNet-50", 256, 4.882041, 0.154050, 1.424253, 39.6, 39.1),
)


# --- The top-k operator of 2019 on GPUs [OMGS-SGD, INFOCOM 2020] ----------------------------------

TOPK_SECONDS = MappingProxyType({"P102-100": 2.18897e-10, "V100": 4.99672e-10})
"""The g of `topk_operator`, by device."""


def topk_operator(numel: int, g: float) -> float:
    """Seconds of the top-k operator of a deep learning library: g x log2(x) for x elements.

    It sorts, whatever k is. Source: OMGS-SGD, model of the sparsification.

    Args:
        numel: x.
        g: seconds, of the device.
    """
    return g * numel * math.log2(numel) if numel > 1 else 0.0


# --- Scaling efficiency of frameworks, 4 nodes of 4 P40, 56 Gb/s InfiniBand [1711.05979] ---------

FRAMEWORK_EFFICIENCY = MappingProxyType(
    {
        ("CNTK", "AlexNet"): 0.55,
        ("CNTK", "GoogLeNet"): 0.675,
        ("CNTK", "ResNet-50"): 0.777,
        ("TensorFlow", "AlexNet"): 0.506,
        ("TensorFlow", "GoogLeNet"): 0.756,
        ("TensorFlow", "ResNet-50"): 0.522,
        ("MXNet", "GoogLeNet"): 0.356,
    }
)
"""By framework and network, at P = 16."""
