"""Communicators: what moves bytes between ranks. MPI is imported only by those who use it."""

from ddl.comm.base import Communicator
from ddl.comm.single import SingleCommunicator

__all__ = ["Communicator", "SingleCommunicator"]
