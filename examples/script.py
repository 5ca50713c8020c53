"""What the training scripts have in common: start and end, the wrapper, figures of the engine."""

import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep
from typing import Any, Protocol

import torch
from arguments import BadInput, one_line
from ranks import mean_over_ranks, rank_by_launcher
from run_log import RunLog, continued
from torch import nn

import ddl
from ddl.diagnostics import Diagnostics

logger = logging.getLogger("script")


class Trainer(Protocol):
    """What `run_script` runs on each rank."""

    args: Namespace

    def run(self) -> bool:
        """Trains; returns whether all ranks hold the same parameters."""


def run_script(name: str, make_trainer: Callable[[], Trainer]) -> int:
    """Joins the job, trains, and leaves; returns the exit code.

    Args:
        name: of the script, for messages.
        make_trainer: reads the command line; raises BadInput on every rank if it is bad.
    """
    try:
        ddl.init()
    except (ddl.DDLError, ValueError) as problem:
        if rank_by_launcher() == "0":
            print(f"{name}: {one_line(problem)}", file=sys.stderr)
        return 2
    try:
        trainer = make_trainer()
    except BadInput as problem:
        if ddl.rank() == 0:
            print(f"{name}: {problem}", file=sys.stderr)
        return 2
    level = logging.INFO if ddl.rank() == 0 else logging.WARNING
    logging.basicConfig(format="%(message)s", level=level)
    if trainer.args.recipe is not None:
        logger.info("%s", trainer.args.recipe)
    try:
        agree = trainer.run()
    except ddl.GradientError as problem:  # a model that leaves a parameter out
        sleep(ddl.rank() and 2)  # the other ranks most likely found the same: rank 0 speaks for all
        ddl.communicator().abort(one_line(problem), status=2)
    ddl.shutdown()
    return 0 if agree else 1


def wrap(
    optimizer: torch.optim.Optimizer, model: nn.Module, args: Namespace
) -> ddl.DistributedOptimizer:
    """The optimizer, wrapped as the arguments of `add_compression` say.

    Raises:
        BadInput: they do not fit together.
    """
    try:
        return ddl.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compressor=args.compressor,
            density=args.density,
            density_warmup=ddl.DensityWarmup(args.density_warmup),
            global_density=args.global_density,
            collective=args.collective,
            wire=args.wire,
            hierarchical={"auto": None, "yes": True, "no": False}[args.hierarchical],
            bucket_bytes=int(args.bucket_mb * 2**20),
            dense_below=args.dense_below,
            timeline=args.timeline,
        )
    except ValueError as error:
        raise BadInput(one_line(error)) from error


def watch(
    optimizer: ddl.DistributedOptimizer, args: Namespace, folder: Path | None
) -> Diagnostics | None:
    """Diagnostics of this rank, if they are wanted and it is the one that writes.

    Raises:
        BadInput: there is nothing to look at.
    """
    if not args.diagnostics_every or folder is None:
        return None
    try:
        return Diagnostics(
            optimizer, every=args.diagnostics_every, directory=folder / "diagnostics"
        )
    except ValueError as error:
        raise BadInput(one_line(error)) from error


def open_log(args: Namespace, name: str, step: int) -> RunLog:
    """This rank's log of a run, in a folder of this name if the arguments give none.

    Args:
        args: of the run; with --resume the log of the steps before is kept.
        name: of model and data.
        step: steps taken before.

    Raises:
        BadInput: the folder cannot be written.
    """
    folder = args.log_dir or Path("logs") / f"{name}-{args.compressor}-P{ddl.size()}"
    if ddl.rank() != 0:
        return RunLog(None)
    return continued(folder, step) if args.resume else RunLog(folder)


def choose_device(args: Namespace) -> torch.device:
    if args.no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", ddl.local_rank() % torch.cuda.device_count())


def last_step(args: Namespace, steps_per_epoch: int) -> int:
    """The step to end after, counted from 1."""
    end = args.epochs * steps_per_epoch
    return min(end, args.max_steps or end)


def per_second(amount: float, step_seconds: Sequence[float]) -> float:
    """Rate of what a step gets through; the first also compiles, allocates and starts threads."""
    seconds = step_seconds[1:] or step_seconds
    return amount * len(seconds) / sum(seconds)


def report(
    own: dict[str, Any],
    model: nn.Module,
    optimizer: ddl.DistributedOptimizer,
    log: RunLog,
    args: Namespace,
) -> bool:
    """Tells on rank 0 where the time went, then the summary, as summary.json has it. Collective.

    Args:
        own: what the script has to say itself.
        model: that was trained.
        optimizer: that trained it.
        log: of this rank.
        args: of the run.

    Returns:
        Whether all ranks hold the same parameters.
    """
    logger.info("%s", ddl.metrics.summary(optimizer))
    engine = engine_summary(model, optimizer, log, args)
    text = log.finish({**own, **engine})
    if ddl.rank() == 0:
        print(text, flush=True)
    return engine["parameters_agree"]


def engine_summary(
    model: nn.Module, optimizer: ddl.DistributedOptimizer, log: RunLog, args: Namespace
) -> dict[str, Any]:
    """For summary.json: how gradients were aggregated, and whether ranks agree. Collective."""
    digests = ddl.gather_object(ddl.parameters_digest(model))
    return {
        "recipe": args.recipe and args.recipe.as_dict(),
        "P": ddl.size(),
        "compressor": args.compressor,
        "collective": optimizer.compressor.collective_name,
        "wire": optimizer.compressor.wire.name,
        "density": args.density,
        "global_density": args.global_density,
        "density_actual": log.mean("comm/density_actual"),
        "bytes_sent_per_step": mean_over_ranks(log.mean("comm/bytes_sent")),
        "bytes_dense_per_step": log.mean("comm/bytes_dense"),
        "overlap_fraction": log.mean("comm/overlap_fraction"),
        "costs": ddl.metrics.summary(optimizer).as_dict(),
        "parameters_sha256": digests[0],
        "parameters_agree": len(set(digests)) == 1,
        "torch": torch.__version__,
    }
