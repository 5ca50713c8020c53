"""Collectives whose vectors never leave the device: what they send and return, and the simple ones.

Nothing here waits for the device or reads from it. So counts are not known on the host: vectors
have a fixed capacity and are padded behind their last entry (see ddl.kernels.launch), and the time
of a collective does not depend on how many entries were found. Results are the same to the bit as
those of the collectives of the same name that go through the host.

A message is one int32 tensor: a header of HEADER words, the indices, and the values bit by bit.
The header says whether all gradients behind the message were finite, and the label under which it
was sent, so that ranks that are out of step are found out, if only at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ddl.comm.nccl import NcclCommunicator
from ddl.kernels import CudaOperations
from ddl.kernels.launch import NONFINITE, Picks, Workspace

HEADER = 2


class Padded(NamedTuple):
    """A sparse vector on the device.

    Attributes:
        indices: int32 [capacity], ascending, padded behind.
        values: float32 [capacity], 0 where padded.
    """

    indices: Tensor
    values: Tensor


class DeviceCollected(NamedTuple):
    """The outcome of a collective on one rank, all of it still on the device.

    Attributes:
        total: the aggregated sum over ranks, the same to the bit on every rank.
        included: bool [capacity of the picks]: which of this rank's picks `total` contains;
            anything where they are padded. None for all of them.
        finite: int32 [1], 1 where every rank's gradient was finite, else 0; the same on every rank.
        labels: int32 [len(peers)], under which labels the messages of `peers` were sent.
        peers: ranks that this one has received messages from.
    """

    total: Padded
    included: Tensor | None
    finite: Tensor
    labels: Tensor
    peers: Sequence[int]


class DeviceCollective(Protocol):
    """Aggregates one sparse vector per rank without leaving the device."""

    def __call__(
        self,
        comm: NcclCommunicator,
        operations: CudaOperations,
        picks: Picks,
        k: int,
        workspace: Workspace,
    ) -> DeviceCollected:
        """Aggregate, on the communicator's stream, which must be the current one.

        Args:
            comm: the ranks, any number of them; its label goes into the messages.
            operations: of the device.
            picks: this rank's vector, of the same capacity on every rank, any count; unchanged.
            k: entries to keep of the sum, for those collectives that keep a part.
            workspace: scratch memory, used on this stream only.
        """


def all_gather(
    comm: NcclCommunicator,
    operations: CudaOperations,
    picks: Picks,
    k: int,
    workspace: Workspace,
) -> DeviceCollected:
    """The sum of all ranks' vectors, whole; `k` is not used. See `DeviceCollective`.

    A rank sends (P-1) times its capacity; then each adds up the P vectors, pairwise, in the order
    of ddl.collectives.allgather.
    """
    message = pack(comm, all_finite(picks), picks)
    gathered = message.new_empty(comm.size * message.numel())
    comm.all_gather(message, gathered)
    rows = gathered.view(comm.size, -1)
    vectors = [vector_of(row) for row in rows]
    while len(vectors) > 1:
        left_over = vectors[len(vectors) // 2 * 2 :]
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        vectors = [_add(operations, a, b, workspace) for a, b in pairs] + left_over
    return DeviceCollected(
        total=vectors[0],
        included=None,
        finite=rows[:, 0].amin(0, keepdim=True),
        labels=rows[:, 1],
        peers=range(comm.size),
    )


def aligned_all_reduce(
    comm: NcclCommunicator,
    operations: CudaOperations,
    picks: Picks,
    k: int,
    workspace: Workspace,
) -> DeviceCollected:
    """The sum of vectors that have the same indices on every rank; only values travel.

    `k` is not used. See `DeviceCollective`.
    """
    values = picks.values.clone()
    finite, labels = all_reduce_(comm, values, all_finite(picks))
    return DeviceCollected(
        total=Padded(picks.indices, values),
        included=None,
        finite=finite,
        labels=labels,
        peers=range(comm.size),
    )


def all_reduce_(comm: NcclCommunicator, tensor: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Replace a tensor by its sum over ranks.

    Args:
        comm: the ranks.
        tensor: contiguous, of the same length and dtype on every rank.
        finite: int32 [1], 1 or 0.

    Returns:
        int32 [1], 1 where `finite` was 1 on every rank, else 0, and int32 [P], the labels of all
        ranks' calls.
    """
    # Each rank fills in its own two numbers, so that sums bring them all together.
    told = torch.zeros(2, comm.size, dtype=torch.int32, device=tensor.device)
    told[0, comm.rank].copy_(finite[0])
    told[1, comm.rank].fill_(comm.label)
    comm.all_reduce_(tensor, told)
    return told[0].amin(0, keepdim=True), told[1]


def all_finite(picks: Picks) -> Tensor:
    """int32 [1]: 1 where all of this rank's gradient was finite, else 0."""
    return (picks.report[NONFINITE : NONFINITE + 1] == 0).to(torch.int32)


def pack(
    comm: NcclCommunicator, finite: Tensor, vector: Padded | Picks, more: Tensor | None = None
) -> Tensor:
    """int32 [HEADER + 2 * capacity + length of more]: a message; `more` is int32, for its end."""
    label = torch.full_like(finite, comm.label)
    parts = [finite, label, vector.indices, vector.values.view(torch.int32)]
    return torch.cat(parts if more is None else [*parts, more])


def message_length(capacity: int) -> int:
    """Words of a message without more at its end."""
    return HEADER + 2 * capacity


def finite_of(message: Tensor) -> Tensor:
    """int32 [1]: whether all gradients behind a message were finite, as a view of it."""
    return message[:1]


def label_of(message: Tensor) -> Tensor:
    """int32 [1]: the sender's label, as a view of the message."""
    return message[1:HEADER]


def vector_of(message: Tensor) -> Padded:
    """The vector of a message with nothing more at its end, as views of it."""
    capacity = (message.numel() - HEADER) // 2
    values = message[HEADER + capacity :].view(torch.float32)
    return Padded(message[HEADER : HEADER + capacity], values)


def survivors(alive: Tensor, fate: Tensor) -> Tensor:
    """Which entries of a merge's input are alive, given which of its output are.

    Args:
        alive: bool [capacity of the output].
        fate: int32 [capacity of the input], position in the output, -1 where dropped or padded.

    Returns:
        bool [capacity of the input].
    """
    if alive.numel() == 0:
        return torch.zeros_like(fate, dtype=torch.bool)
    return alive[fate.clamp(min=0).to(torch.int64)] & (fate >= 0)


def _add(operations: CudaOperations, a: Padded, b: Padded, workspace: Workspace) -> Padded:
    everything = a.indices.numel() + b.indices.numel()
    merged = operations.launch_merge(*a, *b, everything, workspace)
    return Padded(merged.indices, merged.values)
