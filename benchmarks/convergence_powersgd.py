"""PowerSGD, the rival that sends low-rank factors instead of entries, over ddl's communicators.

Vogels et al. 2019, arXiv 1905.13727, Algorithm 1 and 2. For each gradient M with its error added,
n x m once all but the first dimension are flattened:

1. P = M Q, averaged over the ranks, then made orthonormal;
2. Q = M^T P, averaged; it is also the Q that the next step starts with;
3. the average is P Q^T; what this rank's M has beyond it is its error.

Vectors, and matrices of which the factors would be more than half, are averaged whole. torch's
DistributedDataParallel has the same as a hook, for processes; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddl.collectives import dense
from ddl.comm import Communicator

LEAST_COMPRESSION = 2  # torch's min_compression_rate


@dataclass
class _Factored:
    """A gradient that travels as factors."""

    parameter: nn.Parameter
    Q: Tensor  # float32 [m, rank]
    error: Tensor  # float32 [n, m]


class PowerSGD:
    """Replaces every gradient of a model by PowerSGD's average over ranks."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], comm: Communicator, *, rank: int = 4, seed: int
    ) -> None:
        """Without errors yet.

        Args:
            parameters: float32, on the CPU, the same on every rank.
            comm: the ranks.
            rank: of the factors.
            seed: of the first Q, the same on every rank.
        """
        self._comm = comm
        self._factored: list[_Factored] = []
        self._whole: list[nn.Parameter] = []
        generator = torch.Generator().manual_seed(seed)
        for parameter in reversed(list(parameters)):  # as torch's DDP orders them
            n, m = parameter.shape[0], parameter[0].numel()
            r = min(n, m, rank)
            if (n + m) * r * LEAST_COMPRESSION < n * m:
                Q = torch.randn(1, m, r, generator=generator)[0]
                self._factored.append(_Factored(parameter, Q, torch.zeros(n, m)))
            else:
                self._whole.append(parameter)

    @torch.no_grad()
    def aggregate(self) -> None:
        """Make every `grad` the average. Collective."""
        for parameter, average in zip(
            self._whole, self._average([_grad(p) for p in self._whole]), strict=True
        ):
            parameter.grad = average
        matrices = [_grad(f.parameter).view(f.error.shape).add_(f.error) for f in self._factored]
        Ps = self._average(
            [M @ torch.linalg.qr(f.Q).Q for M, f in zip(matrices, self._factored, strict=True)]
        )
        Ps = [torch.linalg.qr(P).Q for P in Ps]
        Qs = self._average([M.T @ P for M, P in zip(matrices, Ps, strict=True)])
        for factored, M, P, Q in zip(self._factored, matrices, Ps, Qs, strict=True):
            average = P @ Q.T
            factored.Q = Q
            torch.sub(M, average, out=factored.error)
            factored.parameter.grad = average.view_as(factored.parameter)

    def _average(self, tensors: list[Tensor]) -> list[Tensor]:
        """Averages over ranks, as new tensors, all in one message."""
        if not tensors:
            return []
        together = torch.cat([tensor.flatten() for tensor in tensors]) / self._comm.size
        dense.all_reduce_(self._comm, together)
        parts = together.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _grad(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.contiguous()
