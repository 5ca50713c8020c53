# started by bench_cluster.py on every host of an emulated cluster
"""What a message costs: from one host to another in turns, and for all hosts at once.

1. *Ping-pong*: MPI's own blocking messages between the first two hosts, in turns: the latency and
   the bandwidth of the link itself.
2. *Ring*: all ranks send to their right neighbours at the same time through the engine, as in a
   round of a collective. Its latency includes what collectives have to live with: Python, waiting
   with a back-off, and hosts that share cores. Predictions use this one.
3. *Engine*: what the engine finds in a fraction of a second when it is to choose a collective, and
   what handling a message costs the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch

import ddl
from ddl import kernels
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.comm.mpi import load_mpi
from ddl.links import fit, measure_links
from ddl.wires import PLAIN, WIRES

# Links may carry some 0.1 MB at once after a pause, so that only long messages, or many in a row,
# show their rate.
PING_PONG_TURNS = {8: 200, 2**20: 2, 2**21: 2}
RING_ROUNDS = {64: 50, 2**14: 30, 2**17: 10, 2**19: 4}


def ping_pong(repeats: int) -> dict[int, float]:
    """Seconds one way by size of message, between ranks 0 and 1; nothing on others."""
    MPI = load_mpi()
    world = MPI.COMM_WORLD
    rank, seconds = world.Get_rank(), {}
    for size, turns in PING_PONG_TURNS.items():
        message = torch.zeros(size, dtype=torch.uint8).numpy()
        world.Barrier()
        if rank > 1:
            continue
        samples = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            for _ in range(turns):
                if rank == 0:
                    world.Send(message, 1)
                world.Recv(message, 1 - rank)
                if rank == 1:
                    world.Send(message, 0)
            samples.append((time.perf_counter() - begin) / turns / 2)
        seconds[size] = statistics.median(samples[1:])
    return seconds


def ring(comm: Communicator, repeats: int) -> dict[int, float]:
    """Seconds of a round by size of message, on the slowest rank."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    seconds = {}
    for size, rounds in RING_ROUNDS.items():
        message = torch.zeros(size, dtype=torch.uint8)
        samples = []
        for _ in range(repeats + 1):
            messages.barrier(comm)
            begin = time.perf_counter()
            for _ in range(rounds):
                comm.sendrecv(message, right, left)
            samples.append((time.perf_counter() - begin) / rounds)
        everywhere = messages.gather_objects(comm, samples[1:])
        seconds[size] = statistics.median(map(max, zip(*everywhere, strict=True)))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    comm = ddl.init()
    one_way = ping_pong(options.repeats)
    rounds = ring(comm, options.repeats)
    engines = {name: measure_links(comm, wire=wire) for name, wire in WIRES.items()}
    if comm.rank == 0:
        answer = {
            "kind": "links",
            "P": comm.size,
            "ping_pong": asdict(fit(one_way)),
            "ring": asdict(fit(rounds)),
            "engine": asdict(engines[PLAIN.name].between),
            "host": {name: asdict(engine.host) for name, engine in engines.items()},
            "ping_pong_seconds": one_way,
            "ring_seconds": rounds,
        }
        options.json.write_text(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
