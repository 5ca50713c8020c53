"""What the ranks of a job of torch.distributed tell each other through its store when it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddl.comm.polling import STALLED
from ddl.comm.suspects import REMEDY, Waiting, suspicion

# A failure is told to the job's store, which may be gone too.
PATIENCE_SECONDS = 2.0
# After its deadline a rank waits so long for what the others, whose deadlines come, have to tell.
REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class Job:
    """What the communicators of a process have in common.

    Attributes:
        store: of torch.distributed, shared by all ranks of the job.
        outlives: whether the store is there when a rank has ended, whichever it is.
        host: a number for the machine, the same for all ranks on it.
        neighbours: the process numbers of all ranks on this host, once known.
    """

    store: Any
    outlives: bool
    host: int
    neighbours: list[int] = field(default_factory=list)

    def announce(self, failure: str) -> None:
        """Tell the other ranks why this one ends, unless another has been first."""
        if self.outlives:
            _briefly(lambda: self.store.compare_set("failure", "", failure))

    def first_failure(self) -> str | None:
        """What the first rank to end has announced; None if that is not known."""
        store = self.store
        said = self.outlives and _briefly(
            lambda: store.get("failure") if store.check(["failure"]) else None
        )
        return said.decode() if said else None

    def suspicion(self, rank: int, peer: int, doing: str) -> str:
        """Say who holds up a rank that waits for another, by what all say at their deadlines."""
        if not self.outlives:
            return f"{STALLED} {REMEDY}"
        store = self.store
        _briefly(lambda: store.set(f"waits/{rank}", f"{peer} {doing}"))
        time.sleep(REPORT_SECONDS)

        def waits_for(other: int) -> Waiting | None:
            key = f"waits/{other}"
            said = _briefly(lambda: store.get(key) if store.check([key]) else None)
            if not said:
                return None
            third, doing = said.decode().split(" ", 1)
            return Waiting(int(third), doing)

        return suspicion(rank, peer, waits_for)


def _briefly(action: Callable[[], Any]) -> Any:
    """The action's result, None if it fails or takes too long."""
    results: list[Any] = []

    def act() -> None:
        try:
            results.append(action())
        except Exception:  # whatever a broken store raises
            pass

    thread = threading.Thread(target=act, name="ddl-failure", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    return results[0] if results else None
