"""The four frameworks of the papers, as schedules (arXiv 1711.05979).

What the papers explain by, for each framework: whether the exchange of gradients overlaps the
backward pass, what carries it, and where samples come from. Input is taken to overlap computation
in all four.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddl.perfmodel import plans, schedules
from ddl.perfmodel.iteration import Iteration, IterationProfile
from ddl.perfmodel.plans import Seconds


@dataclass(frozen=True)
class Framework:
    """A framework as configured in the papers.

    Attributes:
        name: of the framework.
        overlap_backward: whether gradients are exchanged during the backward pass (WFBP).
        transport: what exchanges them.
        samples: their format on disk, and what reads them.
        decodes: whether CPU cores decode images in every epoch, which `readers` of the
            profile share; otherwise samples are stored decoded.
    """

    name: str
    overlap_backward: bool
    transport: str
    samples: str
    decodes: bool

    def iterate(self, profile: IterationProfile, communicate: Seconds) -> Iteration:
        """An iteration in this framework; layers are exchanged one by one.

        Args:
            profile: of one worker.
            communicate: seconds that its transport takes for so many elements.
        """
        return schedules.iterate(
            profile,
            communicate,
            plans.layerwise(len(profile.layers)),
            name=self.name,
            overlap_backward=self.overlap_backward,
        )


CAFFE_MPI = Framework("Caffe-MPI", True, "NCCL 2", "LMDB, prefetched", decodes=False)
CNTK = Framework("CNTK", False, "NCCL 2", "images", decodes=True)
MXNET = Framework("MXNet", True, "key-value store over TCP", "RecordIO", decodes=True)
TENSORFLOW = Framework("TensorFlow", True, "gRPC parameter server", "TFRecord", decodes=True)

FRAMEWORKS = (CAFFE_MPI, CNTK, MXNET, TENSORFLOW)


def implied_exposed(t_1: float, efficiency: float) -> float:
    """Seconds of exchange that must have been exposed for a measured scaling efficiency.

    t_1 (1/efficiency - 1): what an iteration became longer by, if input is hidden
    (arXiv 1711.05979, definition of efficiency).

    Args:
        t_1: seconds of an iteration on one worker.
        efficiency: measured, t_1 / t_P.

    Raises:
        ValueError: an efficiency outside (0, 1], or a negative time.
    """
    if not 0 < efficiency <= 1 or t_1 < 0:
        raise ValueError(
            f"efficiency must lie in (0, 1] and t_1 be at least 0 s, got {efficiency} and {t_1}"
        )
    return t_1 * (1 / efficiency - 1)
