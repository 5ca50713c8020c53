"""Where the CUDA operations are tested: on a GPU (`pytest -m gpu`), and what can be emulated.

    pip install -e '.[test]' && pytest -m gpu

is all there is to run on a GPU machine. Tests that take `place` run on the emulator too, so that
they are themselves tested where there is no GPU; on the GPU they see longer vectors.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from kernel_cases import emulated
from places import Place

from ddl import kernels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def gpu() -> Place:
    """The current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    operations = kernels.device_operations(device)
    assert operations is not None, "there is a GPU, but no CuPy that can use it; see the log"
    return Place(device, operations, 3_000_001)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The emulator, and the current GPU."""
    if request.param == "cuda":
        yield request.getfixturevalue("gpu")
    else:
        yield Place(torch.device("cpu"), emulated(1), 9_001)
