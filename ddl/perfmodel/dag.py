"""An iteration as a graph of tasks on resources, and the clock that runs it.

A task starts when its resource is free and all tasks before it are done; a resource takes its tasks
in the order of the list. So the model of S-SGD as a directed acyclic graph (arXiv 1805.03812; arXiv
1711.05979, performance models) can be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A node of the graph.

    Attributes:
        name: what is done, such as "backward conv1".
        resource: what it occupies alone while it runs, such as "compute" or "network".
        seconds: how long it takes.
        after: places, in the list of tasks, of those that must be done before; all smaller than
            its own.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """A task with its times, in seconds from the start of the iteration."""

    task: Task
    start: float
    end: float


def run(tasks: Sequence[Task]) -> tuple[Span, ...]:
    """Give every task its start and end, each as early as the order of its resource allows.

    Args:
        tasks: in an order in which every task comes after those it waits for; tasks of one
            resource run in this order.

    Returns:
        One span a task, in the order of `tasks`.

    Raises:
        ValueError: a task waits for one that does not come before it, or lasts less than 0 s.
    """
    free: dict[str, float] = {}
    spans: list[Span] = []
    for place, task in enumerate(tasks):
        if not task.seconds >= 0:
            raise ValueError(f"task {task.name!r} lasts {task.seconds} s, expected at least 0")
        start = free.get(task.resource, 0.0)
        for earlier in task.after:
            if not 0 <= earlier < place:
                raise ValueError(
                    f"task {task.name!r} at place {place} waits for place {earlier}, expected one "
                    "that comes before it"
                )
            start = max(start, spans[earlier].end)
        end = free[task.resource] = start + task.seconds
        spans.append(Span(task, start, end))
    return tuple(spans)


def critical_path(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The chain of tasks that decides when the last one ends, first to last.

    Shortening any other task changes nothing. Where several chains are equally long, one of them.

    Args:
        spans: what `run` returned.
    """
    if not spans:
        return ()
    # What a span waited for: the previous task of its resource, and its `after`.
    previous: dict[str, int] = {}
    before: list[list[int]] = []
    for place, span in enumerate(spans):
        waited = [*span.task.after]
        if span.task.resource in previous:
            waited.append(previous[span.task.resource])
        previous[span.task.resource] = place
        before.append(waited)
    place = max(range(len(spans)), key=lambda index: spans[index].end)
    path = [place]
    while before[place] and spans[place].start > 0:
        place = max(before[place], key=lambda index: spans[index].end)
        path.append(place)
    return tuple(spans[index] for index in reversed(path))
