"""Bad arguments are refused in one line that says got, expected and the cure; nothing changes."""

import re

import pytest
import torch

from ddl import kernels

FLAT, RESIDUAL = torch.ones(4), torch.zeros(4)
INDICES, VALUES = torch.tensor([0, 2], dtype=torch.int32), torch.ones(2)

REFUSED = {
    "list": (
        lambda: kernels.accumulate_topk([1.0], RESIDUAL, 1),
        "must be a torch.Tensor, got list",
    ),
    "float64": (
        lambda: kernels.accumulate_topk(FLAT.double(), RESIDUAL, 1),
        "flat must be float32 or bfloat16 or float16, got float64",
    ),
    "half residual": (
        lambda: kernels.accumulate_topk(FLAT, RESIDUAL.half(), 1),
        "residual must be float32, got float16",
    ),
    "2-D": (
        lambda: kernels.accumulate_topk(FLAT.view(2, 2), RESIDUAL, 1),
        "flat must be 1-D, got shape (2, 2)",
    ),
    "lengths": (
        lambda: kernels.accumulate_topk(FLAT, torch.zeros(5), 1),
        "residual must have as many entries as flat, 4, got 5",
    ),
    "shared memory": (
        lambda: kernels.accumulate_topk(FLAT, FLAT, 1),
        "residual must have memory of its own",
    ),
    "device": (
        lambda: kernels.accumulate_topk(FLAT, RESIDUAL.to("meta"), 1),
        "residual must be on the device of flat, cpu, got meta",
    ),
    "k above": (lambda: kernels.accumulate_topk(FLAT, RESIDUAL, 5), "[0, numel] = [0, 4], got 5"),
    "k below": (lambda: kernels.accumulate_gaussiank(FLAT, RESIDUAL, -1), "got -1"),
    "density for k": (
        lambda: kernels.accumulate_topk(FLAT, RESIDUAL, 0.01),
        "k must be an integer, got 0.01 (float)",
    ),
    "scale": (
        lambda: kernels.accumulate_topk(FLAT, RESIDUAL, 1, scale=1e39),
        "scale must be finite in float32, got 1e+39",
    ),
    "int64 indices": (
        lambda: kernels.accumulate_at(FLAT, RESIDUAL, INDICES.long()),
        "indices must be int32, got int64",
    ),
    "descending": (
        lambda: kernels.accumulate_at(FLAT, RESIDUAL, INDICES.flip(0)),
        "indices must ascend strictly from 0 up, got [2, 0]",
    ),
    "repeated": (
        lambda: kernels.merge(INDICES, VALUES, INDICES * 0, VALUES),
        "b_indices must ascend strictly from 0 up, got [0, 0]",
    ),
    "outside": (
        lambda: kernels.give_back(torch.zeros(2), INDICES, VALUES),
        "indices must lie in [0, 2), got 0..2",
    ),
    "negative": (
        lambda: kernels.scatter(torch.zeros(2), INDICES - 1, VALUES),
        "indices must lie in [0, 2), got -1..1",
    ),
    "values missing": (
        lambda: kernels.merge(INDICES, VALUES, INDICES, torch.ones(3)),
        "b_values must have one entry per index, 2, got 3",
    ),
    "merge k": (
        lambda: kernels.merge(INDICES, VALUES, INDICES, VALUES, -1),
        "k must be at least 0, got -1; pass None",
    ),
    "numel": (
        lambda: kernels.random_indices(2**31, 1, 0),
        "numel must lie in [0, 2147483647], got 2147483648",
    ),
    "seed": (lambda: kernels.random_indices(5, 1, None), "seed must be an integer, got None"),
    "threads": (lambda: kernels.set_num_threads(0), "number of threads must be at least 1, got 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_in_one_line(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        call()
    assert "\n" not in str(refusal.value)
    assert torch.equal(FLAT, torch.ones(4))
    assert torch.equal(RESIDUAL, torch.zeros(4))


def test_the_number_of_threads_can_be_set_and_is_torchs_otherwise() -> None:
    assert kernels.get_num_threads() == torch.get_num_threads()
    kernels.set_num_threads(3)
    try:
        assert kernels.get_num_threads() == 3
    finally:
        kernels.workers._wanted = None
