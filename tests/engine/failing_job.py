"""A job in which one rank goes wrong in its fourth step: mpirun -np 4 python failing_job.py HOW.

The victim is the last but one rank. The others train on, then average a number.
"""

import os
import signal
import sys
import time

import torch

import ddl


def go_wrong(how: str) -> None:
    if how == "raises":
        raise RuntimeError("disk full")
    if how.startswith("leaves"):
        sys.exit(int(how.removeprefix("leaves ")))
    if how.startswith("vanishes"):
        os._exit(int(how.removeprefix("vanishes ")))
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stalls":
        os.kill(os.getpid(), signal.SIGSTOP)


def main(how: str) -> None:
    torch.set_num_threads(1)
    comm = ddl.init()
    wrong = comm.rank == comm.size - 2
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    density = 0.2 if how == "disagrees" and wrong else 0.1
    optimizer = ddl.DistributedOptimizer(optimizer, model.named_parameters(), density=density)
    for step in range(6):
        if step == 3 and wrong:
            print(time.time(), flush=True)
            go_wrong(how)
            if how == "runs out":
                break
        optimizer.zero_grad()
        model(torch.ones(2, 100)).square().sum().backward()
        optimizer.step()
    ddl.allreduce_mean(torch.ones(3))


if __name__ == "__main__":
    main(sys.argv[1])
