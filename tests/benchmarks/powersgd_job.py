"""torchrun --nproc-per-node 2 powersgd_job.py FILE: train with torch's own PowerSGD."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS, RANK, DENSE_STEPS = 8, 4, 2  # torch's hook cannot start with fewer than 2 dense steps


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 30), nn.Linear(30, 3))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def backward(model, rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(16, 24, generator=generator)
    nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()


def main(path):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(
        PowerSGDState(None, RANK, start_powerSGD_iter=DENSE_STEPS), powerSGD_hook
    )
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, dist.get_rank(), step)
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()
    # Taking the group down while gloo's threads end the hook's last callbacks aborts at times.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
