"""Who else is in this job: start-up, identity, and the end.

The environment tells the launcher: mpirun (MPICH, Open MPI, Intel MPI), srun and torchrun set
variables of their own. Without any the process is alone, and nothing of MPI is imported.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed

from ddl.collectives import messages
from ddl.comm import Communicator, SingleCommunicator
from ddl.comm.current import current, set_process_default
from ddl.errors import DDLError
from ddl.gpus import join_gpus, own_device
from ddl.settings import Settings

BACKENDS = ("auto", "mpi", "torch", "single")

# MPICH's and Intel's launcher and srun --mpi=pmi2, Open MPI's, MVAPICH's, srun --mpi=pmix.
MPI_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK")

_to_leave: list[Callable[[], None]] = []  # what `shutdown` calls


def init(backend: str = "auto", *, timeout: float | None = None) -> Communicator:
    """Join the job that this process was started in. A second call returns the same communicator.

    An exception that nobody catches ends the whole job from then on, so that no rank waits for one
    that has failed.

    Where every rank has a GPU to itself, the current one or the one of its `local_rank()`, and CuPy
    finds NCCL, gradients go from GPU to GPU.

    Args:
        backend: "mpi"; "torch": the ranks of torch.distributed's default group if it exists, else
            those that torchrun started; "single"; or "auto": torch if its default group exists or
            torchrun started this process, MPI if a launcher of MPI jobs did, else single.
        timeout: seconds after which a wait for another rank ends in an error; default
            DDL_STALL_SHUTDOWN_TIME_SECONDS, else 600.

    Returns:
        The communicator of all ranks.

    Raises:
        ValueError: unknown backend, or a bad `DDL_*` variable.
        DDLError: MPI or torch.distributed is wanted and cannot be had, a launcher that is not
            supported, or one whose LOCAL_RANK is wrong.
    """
    joined = current()  # a second call changes nothing
    if joined is not None:
        return joined
    settings = Settings.from_environment()
    if "DDL_LOG_LEVEL" in os.environ:
        logging.getLogger("ddl").setLevel(settings.log_level)
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        backend = _detect(os.environ)
    seconds = settings.stall_shutdown_seconds if timeout is None else timeout
    comm: Communicator
    if backend == "mpi":
        from ddl.comm.mpi import MPICommunicator

        comm = MPICommunicator.world(seconds)
        _check_launcher(os.environ, comm.size)
        _check_local_ranks(os.environ, comm)
    elif backend == "torch":
        from ddl.comm.process_group import ProcessGroupCommunicator

        comm = ProcessGroupCommunicator.world(seconds)
        _to_leave.append(comm.close)
    else:
        comm = SingleCommunicator()
    if comm.size > 1:
        _abort_on_uncaught_exception(comm)
        comm = join_gpus(comm, settings.nccl, device=own_device(comm.local_rank))
    set_process_default(comm)
    return comm


def shutdown() -> None:
    """Leave the job; `init` may be called again.

    MPI itself ends with the process, and torch.distributed's default group with whoever made it.
    """
    set_process_default(None)
    while _to_leave:
        _to_leave.pop()()


def communicator() -> Communicator:
    """The communicator of this job.

    Raises:
        DDLError: `init` has not been called.
    """
    comm = current()
    if comm is None:
        raise DDLError("ddl is not initialised; call ddl.init() first")
    return comm


def rank() -> int:
    """This worker, 0..size()-1."""
    return communicator().rank


def size() -> int:
    """Number of workers, P."""
    return communicator().size


def local_rank() -> int:
    """This worker among those on the same host; the GPU to use."""
    return communicator().local_rank


def local_size() -> int:
    """Number of workers on the same host."""
    return communicator().local_size


def _detect(environ: Mapping[str, str]) -> str:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "torch"
    many = environ.get("WORLD_SIZE", "1") != "1"
    # A torchrun that srun has started hands srun's variables on; those of torchrun are newer.
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torch" if many else "single"
    if any(name in environ for name in MPI_VARIABLES):
        return "mpi"
    if "RANK" in environ and many:
        return "torch"
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")  # set by srun, not by sbatch
    if tasks != "1":
        raise DDLError(
            f"srun started {tasks} tasks without MPI, expected its MPI support; use "
            "srun --mpi=pmi2, or srun --mpi=pmix with an MPI built for it, or srun torchrun"
        )
    return "single"


def _check_launcher(environ: Mapping[str, str], size: int) -> None:
    """Refuse an MPI that does not see the processes its launcher started."""
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        if name in environ and environ[name] != str(size):
            raise DDLError(
                f"the launcher started {environ[name]} processes ({name}), MPI sees {size}: mpirun "
                "belongs to another MPI than mpi4py; use the mpirun of the same installation"
            )


def _check_local_ranks(environ: Mapping[str, str], comm: Communicator) -> None:
    """Refuse a LOCAL_RANK that MPI contradicts: programs choose their GPU by it. Collective."""
    talk = comm.duplicate()  # what is said here is not the job's own traffic
    places = messages.gather_objects(talk, (environ.get("LOCAL_RANK"), comm.local_rank))
    talk.close()
    for rank, (given, local_rank) in enumerate(places):
        if given is not None and given != str(local_rank):
            raise DDLError(
                f"rank {rank} has LOCAL_RANK={given}, MPI counts it as {local_rank} on its host; "
                "unset LOCAL_RANK, and use ddl.local_rank()"
            )


def _abort_on_uncaught_exception(comm: Communicator) -> None:
    """Without this the other ranks would wait for a rank that has died."""
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        sys.stdout.flush()
        comm.abort(f"ended by {kind.__name__}: {error}")

    def on_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            report(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)

    sys.excepthook = report
    threading.excepthook = on_thread
