"""Collectives of plain messages and small objects; what the others are made of.

Messages are uint8 tensors on the CPU, of lengths that may differ from rank to rank.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from ddl import streams
from ddl.comm import Communicator, frames

# Longer messages fill a link for longer than a word back takes.
TURN_BYTES = 65536


def all_gather(comm: Communicator, message: Tensor) -> list[Tensor]:
    """The message of every rank, in rank order, on every rank.

    Bruck's algorithm, for any P: in ceil(log2 P) rounds each rank passes on all it has, to ranks
    at doubling distances. A rank sends P - 1 messages' bytes, and 8 for the length of each.
    """
    blocks = [message]  # of ranks rank, rank + 1, ... (mod P)
    while len(blocks) < comm.size:
        distance = len(blocks)
        count = min(distance, comm.size - distance)
        frame = comm.sendrecv(
            frames.join(blocks[:count]),
            dest=(comm.rank - distance) % comm.size,
            source=(comm.rank + distance) % comm.size,
        )
        blocks += frames.split(frame, count)
    first = -comm.rank % comm.size
    return blocks[first:] + blocks[:first]


def broadcast(comm: Communicator, message: Tensor | None, root: int = 0) -> Tensor:
    """The root's message on every rank, down a binomial tree in ceil(log2 P) rounds."""
    place = (comm.rank - root) % comm.size
    distance = 1
    while distance < comm.size and not place & distance:
        distance *= 2
    if place:
        message = take_turn(comm, (comm.rank - distance) % comm.size, distance)
    if message is None:
        raise ValueError(f"the root of a broadcast needs a message, got None on rank {root}")
    while distance > 1:
        distance //= 2
        if place + distance < comm.size:
            send_in_turn(comm, message, (comm.rank + distance) % comm.size, distance)
    return message


def send_in_turn(comm: Communicator, message: Tensor, child: int, distance: int) -> None:
    """Send to one of the children of a binomial tree, farthest first, before the next one's turn.

    Copies sent at once would share the link and all arrive when the last one does, while the
    subtrees below wait: l (l+1) / 2 messages' time down l levels instead of l. So a child says
    when it has a long message, but for the nearest, after which nobody waits.

    Args:
        comm: the ranks.
        message: uint8.
        child: the rank that calls `take_turn`.
        distance: from here to there in the tree, a power of two.
    """
    comm.send(message, child)
    if _in_turn(message, distance):
        comm.recv(child)


def take_turn(comm: Communicator, parent: int, distance: int) -> Tensor:
    """Receive what the parent sends by `send_in_turn`. The distance is the same as there."""
    message = comm.recv(parent)
    if _in_turn(message, distance):
        comm.send(torch.empty(0, dtype=torch.uint8), parent)
    return message


def _in_turn(message: Tensor, distance: int) -> bool:
    return distance > 1 and message.numel() >= TURN_BYTES


def broadcast_(comm: Communicator, tensor: Tensor, root: int = 0) -> None:
    """Overwrite `tensor` (same shape and dtype on every rank) by the root's, to the bit."""
    is_root = comm.rank == root
    message = broadcast(comm, bytes_of(tensor) if is_root else None, root)
    if not is_root:
        expected = tensor.numel() * tensor.element_size()
        if message.numel() != expected:
            raise ValueError(
                f"rank {root} sent {message.numel()} bytes, expected {expected} for a tensor of "
                f"shape {tuple(tensor.shape)} on rank {comm.rank}; give every rank the same model"
            )
        flat = message.view(tensor.dtype)
        tensor.detach().copy_(flat.view(tensor.shape))


def barrier(comm: Communicator) -> None:
    """Return once every rank has come."""
    all_gather(comm, torch.empty(0, dtype=torch.uint8))


def gather_objects(comm: Communicator, value: Any) -> list[Any]:
    """The object of every rank, in rank order, on every rank; for small things such as names."""
    return [_load(message) for message in all_gather(comm, _dump(value))]


def broadcast_object(comm: Communicator, value: Any, root: int = 0) -> Any:
    """The root's object on every rank; `value` is ignored elsewhere."""
    return _load(broadcast(comm, _dump(value) if comm.rank == root else None, root))


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's elements as a uint8 message on the CPU; shares memory where it can."""
    return streams.to_host(tensor.detach().contiguous()).reshape(-1).view(torch.uint8)


def _dump(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _load(message: Tensor) -> Any:
    return pickle.loads(message.numpy().tobytes())
