"""Collectives: functions of a communicator and this rank's share, the same on every rank."""

from ddl.collectives.collected import Collected, Collective

__all__ = ["Collected", "Collective"]
