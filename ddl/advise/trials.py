"""Real steps with each candidate, to hold predictions against."""

from __future__ import annotations

import time

import torch

from ddl.advise.candidates import Candidate
from ddl.advise.computation import LEARNING_RATE, MOMENTUM
from ddl.advise.together import Samples, spread
from ddl.advise.workloads import Workload
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.optimizer import DistributedOptimizer


class Trial:
    """Trains a copy of the model with one candidate."""

    def __init__(
        self,
        candidate: Candidate,
        workload: Workload,
        density: float,
        bucket_bytes: int,
        comm: Communicator,
    ) -> None:
        """Wrap an optimizer as a user would. Collective.

        Args:
            candidate: compressor and collective.
            workload: its model is used up.
            density: fraction of entries kept.
            bucket_bytes: see `ddl.DistributedOptimizer`.
            comm: the ranks.
        """
        self._workload = workload
        self._comm = comm
        self._samples = Samples(comm)
        model = workload.model
        self._optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM),
            model.named_parameters(),
            **candidate.arguments,
            density=density,
            bucket_bytes=bucket_bytes,
            unused_parameters="zero",
            comm=comm,
        )

    def run(self, steps: int, count: bool = True) -> None:
        """One step to warm up, then `steps` that are timed. Collective.

        Args:
            steps: at least 1.
            count: whether they enter the median.
        """
        self._step()
        messages.barrier(self._comm)
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        if count:
            self._samples.add([(time.perf_counter() - begin) / steps])

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._workload.loss(self._workload.make_batch()).backward()
        self._optimizer.step()

    @property
    def seconds(self) -> float:
        """Of a step, the median over rounds; the same on every rank."""
        return self._samples.medians()[0]

    @property
    def settled(self) -> bool:
        """Whether that is known well enough: see `Samples.settled`."""
        return self._samples.settled

    @property
    def spread(self) -> float:
        """Of the rounds: see `together.spread`."""
        return spread([row[0] for row in self._samples.rows])

    def close(self) -> None:
        """Free the communicators. Collective."""
        self._optimizer.close()
