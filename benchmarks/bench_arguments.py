"""Numbers that command lines of benchmarks take, and how such a program was started."""

import os

from ddl import flags
from ddl.world import MPI_VARIABLES

numel = flags.number(int, lambda value: 1 <= value < 2**31, "a whole number from 1 to 2**31 - 1")
correlation = flags.number(float, lambda value: 0 <= value <= 1, "a number in [0, 1]")


def is_mpi_job() -> bool:
    """Whether a launcher of MPI jobs started this process."""
    return any(name in os.environ for name in MPI_VARIABLES)
