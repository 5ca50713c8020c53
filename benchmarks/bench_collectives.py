# mpirun -np 4 python benchmarks/bench_collectives.py --correlation 0 0.5
"""Time the collectives against MPI's own and the published gTop-k, and say what they lose.

Each row is one algorithm x wire x numel x density x correlation. Ranks draw gradients
(correlation * shared + (1 - correlation) * own noise) and pick their k largest entries beforehand;
only the collective is timed. Algorithms take turns, so that noise meets all alike; a repeat is some
calls in a row, and its time that of the slowest rank.

* algbw: bytes of a rank's picks, or of its gradient where it is summed whole, over the time.
* busbw: bytes that the busiest rank sends over the time, to be compared with its link's rate.
* rounds: messages, one after the other, of the rank that takes part in most.
* recall: of the k largest entries of the sum over all ranks' picks, the share delivered.
* lost: coordinates, as a share of k, of which some rank's gradient is neither in the result nor
  owed by anybody; lost mass: how much that is, as a share of all that was picked.

`mpi-` names MPI's own collectives, `published-tree` gTop-k as it was first released, and `step:` an
algorithm with all that training adds: selection from a whole gradient, residual, average.

    mpirun -np 8 python benchmarks/bench_collectives.py --wire plain compact --json rows.jsonl
    # without MPI, ranks as threads of one process
    python benchmarks/bench_collectives.py --ranks 8 --numel 1000000 --correlation 0 0.3 0.5
    # what ranks burn while they wait for one that comes 3 s late
    mpirun -np 16 python benchmarks/bench_collectives.py --late 3 --numel 1000000
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TextIO

import bench_arguments
import collective_report
import torch
from collective_contenders import ALGORITHMS, DEFAULT, MPI_ONLY, Bench, Contender, Setting
from collective_gradients import Fate, fate, picks
from collective_timing import Counting, Sample, Stopwatch, spread

import ddl
from ddl import flags, kernels
from ddl.collectives import messages
from ddl.comm import Communicator, threads
from ddl.density import entries
from ddl.sparse import SparseVector
from ddl.wires import WIRES

TIMEOUT_SECONDS = 600.0
# Calls of seconds each, such as dense ones over slow links, need fewer repeats.
LONG_CALL_SECONDS = 0.5
LONG_CALL_REPEATS = 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = flags.Parser(
        prog="bench_collectives.py",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def several(flag: str, default: list[Any], help: str, **more: Any) -> None:
        parser.add_argument(flag, nargs="+", default=default, help=help, **more)

    several("--numel", [25_557_032], "entries of the gradient", type=bench_arguments.numel)
    several("--density", [0.001], "fraction of entries kept", type=flags.density)
    several("--correlation", [0.0], "of ranks' gradients", type=bench_arguments.correlation)
    several("--algorithms", list(DEFAULT), "what to time", choices=list(ALGORITHMS))
    several("--wire", ["plain"], "formats of the engine's messages", choices=list(WIRES))
    parser.add_argument("--repeats", type=flags.positive_int, default=11, help="samples of a row")
    parser.add_argument(
        "--ranks",
        type=flags.positive_int,
        metavar="P",
        help="ranks as threads of this process, instead of under mpirun",
    )
    parser.add_argument(
        "--late",
        type=flags.not_negative,
        default=0.0,
        metavar="SECONDS",
        help="also measure what ranks use of a core while the last one is so late",
    )
    parser.add_argument("--interface", help="also count the bytes that leave by it, such as eth0")
    parser.add_argument("--seed", type=flags.count, default=0, help="of the gradients")
    parser.add_argument(
        "--json", type=flags.output_file, help="write one JSON object a row to this file"
    )
    parser.add_argument("--plot", type=flags.plot_file, help="write a chart to this file")
    options = parser.parse_args(arguments)
    if options.ranks is None and not bench_arguments.is_mpi_job():
        parser.error("one process is no cluster; use mpirun -np P, or --ranks P for threads")
    if options.ranks is not None:
        if bench_arguments.is_mpi_job():
            parser.error("--ranks makes threads; leave it out under mpirun")
        chosen = [name for name in options.algorithms if name in MPI_ONLY]
        if chosen and options.algorithms != list(DEFAULT):
            parser.error(f"{', '.join(chosen)} need mpirun, got --ranks")
        options.algorithms = [name for name in options.algorithms if name not in MPI_ONLY]
    return options


def tables(
    comm: Communicator, options: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], Setting, SparseVector]]:
    """Name and draw every table of rows that was asked for."""
    for numel, density, correlation in itertools.product(
        options.numel, options.density, options.correlation
    ):
        k = entries(numel, density)
        local = picks(numel, k, correlation, comm.rank, options.seed)
        about = {"numel": numel, "density": density, "k": k, "correlation": correlation}
        yield about, Setting(numel, k, density), local


def check(
    comm: Counting, contender: Contender, k: int, local: SparseVector
) -> tuple[Fate | None, int]:
    """Call once to see that it is right, and once more to count messages."""
    contender.check()
    collected = contender.run()
    outcome = None if collected is None else fate(comm, k, local, collected)
    before = comm.exchanges
    contender.run()
    return outcome, comm.exchanges - before


def measure(
    comm: Counting, contenders: list[Contender], watch: Stopwatch, repeats: int
) -> list[list[Sample]]:
    """Let the contenders take turns."""
    samples: list[list[Sample]] = [[] for _ in contenders]
    calls = []
    for contender in contenders:
        once = watch.sample(contender.run, 1).seconds
        calls.append(watch.calls(once))
    for _ in range(repeats):
        for number, contender in enumerate(contenders):
            is_long = calls[number] == 1 and len(samples[number]) >= LONG_CALL_REPEATS
            if not (is_long and _longest(comm, samples[number]) > LONG_CALL_SECONDS):
                samples[number].append(watch.sample(contender.run, calls[number]))
    return samples


def _longest(comm: Communicator, samples: list[Sample]) -> float:
    return max(messages.gather_objects(comm, samples[-1].seconds))


def row(
    contender: Contender, of_ranks: list[list[Sample]], exchanges: list[int], fate: Fate | None
) -> dict[str, Any]:
    """Make a row from the samples of all ranks."""
    slowest = [max(sample.seconds for sample in repeat) for repeat in zip(*of_ranks, strict=True)]
    median, low, high = spread(slowest)
    every = [sample for samples in of_ranks for sample in samples]
    sent = [spread([sample.sent for sample in samples])[0] for samples in of_ranks]
    if contender.sent is not None:
        sent = [contender.sent]
    links = [s.link_sent for s in every if s.link_sent is not None]
    idles = [s.idle for s in every if s.idle is not None]
    return {
        "algorithm": contender.name,
        "wire": contender.wire,
        "P": len(of_ranks),
        "dtype": "float32",
        "size_bytes": contender.size,
        "count": contender.count,
        "median_ms": median * 1e3,
        "p20_ms": low * 1e3,
        "p80_ms": high * 1e3,
        "repeats": len(slowest),
        "algbw_MBps": contender.size / median / 1e6,
        "busbw_MBps": max(sent) / median / 1e6,
        "bytes_per_rank": sum(sent) / len(sent),
        "busiest_bytes": max(sent),
        "bytes_counted": contender.counted,
        "link_bytes": max(links) if links else None,
        "link_bytes_mean": sum(links) / len(links) if links else None,
        "rounds": max(exchanges) if contender.counted else None,
        "cpu_ms": spread([sample.cpu_seconds for sample in every])[0] * 1e3,
        "idle": sum(idles) / len(idles) if idles else None,
        **(asdict(fate) if fate is not None else dict.fromkeys(Fate.__annotations__)),
    }


def work(comm: Communicator, options: argparse.Namespace, file: TextIO | None) -> list[dict]:
    """Measure everything; the first rank prints and writes each table as soon as it is there."""
    counting = Counting(comm)
    watch = Stopwatch(counting, options.interface)
    machine = {"transport": type(comm).__name__, **collective_report.machine()}
    algorithms = options.algorithms
    if comm.size & (comm.size - 1):  # the published tree needs a power of two
        algorithms = [name for name in algorithms if name != "published-tree"]
    if comm.rank == 0:
        print(f"P {comm.size}, " + ", ".join(f"{name} {of}" for name, of in machine.items()))
        print(collective_report.header(), flush=True)
    rows = []
    for about, setting, local in tables(comm, options):
        bench = Bench(counting, setting, local)
        contenders = bench.contenders(algorithms, options.wire)
        checked = [check(counting, contender, setting.k, local) for contender in contenders]
        samples = measure(counting, contenders, watch, options.repeats)
        waits = [
            watch.waiting(contender.run, options.late) if options.late else None
            for contender in contenders
        ]
        everywhere = messages.gather_objects(
            counting, [(samples[i], checked[i][1], waits[i]) for i in range(len(contenders))]
        )
        if comm.rank:
            continue
        for contender, (outcome, _), of_ranks in zip(
            contenders, checked, zip(*everywhere, strict=True), strict=True
        ):
            of_samples, exchanges, waiting = map(list, zip(*of_ranks, strict=True))
            made = about | row(contender, of_samples, exchanges, outcome)
            made["chosen"] = contender.chosen()
            made["waiting_cpu"] = max(waiting) if options.late else None
            rows.append(made | machine)
            print(collective_report.line(made), flush=True)
            if file:
                print(json.dumps(rows[-1]), file=file, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    kernels.set_num_threads(1)

    def start(file: TextIO | None) -> list[dict[str, Any]]:
        if options.ranks is None:
            return work(ddl.init(timeout=TIMEOUT_SECONDS), options, file)
        return threads.run(
            options.ranks, lambda comm: work(comm, options, file), timeout=TIMEOUT_SECONDS
        )[0]

    if options.json and flags.is_first_rank():
        with options.json.open("w") as file:
            rows = start(file)
    else:
        rows = start(None)
    if options.plot and rows:
        collective_report.plot(rows, options.plot)


if __name__ == "__main__":
    main()
