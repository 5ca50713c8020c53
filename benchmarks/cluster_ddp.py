# started by bench_cluster.py on every host of an emulated cluster
"""Time how torch's DistributedDataParallel aggregates gradients: plainly, in fp16, by PowerSGD.

The model has parameters of the given shapes and a backward pass that hands out gradients made
beforehand. So a backward pass takes as long as their aggregation; what it takes without
(`no_sync`) is measured, too, and taken off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

POWERSGD_RANK = 4
# PowerSGD aggregates plainly in its first two steps, at least; those are not timed.
WARM_UP = 4
ONE_BUCKET_MB = 1 << 20


class _Given(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *upper: Tensor) -> Any:
        return None, *ctx.gradients


class Shapes(nn.Module):
    """Parameters of given shapes, and gradients for them."""

    def __init__(self, shapes: list[list[int]], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.parameter_list = nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self.gradients = [torch.randn(shape, generator=generator) for shape in shapes]

    def forward(self) -> Tensor:
        """Return a loss that does not depend on anything."""
        return _Given.apply(self.gradients, *self.parameter_list)


def wrapped(model: Shapes, hook: str) -> DistributedDataParallel:
    """The model as a user of that hook would wrap it."""
    # PowerSGD waits for a second all-reduce in the callback of its first, on one of gloo's two
    # threads; with two buckets both would wait for ever.
    buckets = {"bucket_cap_mb": ONE_BUCKET_MB} if hook == "powersgd" else {}
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, **buckets)
    if hook == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=2,
        )
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return parallel


def backward(
    parallel: DistributedDataParallel, repeats: int, synchronised: bool, interface: str
) -> tuple[float, float]:
    """Median seconds of a backward pass on the slowest rank, and bytes that leave this one."""
    context: Callable[[], Any] = nullcontext if synchronised else parallel.no_sync
    took = []
    for step in range(WARM_UP + repeats):
        if step == WARM_UP:
            before = sent_bytes(interface)
        parallel.zero_grad(set_to_none=not parallel.gradient_as_bucket_view)
        with context():
            loss = parallel()
            dist.barrier()
            begin = time.perf_counter()
            loss.backward()
            took.append(time.perf_counter() - begin)
    sent = (sent_bytes(interface) - before) / repeats
    slowest = torch.tensor(took[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist()), sent


def sent_bytes(interface: str) -> int:
    """What has left by an interface of this host."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--hooks", nargs="+", default=["plain", "fp16", "powersgd"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--interface", default="eth0")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = json.loads(options.shapes.read_text())
    rows = []
    for hook in options.hooks:
        parallel = wrapped(Shapes(shapes, dist.get_rank()), hook)
        local, _ = backward(parallel, options.repeats, False, options.interface)
        whole, sent = backward(parallel, options.repeats, True, options.interface)
        rows.append(
            {
                "kind": "ddp",
                "hook": hook,
                "P": dist.get_world_size(),
                "numel": sum(parameter.numel() for parameter in parallel.parameters()),
                "backward_ms": whole * 1e3,
                "local_ms": local * 1e3,
                "median_ms": (whole - local) * 1e3,
                "link_bytes": sent,
            }
        )
        del parallel
    if dist.get_rank() == 0:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
