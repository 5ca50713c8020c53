"""Settings of the whole suite."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from launch import Launcher, find_mpirun, find_open_mpi, open_mpi_launcher

from ddl import kernels
from ddl.comm.current import set_process_default

# Examples start threads and take what the machine gives; no test is about time.
settings.register_profile(
    "ddl", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ddl")


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_rank():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Programs that a test runs within this process join a job, and choose their threads."""
    yield
    set_process_default(None)
    kernels.workers._wanted = None
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
