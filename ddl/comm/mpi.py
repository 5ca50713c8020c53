"""Ranks as processes under mpirun or srun, through mpi4py.

Buffers travel, never pickles. Waiting polls with a back-off instead of blocking: MPI's own blocking
calls spin, and 16 ranks that spin on 2 cores take the cores from those that compute. Where MPI
talks TCP, news ends a sleep early (doorbell.py).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddl.comm import obituary, polling
from ddl.comm.base import Communicator, out_of_step
from ddl.comm.doorbell import Doorbell, watching_descriptors
from ddl.comm.inquiry import Inquiry, Wait
from ddl.comm.polling import LONGEST_SLEEP, STALLED
from ddl.comm.suspects import Waiting, suspicion
from ddl.errors import CommunicationError

logger = logging.getLogger(__name__)

# MPI may need several calls to see what has arrived: one takes the bytes in, the next the message.
POLLS = 3
# A message under way moves only while somebody polls, so its transfer is polled more eagerly.
LONGEST_SLEEP_IN_TRANSFER = 100e-6


def load_mpi() -> Any:
    """Import mpi4py.MPI, which starts MPI, and check its thread support.

    Returns:
        The module `mpi4py.MPI`.

    Raises:
        CommunicationError: no MPI library, or one without MPI_THREAD_MULTIPLE; names the cure.
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CommunicationError(
            f"MPI was not found ({first_line}); expected mpi4py and an MPI library: load your "
            "cluster's MPI module, or pip install 'ddl[mpich]', which brings mpirun too"
        ) from error
    provided = MPI.Query_thread()
    if provided < MPI.THREAD_MULTIPLE:
        names = {
            MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
            MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
            MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        }
        raise CommunicationError(
            f"MPI gives {names.get(provided, provided)}, expected MPI_THREAD_MULTIPLE, because "
            "gradients travel on a background thread; import ddl before any other user of MPI, "
            "or use an MPI built with thread support (pip install 'ddl[mpich]' brings one)"
        )
    return MPI


class MPICommunicator(Communicator):
    """One process of an MPI job."""

    def __init__(
        self,
        handle: Any,
        timeout: float,
        local: tuple[int, int] | None = None,
        doorbell: Doorbell | None = None,
        inquiry: Inquiry | None = None,
    ) -> None:
        """Wrap an mpi4py intracommunicator that nothing else sends messages on.

        Collective, unless `local`, rank and size on this host, is known. `doorbell`: what ends a
        wait's sleep early, if anything does. `inquiry`: tells who holds up a wait.
        """
        self._doorbell = Doorbell() if doorbell is None else doorbell
        self._inquiry = inquiry
        self._mpi = load_mpi()
        self._handle = handle
        self._cancelled = False
        if local is None:
            on_this_host = handle.Split_type(self._mpi.COMM_TYPE_SHARED)
            local = (on_this_host.Get_rank(), on_this_host.Get_size())
            on_this_host.Free()
        super().__init__(handle.Get_rank(), handle.Get_size(), timeout, local)
        # Shared memory does not ring.
        self._all_ring = self._doorbell.connected and self.local_size == 1

    @classmethod
    def world(cls, timeout: float) -> MPICommunicator:
        """All processes that mpirun started, apart from whatever else uses COMM_WORLD."""
        before = watching_descriptors()
        mpi = load_mpi()
        world = mpi.COMM_WORLD.Dup()
        inquiry = Inquiry(mpi, world.Dup())
        doorbell = Doorbell(watching_descriptors() - before)
        comm = cls(world, timeout, doorbell=doorbell, inquiry=inquiry)
        if world.Get_size() > 1:
            # The last thing of this process before MPI ends: threads that work for an optimizer
            # started later, and end before.
            weakref.finalize(cls, inquiry.leave, timeout)
            if "MPICH" in mpi.Get_library_version():
                inquiry.mourned = comm._be_mourned()
        return comm

    def _be_mourned(self) -> obituary.Mourned | None:
        """Let somebody on this host tell if this rank dies, if that is possible. Collective."""
        name = bytearray(obituary.invent_name().encode())
        self._handle.Bcast([name, self._mpi.BYTE])
        mourned, possible = None, obituary.is_possible()
        if possible and self.local_rank == 0:
            try:
                obituary.begin(name.decode(), self.local_size, self.size)
            except OSError as error:
                logger.info("nobody will tell which rank of this host has died: %s", error)
        self._handle.Barrier()
        if possible:
            with contextlib.suppress(OSError):  # the first rank of the host has told why
                mourned = obituary.connect(name.decode(), self.rank)
        return mourned

    def _exchange(
        self, message: Tensor | None, dest: int | None, source: int | None
    ) -> Tensor | None:
        MPI = self._mpi
        requests = []
        received = None
        try:
            if message is not None:
                requests.append(self._handle.Isend([message.numpy(), MPI.BYTE], dest, self.label))
            if source is not None:
                status = MPI.Status()
                found = self._wait(
                    lambda: self._handle.Improbe(source, MPI.ANY_TAG, status),
                    LONGEST_SLEEP,
                    f"for a message of rank {self.job_ranks[source]}",
                    source,
                )
                received = torch.empty(status.Get_count(MPI.BYTE), dtype=torch.uint8)
                requests.append(found.Irecv([received.numpy(), MPI.BYTE]))
                if status.Get_tag() != self.label:
                    raise out_of_step(self, source, status.Get_tag())
            self._wait(
                lambda: MPI.Request.Testall(requests) or None,
                LONGEST_SLEEP_IN_TRANSFER if source is not None else LONGEST_SLEEP,
                "for a transfer"
                if dest is None
                else f"for rank {self.job_ranks[dest]} to take a message",
                source if dest is None else dest,
            )
        except MPI.Exception as error:
            raise CommunicationError(
                f"{self.who}, to {self._name(dest)}, from {self._name(source)}: "
                f"{error.Get_error_string()}; look for the first rank that failed"
            ) from error
        return received

    def _name(self, peer: int | None) -> str:
        return "nobody" if peer is None else f"rank {self.job_ranks[peer]}"

    def _wait(
        self, poll: Callable[[], Any], longest_sleep: float, what: str, peer: int | None = None
    ) -> Any:
        """Poll until something else than None comes back, or the deadline passes."""
        what = f"{self.who} waits {what}"
        inquiry = None if peer is None else self._inquiry
        if inquiry is None or peer is None:
            return self._poll(poll, longest_sleep, what, lambda: STALLED)
        me, other = self.job_ranks[self.rank], self.job_ranks[peer]
        with Wait(inquiry, Waiting(other, self.doing), self.timeout) as wait:

            def poll_and_look() -> Any:
                result = poll()
                if result is None and wait.look():
                    raise CommunicationError(f"{what}: {suspicion(me, other, inquiry.waits_for)}")
                return result

            return self._poll(
                poll_and_look,
                longest_sleep,
                what,
                lambda: suspicion(me, other, inquiry.waits_for),
            )

    def _poll(
        self,
        poll: Callable[[], Any],
        longest_sleep: float,
        what: str,
        suspicion: Callable[[], str],
    ) -> Any:
        def poll_again() -> Any:
            for _ in range(POLLS):
                result = poll()
                if result is not None:
                    return result
            return None

        result = polling.wait(
            poll_again,
            what,
            self.timeout,
            cancelled=lambda: self._cancelled,
            longest_sleep=longest_sleep,
            # Who hears of every message need not look up before.
            first_sleep=longest_sleep if self._all_ring else polling.FIRST_SLEEP,
            sleep=self._doorbell.sleep,
            suspicion=suspicion,
        )
        self._doorbell.answered()
        return result

    def split(self, color: int, key: int) -> MPICommunicator:
        """See `Communicator.split`."""
        arrived = self._handle.Ibarrier()  # Split itself would wait without a deadline
        self._wait(lambda: arrived.Test() or None, LONGEST_SLEEP, "for all ranks to split")
        return self._part(self._handle.Split(color, key), None)

    def duplicate(self) -> MPICommunicator:
        """See `Communicator.duplicate`."""
        arrived = self._handle.Ibarrier()
        self._wait(lambda: arrived.Test() or None, LONGEST_SLEEP, "for all ranks to duplicate")
        return self._part(self._handle.Dup(), (self.local_rank, self.local_size))

    def _part(self, handle: Any, local: tuple[int, int] | None) -> MPICommunicator:
        group = MPICommunicator(handle, self.timeout, local, self._doorbell, self._inquiry)
        theirs, ours = handle.Get_group(), self._handle.Get_group()
        group._split_from(self, theirs.Translate_ranks(None, ours))
        theirs.Free()
        ours.Free()
        return group

    def waiting(self) -> str | None:
        """See `Communicator.waiting`."""
        peer = self.waits_for
        if peer is None or self._inquiry is None:
            return super().waiting()
        me, other = self.job_ranks[self.rank], self.job_ranks[peer]
        return f"for rank {other}: {suspicion(me, other, self._inquiry.waits_for)}"

    def cancel(self) -> None:
        """See `Communicator.cancel`."""
        self._cancelled = True

    def close(self) -> None:
        """See `Communicator.close`."""
        self._handle.Free()

    def abort(self, reason: str, status: int = 1) -> NoReturn:
        """See `Communicator.abort`."""
        print(f"ddl: {self.who}: {reason}", file=sys.stderr, flush=True)
        if self._inquiry is not None:
            self._inquiry.say_goodbye(for_all=True)
        self._handle.Abort(status)
        sys.exit(status)  # not reached; MPI's abort does not return
