"""Sums of dense tensors over all ranks, to the same bit on each."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ddl import streams
from ddl.collectives import messages
from ddl.comm import Communicator

# Up to this many bytes the sum is latency: gather all and add, in log2 P rounds instead of 2 (P-1).
SMALL_BYTES = 4096


def all_reduce_(comm: Communicator, tensor: Tensor) -> None:
    """Replace a tensor by its sum over ranks, bit-identical on every rank.

    Large tensors go around a ring, twice: in P - 1 steps each rank comes to own the sum of one of P
    chunks, in P - 1 more the chunks are passed on. A rank sends 2 (P-1)/P of the tensor's bytes,
    which is the least a dense sum can do. Every chunk is added up in one place and copied from
    there, so ranks cannot differ.

    Args:
        comm: the ranks.
        tensor: same shape and dtype on every rank, contiguous; sums are in its dtype.
    """
    if comm.size == 1:
        return
    host = streams.to_host(tensor.detach()).reshape(-1)
    if host.numel() * host.element_size() <= SMALL_BYTES:
        gathered = messages.all_gather(comm, messages.bytes_of(host))
        parts = [part.clone().view(host.dtype) for part in gathered]
        total = parts[0]
        for part in parts[1:]:
            total += part
        host.copy_(total)
    else:
        _ring(comm, host)
    if host.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(host.view(tensor.shape))


def _ring(comm: Communicator, host: Tensor) -> None:
    P, rank = comm.size, comm.rank
    bounds = [host.numel() * part // P for part in range(P + 1)]
    chunks = [host[low:high] for low, high in pairwise(bounds)]
    right, left = (rank + 1) % P, (rank - 1) % P

    def pass_on(sent: int) -> Tensor:
        received = comm.sendrecv(chunks[sent % P].view(torch.uint8), right, left)
        return received.view(host.dtype)

    for step in range(P - 1):  # chunk c starts at rank c and ends, summed, at rank c - 1
        chunks[(rank - step - 1) % P].add_(pass_on(rank - step))
    for step in range(P - 1):
        chunks[(rank - step) % P].copy_(pass_on(rank + 1 - step))


def dense_bytes(numel: int, element_size: int, P: int) -> int:
    """Bytes a rank sends, on average, in a ring all-reduce: 2 (P-1)/P of the tensor's."""
    return 2 * (P - 1) * numel * element_size // P
