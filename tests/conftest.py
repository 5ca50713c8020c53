"""Settings of the whole suite."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from launch import Launcher, find_mpirun, find_open_mpi, open_mpi_launcher

# Examples start threads and take what the machine gives; no test is about time.
settings.register_profile(
    "ddl", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ddl")


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_rank():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def mpirun() -> Launcher:
    """Starts a program on P ranks."""
    return Launcher(find_mpirun())


@pytest.fixture(scope="session")
def open_mpirun() -> Launcher:
    """Starts a program on P ranks under Open MPI, where there is one."""
    prefix = find_open_mpi()
    if prefix is None:
        pytest.skip("no Open MPI: DDL_TEST_OPENMPI does not name the folder of one")
    return open_mpi_launcher(prefix)
