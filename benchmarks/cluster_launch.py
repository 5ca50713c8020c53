"""Programs on the hosts of an emulated cluster: MPI jobs, and processes that find each other.

MPI must not notice that all hosts are one machine: each gets a name of its own, and MPICH and UCX
are told to use nothing but the interface. Otherwise messages would go through shared memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_network import (
    INTERFACE,
    ClusterError,
    Network,
    address,
    switch_address,
    switch_interface,
)

# What MPICH's launcher starts instead of ssh: SCRIPT [options] ADDRESS COMMAND...
REMOTE_SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host={prefix}$((${{1##*.}} - 2)); shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""
MPI_OVER_TCP = {
    "MPIR_CVAR_NOLOCAL": "1",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": INTERFACE,
}
# Hosts share the machine's cores; a pool of threads for each would only get in the way.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
RENDEZVOUS_PORT = 29_500


def find_mpiexec() -> str:
    """The launcher of MPICH beside this Python, else on the PATH.

    Raises:
        ClusterError: there is none, or it is another MPI's.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise ClusterError("mpiexec was not found; pip install 'ddl[mpich]' brings one")
    about = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if "HYDRA" not in about.upper():
        raise ClusterError(
            f"{found} is not MPICH's, which alone can be told where its hosts are; "
            "pip install 'ddl[mpich]' brings it"
        )
    return found


def run_mpi(network: Network, program: Path, arguments: Sequence[str], timeout: float) -> None:
    """Run a Python program on every host, one rank each, and print what it prints.

    Raises:
        ClusterError: it fails, or takes longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ddl-bench-") as folder:
        shell = Path(folder) / "remote-shell"
        prefix = network.hosts[0].removesuffix("0")
        shell.write_text(REMOTE_SHELL.format(prefix=prefix))
        shell.chmod(0o700)
        words = [
            *(find_mpiexec(), "-localhost", switch_address(), "-iface", switch_interface()),
            *("-launcher", "ssh", "-launcher-exec", str(shell)),
            *("-hosts", ",".join(network.addresses), "-ppn", "1", "-np", str(len(network.hosts))),
            *(sys.executable, str(program), *arguments),
        ]
        job = _start(network.within(network.switch, *words), MPI_OVER_TCP)
        _finish([job], program, timeout)


def run_processes(
    network: Network, program: Path, arguments: Sequence[str], timeout: float
) -> None:
    """Run a Python program on every host under torch's rendezvous, and print what it prints.

    Raises:
        ClusterError: one fails, or takes longer than `timeout` seconds.
    """
    jobs = []
    for rank, host in enumerate(network.hosts):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(network.hosts)),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(RENDEZVOUS_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # hosts without a name service draw warnings
        }
        words = [sys.executable, str(program), *arguments]
        jobs.append(_start(network.within(host, *words), environment))
    _finish(jobs, program, timeout)


def _start(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    # A session of its own: Ctrl-C reaches this process, and the network's end ends the job.
    return subprocess.Popen(
        words,
        env={**os.environ, **ONE_THREAD, **environment},
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _finish(jobs: list[subprocess.Popen[str]], program: Path, timeout: float) -> None:
    """Wait for all; the first that fails ends the others."""
    deadline = time.monotonic() + timeout
    running = list(jobs)
    try:
        while running:
            for job in list(running):
                status = job.poll()
                if status is None:
                    continue
                running.remove(job)
                if status:
                    raise ClusterError(f"{program.name} ended with status {status} on the cluster")
            if time.monotonic() > deadline:
                raise ClusterError(f"{program.name} took longer than {timeout:g} s")
            time.sleep(0.05)
    finally:
        for job in running:
            job.kill()
            job.wait()
