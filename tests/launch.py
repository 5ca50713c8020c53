"""Start programs under mpirun or torchrun, as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_mpirun() -> str:
    """The mpirun beside this Python (the mpich wheel's), else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise RuntimeError("mpirun was not found; pip install 'ddl[mpich]' brings one")
    return found


@dataclass(frozen=True)
class Launcher:
    """Runs Python programs on several ranks."""

    mpirun: str

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
        command = [self.mpirun, "-np", str(P), sys.executable, *arguments]
        return _run(command, cwd, timeout, env)


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
