"""Bring all ranks to the same parameters, and check that they still have them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddl.collectives import dense, messages
from ddl.comm import Communicator
from ddl.errors import CommunicationError
from ddl.world import communicator

Tensors = nn.Module | Mapping[str, Any] | Iterable[tuple[str, Tensor]]


def broadcast_parameters(
    tensors: Tensors, root: int = 0, *, comm: Communicator | None = None
) -> None:
    """Overwrite parameters and buffers by those of one rank, to the bit. Collective.

    Args:
        tensors: a module (its whole state), a state dict, or pairs of name and tensor; the same
            names and shapes on every rank. What is not a tensor is left alone.
        root: the rank whose values all get.
        comm: the ranks; default the job's.
    """
    comm = communicator() if comm is None else comm
    with doing(comm, "ddl.broadcast_parameters"):
        for _, tensor in _named(tensors):
            messages.broadcast_(comm, tensor, root)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root: int = 0, *, comm: Communicator | None = None
) -> None:
    """Overwrite an optimizer's state (momentum, steps, learning rates) by one rank's. Collective.

    Ranks whose optimizer has no state yet get it whole.
    """
    comm = communicator() if comm is None else comm
    if comm.size > 1:
        with doing(comm, "ddl.broadcast_optimizer_state"):
            state = messages.broadcast_object(comm, _on_cpu(optimizer.state_dict()), root)
        if comm.rank != root:
            optimizer.load_state_dict(state)


def broadcast_object(value: Any, root: int = 0) -> Any:
    """One rank's picklable object on every rank; for small things. Collective."""
    with doing(communicator(), "ddl.broadcast_object") as comm:
        return messages.broadcast_object(comm, value, root)


def gather_object(value: Any) -> list[Any]:
    """Every rank's picklable object, in rank order, on every rank. Collective."""
    with doing(communicator(), "ddl.gather_object") as comm:
        return messages.gather_objects(comm, value)


def allreduce_mean(tensor: Tensor) -> Tensor:
    """The average of a tensor over ranks, as a new tensor, bit-identical everywhere. Collective.

    Args:
        tensor: floating point; same shape and dtype on every rank; unchanged.

    Raises:
        ValueError: not a tensor of floating-point numbers.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"expected a tensor of floating-point numbers, got {what}; use .float()")
    with doing(communicator(), "ddl.allreduce_mean") as comm:
        average = tensor.detach().clone(memory_format=torch.contiguous_format) / comm.size
        dense.all_reduce_(comm, average)
    return average


def barrier() -> None:
    """Return once every rank has come. Collective."""
    with doing(communicator(), "ddl.barrier") as comm:
        messages.barrier(comm)


def parameters_digest(tensors: Tensors) -> str:
    """SHA-256 over the bytes of a module's parameters (or of the given tensors), on this rank."""
    pairs = tensors.named_parameters() if isinstance(tensors, nn.Module) else _named(tensors)
    digest = hashlib.sha256()
    for name, tensor in pairs:
        digest.update(name.encode())
        digest.update(messages.bytes_of(tensor).numpy().data)
    return digest.hexdigest()


@contextmanager
def doing(comm: Communicator, what: str) -> Iterator[Communicator]:
    """Say in messages what the ranks are at."""
    before, comm.doing = comm.doing, what
    try:
        yield comm
    except CommunicationError as error:
        raise type(error)(f"{what}: {error}") from error
    finally:
        comm.doing = before


def _named(tensors: Tensors) -> Iterable[tuple[str, Tensor]]:
    if isinstance(tensors, nn.Module):
        tensors = tensors.state_dict()
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return [(name, tensor) for name, tensor in pairs if isinstance(tensor, Tensor)]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_on_cpu(entry) for entry in value]
    return value
