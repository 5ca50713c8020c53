# mpirun -np 4 python examples/soak.py --steps 2000
"""Trains ResNet-20 for long, and watches what must not drift: agreement and memory.

Every --every steps it prints the digest of the parameters, which must be the same on all ranks, and
the resident memory of the rank that holds most. From step --settled on memory may grow by at most
2 %. Each rank trains on its own images of scikit-learn's digits.

Exit code: 0; 1 if ranks differ or memory grows; 2 for arguments that cannot be used.
"""

import argparse
import math
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from ranks import limit_threads
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate
from tqdm import tqdm

import ddl
from ddl.workloads.resnet20 import ResNet20

LARGEST_GROWTH = 0.02


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="soak.py",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between two looks")
    parser.add_argument("--settled", type=int, default=200, help="step to measure growth from")
    parser.add_argument("--batch-size", type=int, default=8, help="images of one worker")
    parser.add_argument("--compressor", default="gtopk", choices=ddl.COMPRESSORS)
    parser.add_argument("--density", type=float, default=0.01)
    options = parser.parse_args(arguments)
    for name in ("steps", "every", "settled", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def load_images() -> tuple[Tensor, Tensor]:
    """This rank's digits: float32 [N, 3, 16, 16], and labels, int64 [N]."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None].sub(8).div(8)
    mine = slice(ddl.rank(), None, ddl.size())
    return interpolate(images[mine].repeat(1, 3, 1, 1), scale_factor=2), torch.tensor(
        digits.target[mine]
    )


def resident_bytes() -> int:
    """Of this process; the largest so far where the system does not tell the present one."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ddl.init()
    limit_threads()
    torch.manual_seed(0)
    model = ResNet20()
    images, labels = load_images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = ddl.DistributedOptimizer(
        optimizer, model.named_parameters(), compressor=options.compressor, density=options.density
    )
    settled = math.inf
    good = True
    generator = torch.Generator().manual_seed(ddl.rank())
    for step in tqdm(range(1, options.steps + 1), disable=ddl.rank() != 0 or None):
        chosen = torch.randint(len(images), (options.batch_size,), generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        if step == options.settled:
            settled = max(ddl.gather_object(resident_bytes()))
        if step % options.every and step != options.steps:
            continue
        digests = ddl.gather_object(ddl.parameters_digest(model))
        resident = max(ddl.gather_object(resident_bytes()))
        growth = resident / settled - 1
        good &= len(set(digests)) == 1 and growth < LARGEST_GROWTH
        if ddl.rank() == 0:
            after = "" if settled == math.inf else f", {growth:+.2%} since step {options.settled}"
            print(
                f"step {step}: loss {loss.item():.3f}, parameters {digests[0][:12]} on "
                f"{digests.count(digests[0])} of {ddl.size()} ranks, "
                f"{resident / 2**20:.0f} MiB{after}",
                flush=True,
            )
    if ddl.rank() == 0:
        print("good" if good else "bad: ranks differ, or memory grows")
    ddl.shutdown()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
