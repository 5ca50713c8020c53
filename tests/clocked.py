"""Ranks on threads whose messages take time on a virtual clock: what a network would make of them.

A message takes alpha + beta * its bytes. A rank sends one message after the other and receives one
after the other, both at once. Computing takes no time.
"""

import torch

from ddl.collectives import messages
from ddl.comm import Communicator


class Clock:
    """The time of one rank."""

    def __init__(self):
        self.now = self.last_received = 0.0


class Clocked(Communicator):
    """A communicator over another one, with a clock."""

    def __init__(self, inner, seconds, clock=None, members=None):
        """`seconds(rank, other, bytes)`: of a message, by the ranks of the first communicator."""
        super().__init__(inner.rank, inner.size, inner.timeout)
        self.inner, self.seconds = inner, seconds
        self.clock = Clock() if clock is None else clock
        self.members = list(range(inner.size)) if members is None else members

    def _exchange(self, message, dest, source):
        clock, begun = self.clock, self.clock.now
        if message is not None:
            cost = self.seconds(self.members[self.rank], self.members[dest], message.numel())
            clock.now = begun + cost
            stamp = torch.tensor([clock.now, cost], dtype=torch.float64)
            message = torch.cat([stamp.view(torch.uint8), message])
        received = self.inner._exchange(message, dest, source)
        if received is None:
            return None
        arrival, cost = received[:16].clone().view(torch.float64).tolist()
        clock.last_received = max(arrival, clock.last_received + cost)
        clock.now = max(clock.now, clock.last_received)
        return received[16:].clone()

    def split(self, color, key):
        group = self.inner.split(color, key)
        members = messages.gather_objects(group, self.members[self.rank])
        return Clocked(group, self.seconds, self.clock, members)

    def abort(self, reason, status=1):
        self.inner.abort(reason, status)
