"""One run of the convergence benchmark: P ranks as threads of this process, one model each.

The engine is the one that trains under MPI; only messages are copied within memory. At most as many
ranks as there are cores compute gradients at a time: more would only take each other's caches.
"""

from __future__ import annotations

import copy
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from convergence_powersgd import PowerSGD
from convergence_tasks import Recipe, Task
from torch import nn
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

import ddl
from ddl import kernels
from ddl.comm import Communicator, threads
from ddl.diagnostics import Diagnostics

TIMEOUT_SECONDS = 600.0
MOST_POINTS = 100  # of a training curve
JUDGED_AGAIN = 1.15  # times as many steps as at the time before: as fine early as late
LEAST_STEPS_BETWEEN = 10
MOST_SKIPPED_STEPS = 10  # after which a run has diverged
WARMUP_SHARE = 0.1  # of all steps, in which the learning rate rises
POWERSGD_RANK = 4

# Arguments of DistributedOptimizer by the name of a contestant.
SPARSE: dict[str, dict[str, str]] = {
    "topk": {"compressor": "topk"},
    "gtopk-butterfly": {"compressor": "gtopk", "collective": "butterfly"},
    "gtopk-exact": {"compressor": "gtopk", "collective": "exact"},
    "gaussiank": {"compressor": "gaussiank"},
    "gaussiank-gtopk": {"compressor": "gaussiank-gtopk", "collective": "butterfly"},
    "randomk": {"compressor": "randomk"},
}
DENSE, POWERSGD = "none", f"powersgd-{POWERSGD_RANK}"
CONTESTANTS = (DENSE, POWERSGD, *SPARSE)

Watch = Callable[[ddl.DistributedOptimizer], Diagnostics]


@dataclass(frozen=True)
class Cell:
    """What identifies a run: two of equal cells on equal data are the same run.

    Attributes:
        task: its name.
        compressor: one of CONTESTANTS.
        P: ranks.
        density: entries each rank sends / all; 1 where the compressor has no density.
        global_ratio: entries kept of the sum / entries each rank sends.
        seed: of weights and of the order of samples.
        batch_size: per rank.
        epochs: passes over the data.
        lr: peak learning rate, of all ranks.
        density_warmup: whether the published densities come first.
        wire: how entries travel, `plain` or `compact`.
    """

    task: str
    compressor: str
    P: int
    density: float
    global_ratio: float
    seed: int
    batch_size: int
    epochs: int
    lr: float
    density_warmup: bool
    wire: str


class _Rank:
    """What one rank trains with."""

    def __init__(self, cell: Cell, recipe: Recipe, model: nn.Module, comm: Communicator) -> None:
        self.model, self._cell, self._clip, self._comm = model, cell, recipe.clip, comm
        self.skipped_steps = 0
        sgd = torch.optim.SGD(
            model.parameters(),
            lr=cell.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )
        self.optimizer: torch.optim.Optimizer = sgd
        self._power = None
        if cell.compressor == POWERSGD:
            self._power = PowerSGD(model.parameters(), comm, rank=POWERSGD_RANK, seed=cell.seed)
            return
        options: dict[str, Any] = {"compressor": "none"}
        if cell.compressor != DENSE:  # ranks stand for machines of their own
            options = {
                **SPARSE[cell.compressor],
                "density": cell.density,
                "hierarchical": False,
            }
            if cell.compressor != "randomk":  # whose values are summed, and travel as they are
                options["wire"] = cell.wire
        if options.get("collective") == "exact":  # whose default is not 1
            options["global_density"] = min(1.0, cell.density * cell.global_ratio)
        if cell.density_warmup:
            options["density_warmup"] = ddl.DensityWarmup()
        self.optimizer = ddl.DistributedOptimizer(sgd, model.named_parameters(), **options)

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.optimizer, ddl.DistributedOptimizer):
            self.optimizer.set_epoch(epoch)

    def step(self) -> int:
        """Aggregates and steps; returns the bytes that this rank has sent."""
        if isinstance(self.optimizer, ddl.DistributedOptimizer):
            self.optimizer.synchronize()
            self._clip_gradients()
            self.optimizer.step()
            self.skipped_steps = self.optimizer.skipped_steps
            return self.optimizer.metrics.bytes_sent
        before = self._comm.bytes_sent
        assert self._power is not None
        self._power.aggregate()
        sent = self._comm.bytes_sent - before
        self._clip_gradients()
        self.optimizer.step()
        return sent

    def _clip_gradients(self) -> None:
        if self._clip is not None:
            clip_grad_norm_(self.model.parameters(), self._clip)

    def close(self) -> None:
        if isinstance(self.optimizer, ddl.DistributedOptimizer):
            self.optimizer.close()


def run_behind_bar(
    cell: Cell, task: Task, number: str, watch: Watch | None = None
) -> dict[str, Any]:
    """One run, behind a progress bar where there is a terminal; see `run`."""
    # One thread a rank: as many ranks as there are cores compute at a time.
    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    steps = cell.epochs * task.steps(cell.P, cell.batch_size)
    title = f"{number} {cell.task} {cell.compressor} P={cell.P} density={cell.density:g}"
    with tqdm(total=steps, desc=title, unit="step", leave=False, disable=None) as bar:
        return run(cell, task, on_step=bar.update, watch=watch)


def run(
    cell: Cell,
    task: Task,
    on_step: Callable[[], object] = lambda: None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train once.

    Args:
        cell: what to run.
        task: its task.
        on_step: is called after each step.
        watch: is given rank 0's optimizer before the first step, one that sparsifies; what it
            returns is closed after the last.

    Returns:
        For JSON: `curve`, training loss, mean over ranks and over the steps since the point before,
        at most 100 points, of which the last is `train_loss`; `validations`, at steps that grow by
        JUDGED_AGAIN, of a part of what is kept for judging, and at the end of all; both beside the
        step and the bytes sent so far, mean over ranks.

    Raises:
        ValueError: there are too few samples for a step.
    """
    steps_per_epoch = task.steps(cell.P, cell.batch_size)
    if steps_per_epoch == 0:
        raise ValueError(
            f"{task.samples} {task.unit} for {cell.P} ranks with batches of {cell.batch_size} make "
            "no step; use more samples, fewer ranks or smaller batches"
        )
    total_steps = cell.epochs * steps_per_epoch
    torch.manual_seed(cell.seed)
    first = task.make_model()
    computing = threading.Semaphore(len(os.sched_getaffinity(0)))

    def train(comm: Communicator) -> dict[str, Any]:
        rank = _Rank(cell, task.recipe, copy.deepcopy(first), comm)
        watched = None
        if watch and comm.rank == 0 and isinstance(rank.optimizer, ddl.DistributedOptimizer):
            watched = watch(rank.optimizer)
        losses, sent, validations = [], [], []
        step, judge_at = 0, LEAST_STEPS_BETWEEN

        def judge(most: int | None) -> None:
            judged = _judge(task, rank.model, comm, computing, most)
            validations.append({"step": step, **judged})

        for epoch in range(cell.epochs):
            rank.set_epoch(epoch)
            state = None
            for batch in task.batches(comm.rank, comm.size, cell.batch_size, cell.seed, epoch):
                for group in rank.optimizer.param_groups:
                    group["lr"] = cell.lr * warmup_then_cosine(step / total_steps)
                rank.optimizer.zero_grad()
                with computing:
                    loss, state = task.forward(rank.model, batch, state)
                    loss.backward()
                losses.append(loss.item())
                sent.append(rank.step())
                step += 1
                if comm.rank == 0:
                    on_step()
                if rank.skipped_steps > MOST_SKIPPED_STEPS:
                    break
                if step == judge_at and step < total_steps:
                    judge(task.judged_between)
                    judge_at = max(step + LEAST_STEPS_BETWEEN, int(JUDGED_AGAIN * step))
            if rank.skipped_steps > MOST_SKIPPED_STEPS:
                break
        judge(None)
        digest = ddl.parameters_digest(rank.model)
        if watched:
            watched.close()
        rank.close()
        return {"losses": losses, "sent": sent, "validations": validations, "digest": digest}

    begin = time.perf_counter()
    results = threads.run(cell.P, train, timeout=TIMEOUT_SECONDS)
    seconds = time.perf_counter() - begin
    row = _summary(cell, results)
    samples = row["steps"] / steps_per_epoch * task.samples
    return {**row, "seconds": seconds, f"seconds_per_1000_{task.unit}": 1000 * seconds / samples}


def warmup_then_cosine(progress: float) -> float:
    """Factor of the peak rate: 0 to 1 in the first tenth of a run, then along a cosine to 0."""
    if progress < WARMUP_SHARE:
        return (progress + 1e-3) / (WARMUP_SHARE + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))


@torch.no_grad()
def _judge(
    task: Task,
    model: nn.Module,
    comm: Communicator,
    computing: threading.Semaphore,
    most: int | None,
) -> dict[str, float]:
    """Loss and accuracy over what is kept for judging; averages the buffers of batch norm."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(ddl.allreduce_mean(buffer))
    model.eval()
    with computing:
        judged = task.judge(model, comm.rank, comm.size, most)
    model.train()
    everyone = ddl.gather_object(tuple(judged))
    loss, hits, count = (math.fsum(part) for part in zip(*everyone, strict=True))
    return {"loss": loss / count, "accuracy": hits / count}


def _summary(cell: Cell, results: list[dict[str, Any]]) -> dict[str, Any]:
    losses = torch.tensor([result["losses"] for result in results], dtype=torch.float64).mean(0)
    sent = torch.tensor([result["sent"] for result in results], dtype=torch.float64).mean(0)
    total = sent.cumsum(0)
    steps = len(losses)
    width = -(-steps // MOST_POINTS)
    curve = [
        {
            "step": end,
            "bytes": float(total[end - 1]),
            "loss": float(losses[max(0, end - width) : end].mean()),
        }
        for end in range(width, steps + 1, width)
    ]
    validations = [
        {**point, "bytes": float(total[point["step"] - 1])} for point in results[0]["validations"]
    ]
    return {
        "cell": asdict(cell),
        "steps": steps,
        "curve": curve,
        "validations": validations,
        "train_loss": curve[-1]["loss"],
        **{f"val_{key}": validations[-1][key] for key in ("loss", "accuracy")},
        "bytes_per_step": float(total[-1]) / steps,
        "ranks_agree": len({result["digest"] for result in results}) == 1,
    }
