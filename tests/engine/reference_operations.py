"""Stands for CudaOperations on CPU tensors: the reference kernels, with padding.

Quicker than emulated kernels, and says in plain torch what a launch has to leave behind.
"""

import torch

from ddl.kernels import reference
from ddl.kernels.keys import key_of
from ddl.kernels.launch import PADDING, REPORT_SIZE, MergedOnDevice, Picks


class ReferenceOperations:
    """The launches that device aggregators make, and nothing else."""

    def launch_topk(self, flat, residual, k, scale, threshold, workspace):
        return padded_picks(reference.accumulate_topk(flat, residual, k, scale, threshold), k)

    def launch_gaussiank(self, flat, residual, k, scale, workspace):
        capacity = min(flat.numel(), 4 * k // 3 + 1)
        return padded_picks(reference.accumulate_gaussiank(flat, residual, k, scale), capacity)

    def launch_at(self, flat, residual, indices, scale, workspace):
        picks = reference.accumulate_at(flat, residual, indices, scale)
        return padded_picks(picks, indices.numel())

    def launch_random_indices(self, numel, k, seed, device):
        return reference.random_indices(numel, k, seed, device)

    def launch_merge(self, a_indices, a_values, b_indices, b_values, k, workspace):
        capacity = min(k, a_indices.numel() + b_indices.numel())
        in_a, in_b = a_indices != PADDING, b_indices != PADDING
        merged = reference.merge(
            a_indices[in_a], a_values[in_a], b_indices[in_b], b_values[in_b], k
        )
        fate_a, fate_b = torch.full_like(a_indices, -1), torch.full_like(b_indices, -1)
        fate_a[in_a], fate_b[in_b] = merged.fate_a, merged.fate_b
        count = merged.indices.numel()
        report = torch.tensor([count, *[0] * (REPORT_SIZE - 1)], dtype=torch.int32)
        indices, values = padded(merged.indices, merged.values, capacity)
        return MergedOnDevice(indices, values, fate_a, fate_b, report)

    def scatter(self, dense, indices, values, scale):
        real = indices != PADDING
        reference.scatter(dense, indices[real], values[real], scale)

    def give_back(self, residual, indices, values, mask=None):
        real = indices != PADDING
        if mask is not None:
            real &= mask
        reference.give_back(residual, indices[real], values[real])


def padded(indices, values, capacity):
    """A sparse vector, padded to a capacity."""
    room = capacity - indices.numel()
    return (
        torch.cat([indices, torch.full((room,), PADDING, dtype=torch.int32)]),
        torch.cat([values, torch.zeros(room)]),
    )


def padded_picks(selection, capacity):
    """A selection as it would be left on the device."""
    count, finite = selection.indices.numel(), selection.finite
    threshold = key_of(selection.threshold)
    report = [count, int(not finite), threshold, selection.candidates, int(selection.repaired)]
    indices, values = padded(selection.indices, selection.values, capacity)
    return Picks(indices, values, torch.tensor(report, dtype=torch.int32))
