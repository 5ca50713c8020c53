"""What the ranks do together, besides exchanging gradients."""

import os
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from arguments import BadInput
from torch import nn

import ddl

Result = TypeVar("Result")


def on_all_ranks(action: Callable[[], Result]) -> Result:
    """Does it on every rank; if any of them finds bad input, all raise the same BadInput."""
    problem, result = None, None
    try:
        result = action()
    except BadInput as error:
        problem = str(error)
    problems = [text for text in ddl.gather_object(problem) if text is not None]
    if problems:
        raise BadInput(problems[0])
    return cast(Result, result)


def average_buffers(model: nn.Module) -> None:
    """Averages the statistics of batch norm over the ranks, all in one message."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    mean = ddl.allreduce_mean(torch.cat([buffer.flatten() for buffer in buffers]))
    parts = mean.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


def mean_over_ranks(value: float) -> float:
    return ddl.allreduce_mean(torch.tensor([value])).item()


def limit_threads() -> None:
    """Shares the cores of this machine between its ranks."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // ddl.local_size()))


def rank_by_launcher() -> str:
    """The rank that the launcher gave this process, for when nobody else can be asked."""
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0")
