"""Who else is in this job: start-up, identity, and the end.

The environment tells the launcher: mpirun (MPICH, Open MPI, Intel MPI) and srun set variables of
their own. Without any the process is alone, and nothing of MPI is imported.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from ddl.comm import Communicator, SingleCommunicator
from ddl.comm.current import current, set_process_default
from ddl.errors import DDLError
from ddl.settings import Settings

BACKENDS = ("auto", "mpi", "single")

# MPICH's and Intel's launcher and srun --mpi=pmi2, Open MPI's, MVAPICH's, srun --mpi=pmix.
MPI_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK")


def init(backend: str = "auto", *, timeout: float | None = None) -> Communicator:
    """Join the job that this process was started in. A second call returns the same communicator.

    An exception that nobody catches ends the whole job from then on, so that no rank waits for one
    that has failed.

    Args:
        backend: "mpi", "single", or "auto": MPI if a launcher of MPI jobs started this process,
            else single.
        timeout: seconds after which a wait for another rank ends in an error; default
            DDL_STALL_SHUTDOWN_TIME_SECONDS, else 600.

    Returns:
        The communicator of all ranks.

    Raises:
        ValueError: unknown backend, or a bad `DDL_*` variable.
        DDLError: MPI is wanted and cannot be had, or a launcher that is not supported.
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
    comm: Communicator
    if backend == "mpi":
        from ddl.comm.mpi import MPICommunicator

        comm = MPICommunicator.world(
            settings.stall_shutdown_seconds if timeout is None else timeout
        )
        _check_launcher(os.environ, comm.size)
        if comm.size > 1:
            _abort_on_uncaught_exception(comm)
    else:
        comm = SingleCommunicator()
    set_process_default(comm)
    return comm


def shutdown() -> None:
    """Leave the job; `init` may be called again. MPI itself ends with the process."""
    set_process_default(None)


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
    if any(name in environ for name in MPI_VARIABLES):
        return "mpi"
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")  # set by srun, not by sbatch
    if tasks != "1":
        raise DDLError(
            f"srun started {tasks} tasks without MPI, expected its MPI support; use "
            "srun --mpi=pmi2, or srun --mpi=pmix with an MPI built for it"
        )
    workers = environ.get("WORLD_SIZE", "1")
    if "RANK" in environ and workers != "1":
        raise DDLError(
            f"this process is one of {workers} that torchrun started, expected mpirun or srun; "
            f"use mpirun -np {workers} python {sys.argv[0]}"
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
