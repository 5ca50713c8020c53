"""A process on each host that says which rank has died, where nobody else lives to tell.

MPICH's mpirun ends all ranks within a fraction of a second when one dies, before any of them has
noticed, and the process that it then names need not be the one that died first. So

1. the first rank of a host starts this file as a program of its own, in a session of its own, which
   imports nothing but the standard library and sleeps;
2. the ranks of the host connect to it, and say goodbye before they end;
3. of the first one that ends without a goodbye it names the rank, and ends; so it does, in
   silence, where a rank ends the whole job, which has said why.

Linux only: it needs pidfd_open, by which the kernel tells of the end of a process that is no child,
and addresses of sockets that lie in no file system.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import subprocess
import sys

PATIENCE = 30.0  # seconds for all ranks of the host to connect
GOODBYE, END_OF_JOB = b".", b"!"


class Mourned:
    """A rank's connection to the process on its host."""

    def __init__(self, line: socket.socket) -> None:
        """`line`: connected."""
        self._line = line
        self._process = os.getpid()

    def say_goodbye(self, *, for_all: bool = False) -> None:
        """This rank is about to end, or to end all, and has told why if there is a reason."""
        if os.getpid() == self._process:  # not a forked one
            with contextlib.suppress(OSError):
                self._line.sendall(END_OF_JOB if for_all else GOODBYE)


def is_possible() -> bool:
    """Whether this system has what is needed."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def invent_name() -> str:
    """One that no other job has."""
    return f"ddl-{secrets.token_hex(8)}"


def begin(name: str, local_size: int, job_size: int) -> None:
    """Start the process of this host.

    Args:
        name: of the job.
        local_size: number of ranks on this host.
        job_size: number of ranks.

    Raises:
        OSError: it does not start.
    """
    command = [sys.executable, "-S", "-E", __file__, _on_this_host(name)]
    process = subprocess.Popen(
        [*command, str(local_size), str(job_size)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process.stdout or contextlib.nullcontext() as said:
        if said is None or not said.read(1):
            raise OSError(f"{command[0]} ended with status {process.wait()}")
    process.returncode = 0  # nobody will wait for it


def connect(name: str, rank: int) -> Mourned:
    """Connect to the process of this host, which has begun.

    Raises:
        OSError: it is not there.
    """
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect("\0" + _on_this_host(name))
    line.sendall(struct.pack("i", rank))
    return Mourned(line)


def _on_this_host(name: str) -> str:
    return f"{name}-{socket.gethostname()}"[:100]


# What the process does.


def ended(line: socket.socket) -> bool:
    """Whether a rank has said that it ends the whole job."""
    line.setblocking(False)
    with contextlib.suppress(OSError):
        return END_OF_JOB in line.recv(2, socket.MSG_PEEK)
    return False


def watch(name: str, local_size: int, job_size: int) -> None:
    """Wait until every rank has said goodbye, or one has ended without."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("\0" + name)
    server.listen(local_size)
    server.settimeout(PATIENCE)
    os.write(1, b".")
    os.close(1)  # whoever started it waits for that
    living: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    poll = select.poll()
    for _ in range(local_size):
        line, _ = server.accept()
        (rank,) = struct.unpack("i", line.recv(4, socket.MSG_WAITALL))
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        process, *_ = struct.unpack("3i", credentials)
        watched = os.pidfd_open(process)
        living[watched] = rank, line
        poll.register(watched, select.POLLIN)
    while living:
        for watched, _ in poll.poll():
            rank, line = living.pop(watched)
            poll.unregister(watched)
            line.setblocking(False)
            said = b""
            with contextlib.suppress(OSError):
                said = line.recv(2)
            if END_OF_JOB in said or any(ended(other) for _, other in living.values()):
                return
            if not said:
                print(
                    f"ddl: rank {rank} of {job_size} died without a word on "
                    f"{socket.gethostname()}: it was killed (out of memory? dmesg tells), or "
                    "crashed; the job ends",
                    file=sys.stderr,
                    flush=True,
                )
                return


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # ranks that never come, or are gone: nothing to tell
        watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
