"""Collectives: what ranks compute together from a share each, the same on every rank.

Functions of a communicator and this rank's share; those that remember something are objects.
"""

from ddl.collectives.collected import Collected, Collective

__all__ = ["Collected", "Collective"]
