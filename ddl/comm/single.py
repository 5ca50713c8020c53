"""One rank, no peers: the same program without a launcher."""

from __future__ import annotations

import sys
from typing import NoReturn

from torch import Tensor

from ddl.comm.base import Communicator


class SingleCommunicator(Communicator):
    """The only rank of a job of one. Nothing is ever sent."""

    def __init__(self) -> None:
        """Rank 0 of 1."""
        super().__init__(rank=0, size=1, timeout=float("inf"))

    def _exchange(
        self, message: Tensor | None, dest: int | None, source: int | None
    ) -> Tensor | None:
        raise ValueError(f"a single rank has no peers, got dest={dest}, source={source}")

    def split(self, color: int, key: int) -> SingleCommunicator:
        """A group of one again."""
        return SingleCommunicator()

    def abort(self, reason: str, status: int = 1) -> NoReturn:
        """See `Communicator.abort`."""
        print(f"ddl: {reason}", file=sys.stderr, flush=True)
        sys.exit(status)
