"""What the engine's collectives are measured against, written from their descriptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddl import kernels
from ddl.collectives import Collected, messages
from ddl.comm import Communicator
from ddl.comm.mpi import load_mpi
from ddl.sparse import SparseVector


def published_tree(comm: Communicator, local: SparseVector, k: int) -> Collected:
    """gTop-k as it was first released: up a binomial tree in numpy, then a broadcast.

    1. log2 P rounds, a barrier after each; indices and values travel as one array of float64, 16
       bytes an entry.
    2. A merge intersects the indices, adds what is common, concatenates, and keeps the k largest
       by a sort.
    3. What a rank picked counts as delivered if its index is in the result. That is wrong where
       one merge cut an entry whose index came through another: its mass is lost.

    Raises:
        ValueError: the number of ranks is no power of two.
    """
    rank, P = comm.rank, comm.size
    if P & (P - 1):
        raise ValueError(f"the published tree needs a power of two of ranks, got {P}")
    values, indices = local.values.numpy(), local.indices.numpy()
    distance = 1
    while distance < P:
        if rank % (2 * distance) == 0:
            theirs = comm.recv(rank + distance).numpy().view(np.float64)
            count = theirs.size // 2
            values, indices = _merge(values, indices, theirs[:count], theirs[count:], k)
        elif rank % (2 * distance) == distance:
            comm.send(_joined(values, indices), rank - distance)
        messages.barrier(comm)
        distance *= 2
    result = messages.broadcast(comm, _joined(values, indices) if rank == 0 else None)
    both = result.numpy().view(np.float64)
    count = both.size // 2
    order = np.argsort(both[count:])
    total = SparseVector(
        torch.from_numpy(both[count:][order].astype(np.int32)),
        torch.from_numpy(both[:count][order].astype(np.float32)),
        local.numel,
    )
    _, mine, _ = np.intersect1d(
        local.indices.numpy(), total.indices.numpy(), assume_unique=True, return_indices=True
    )
    included = torch.zeros(local.count, dtype=torch.bool)
    included[torch.from_numpy(mine)] = True
    return Collected(total, included, finite=True)


def _joined(values: np.ndarray, indices: np.ndarray) -> Tensor:
    both = np.concatenate([values.astype(np.float64), indices.astype(np.float64)])
    return torch.from_numpy(both.view(np.uint8))


def _merge(
    values: np.ndarray, indices: np.ndarray, values_2: np.ndarray, indices_2: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    _, mine, theirs = np.intersect1d(indices, indices_2, assume_unique=True, return_indices=True)
    values = values.astype(np.float64)
    values[mine] += values_2[theirs]
    only_theirs = np.ones(indices_2.size, dtype=bool)
    only_theirs[theirs] = False
    values = np.concatenate([values, values_2[only_theirs]])
    indices = np.concatenate([indices, indices_2[only_theirs]])
    kept = np.argsort(np.abs(values))[::-1][:k]
    return values[kept], indices[kept]


class MPI:
    """What MPI's own collectives do with the same data, its waiting included."""

    def __init__(self) -> None:
        """Use all processes that mpirun started."""
        self._mpi: Any = load_mpi()
        self._world = self._mpi.COMM_WORLD

    def all_reduce_(self, dense: Tensor) -> None:
        """Replace a float32 tensor by its sum over ranks."""
        self._world.Allreduce(self._mpi.IN_PLACE, dense.numpy())

    def all_gather(self, local: SparseVector) -> Collected:
        """Gather 8 bytes an entry, the same count on every rank, and add up as the engine does."""
        message = torch.cat([local.indices, local.values.view(torch.int32)])
        gathered = torch.empty((self._world.Get_size(), message.numel()), dtype=torch.int32)
        self._world.Allgather(message.numpy(), gathered.numpy())
        halves = [part.split(local.count) for part in gathered]
        vectors = [(indices, values.view(torch.float32)) for indices, values in halves]
        while len(vectors) > 1:
            pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
            vectors = [_sum(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        total = SparseVector(*vectors[0], local.numel)
        return Collected(total, torch.ones(local.count, dtype=torch.bool), finite=True)


def _sum(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    merged = kernels.merge(*a, *b)
    return merged.indices, merged.values
