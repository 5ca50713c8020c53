"""Beyond 2^31 bytes, and up to the last index there is, where the GPU's memory allows."""

import pytest
import torch
from places import Place
from torch import Tensor

from ddl.kernels.launch import COUNT, NONFINITE, REPAIRED, REPORT_SIZE

pytestmark = pytest.mark.gpu

SIZES = (600_000_001, 2**31 - 1)
CHUNK = 1 << 27


def need(entries: int, bytes_per_entry: float) -> None:
    """Skip where the GPU has not enough free memory."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    wanted = int(entries * bytes_per_entry) + (1 << 30)
    if free < wanted:
        pytest.skip(f"needs {wanted / 2**30:.0f} GiB of free GPU memory, has {free / 2**30:.0f}")


def planted(n: int, count: int, device: torch.device) -> Tensor:
    """Places over the whole vector, ascending, with both ends and both sides of 2^29 and 2^30."""
    places = torch.linspace(0, n - 1, count, dtype=torch.float64, device=device).long()
    extra = [edge + by for edge in (2**29, 2**30) for by in (-1, 0) if edge < n]
    places = torch.cat([places, torch.tensor([n - 2, *extra], device=device)])
    return torch.unique(places)


def noise(n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Below 1, different everywhere within a chunk."""
    flat = torch.empty(n, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(1)
    for part in flat.split(CHUNK):
        part.uniform_(0.0, 0.9, generator=generator)
    return flat


def check_rest(residual: Tensor, flat: Tensor, places: Tensor) -> None:
    """The residual is zero at the places and what it was elsewhere; changes both."""
    assert not bool(residual[places].any())
    residual[places] = 1.0
    flat[places] = 1.0
    for one, other in zip(residual.split(CHUNK), flat.split(CHUNK), strict=True):
        assert torch.equal(one, other.float())


@pytest.mark.parametrize("threshold", [0.0, 1.5, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", SIZES)
def test_topk(n: int, dtype: torch.dtype, threshold: float, gpu: Place) -> None:
    need(n, 4 + dtype.itemsize + 0.5)
    places = planted(n, n // 1000, gpu.device)
    k = places.numel()
    flat = noise(n, gpu.device, dtype)
    values = 2.0 + (torch.arange(k, device=gpu.device) % 64) / 64  # exact in bfloat16 too
    values[::2] *= -1.0
    flat[places] = values.to(dtype)
    residual = torch.zeros(n, device=gpu.device)
    picks = gpu.operations.launch_topk(flat, residual, k, 1.0, threshold, gpu.workspace())
    assert picks.report.tolist()[: NONFINITE + 1] == [k, 0]
    assert bool(picks.report[REPAIRED]) == (threshold == 1e9)
    assert torch.equal(picks.indices.long(), places)
    assert torch.equal(picks.values, values)
    check_rest(residual, flat, places)


@pytest.mark.parametrize("n", SIZES)
def test_gaussiank(n: int, gpu: Place) -> None:
    need(n, 8.5)
    places = planted(n, n // 1000, gpu.device)
    k = places.numel()
    flat = noise(n, gpu.device, torch.float32)
    flat[places] = 50.0
    residual = torch.zeros(n, device=gpu.device)
    picks = gpu.operations.launch_gaussiank(flat, residual, k, 1.0, gpu.workspace())
    # The noise lies below every threshold that selects no more than 4k/3.
    assert int(picks.report[COUNT]) == k
    assert torch.equal(picks.indices[:k].long(), places)
    assert bool((picks.values[:k] == 50.0).all())
    check_rest(residual, flat, places)


@pytest.mark.parametrize("n", SIZES)
def test_at_scatter_and_give_back(n: int, gpu: Place) -> None:
    need(n, 8.5)
    places = planted(n, n // 1000, gpu.device)
    indices = places.to(torch.int32)
    flat = noise(n, gpu.device, torch.float32)
    residual = torch.zeros(n, device=gpu.device)
    picks = gpu.operations.launch_at(flat, residual, indices, 1.0, gpu.workspace())
    assert picks.report.numel() == REPORT_SIZE
    assert torch.equal(picks.values, flat[places])
    gpu.operations.give_back(residual, indices, picks.values)
    for one, other in zip(residual.split(CHUNK), flat.split(CHUNK), strict=True):
        assert torch.equal(one, other)
    gpu.operations.scatter(flat, indices, picks.values, 2.0)
    assert torch.equal(flat[places], picks.values * 2)
    assert sum(int(part.count_nonzero()) for part in flat.split(CHUNK)) == int(
        picks.values.count_nonzero()
    )


def test_a_merge_of_very_many_entries(gpu: Place) -> None:
    """More slots than 2^28, whose bytes go beyond 2^30."""
    count = 150_000_000
    need(count, 120)
    device = gpu.device
    a = torch.arange(0, 2 * count, 2, dtype=torch.int32, device=device)
    b = torch.arange(1, 2 * count, 2, dtype=torch.int32, device=device)
    ones = torch.ones(count, device=device)
    ones[-10:] = 3.0
    merged = gpu.operations.launch_merge(a, ones, b, ones, 2 * count, gpu.workspace())
    assert int(merged.report[COUNT]) == 2 * count
    assert torch.equal(merged.indices, torch.arange(2 * count, dtype=torch.int32, device=device))
    del merged
    few = gpu.operations.launch_merge(a, ones, b, ones, 25, gpu.workspace())
    assert few.indices.tolist() == [0, 1, 2, 3, 4, *range(2 * count - 20, 2 * count)]


@pytest.mark.parametrize("n", SIZES)
def test_random_indices(n: int, gpu: Place) -> None:
    indices = gpu.operations.launch_random_indices(n, 1_000_000, 3, gpu.device)
    assert bool((indices[1:] > indices[:-1]).all())
    assert int(indices[0]) >= 0
    assert int(indices[-1]) < n
