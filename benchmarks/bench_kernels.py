# python benchmarks/bench_kernels.py --op accumulate_topk --numel 25600000 --density 0.001
"""Time the kernels against the memory's limit and against compositions of torch's operations.

Each row is one operation x numel x density x dtype x distribution x threads x device. The floor,
the kernel and the rival take turns, so that noise meets all three alike:

* floor_ms: `residual.add_(gradient)` in float32 with as many threads, which moves the same bytes
  (on a CUDA device a copy, scaled to the same bytes; for merge the merge that keeps everything;
  for scatter the zeroing). roof_percent: of the rate of the floor, what the kernel reached.
* rival_ms: the composition of torch's operations in bench_rivals.py.
* slow_path_rate: how often the predicted threshold was too high, so that a second pass over the
  residual was needed. `--prediction last` predicts as training does, from the step before;
  `none` samples, as the first step does.

A residual is put back before each call, and a pause lets torch's OpenMP threads, which go on
spinning for some milliseconds after an operation, leave the cores to whoever is timed. With
`--steps` nothing is put back: gradients follow each other as in training, with error feedback, and
with `--drift` their scale drifts. On a GPU what is timed lies between two events, with cleared
caches, and waits for nothing (see bench_timing.py).

    # what a bucket of 25.6 million entries costs, on one thread and on two
    python benchmarks/bench_kernels.py --threads 1 2 --density 0.001 0.01 --prediction last none
    # every distribution
    python benchmarks/bench_kernels.py --distribution all --json out.jsonl
    # time per element, from 1e5 to 1e8 entries
    python benchmarks/bench_kernels.py --numel 100000 1000000 10000000 100000000 --plot out.png
    # 200 steps
    python benchmarks/bench_kernels.py --steps 200 --drift --prediction last none
    # on a GPU, a bucket of 1 GiB
    python benchmarks/bench_kernels.py --device cuda --numel 268435456 --dtype float32 bfloat16
    # how many entries the published rules select
    python benchmarks/bench_kernels.py --op dgc published_gaussiank accumulate_gaussiank \
        --distribution all
"""

import argparse
import importlib.metadata
import itertools
import json
import math
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import bench_report
import bench_select
import torch
from bench_gradients import DISTRIBUTIONS, Sequence
from bench_operations import OPERATIONS, PREDICTED, SELECTING, Measured
from bench_rivals import add, composition
from bench_select import DTYPES, Case, Outcome, Select, device_operations
from bench_timing import timer

from ddl import flags, kernels

RIVAL_REPEATS = 5  # a rival takes many times as long, and its noise matters less


def machine(devices: list[str]) -> dict[str, Any]:
    """Versions and hardware, for every row."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    try:
        numba: str | None = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        numba = None
    about = {"loops": _loops(), "torch": torch.__version__, "numba": numba, "cpu": name}
    gpus = [torch.cuda.get_device_name(device) for device in devices if device != "cpu"]
    return about | ({"gpu": " and ".join(gpus), "cuda": torch.version.cuda} if gpus else {})


def _loops() -> str:
    """Name the compiled loops that ddl.kernels uses on the CPU."""
    from ddl.kernels import cpu

    level = getattr(cpu.loops, "level", None)
    return "numba" if level is None else ("portable", "avx2", "avx512")[level]


def summary(
    case: Case,
    times: list[float],
    floors: list[float],
    rivals: list[float],
    outcomes: list[Outcome],
    **more: Any,
) -> dict[str, Any]:
    """Make a row from the times and outcomes of a case."""
    median = statistics.median(times)
    floor = statistics.median(floors) if floors else None
    rival = statistics.median(rivals) if rivals else None
    low, *_, high = (
        statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else (median, median)
    )
    counts = [outcome.count / case.k for outcome in outcomes]
    return {
        "op": case.op,
        "device": case.device,
        "dtype": case.dtype,
        "numel": case.numel,
        "density": case.density,
        "distribution": case.distribution,
        "threads": case.threads,
        "prediction": case.prediction if case.op in PREDICTED else None,
        "median_ms": median,
        "p20_ms": low,
        "p80_ms": high,
        "floor_ms": floor,
        "ratio_to_floor": median / floor if floor else None,
        "roof_percent": 100.0 * floor / median if floor and more["bytes_per_element"] else None,
        "ns_per_element": median * 1e6 / case.numel,
        "rival_ms": rival,
        "speedup": rival / median if rival else None,
        "slow_path_rate": sum(outcome.repaired for outcome in outcomes) / len(outcomes),
        "count_over_k": statistics.median(counts),
        "count_over_k_min": min(counts),
        "count_over_k_max": max(counts),
        "candidates_over_k": statistics.median(outcome.passed / case.k for outcome in outcomes),
        **more,
    }


def measure(case: Case, repeats: int, with_rival: bool) -> dict[str, Any]:
    """Let floor, kernel and rival take turns."""
    measured: Measured = OPERATIONS[case.op](case)
    measured.check()
    milliseconds = timer(case.device)
    times: list[float] = []
    floors: list[float] = []
    rivals: list[float] = []
    outcomes: list[Outcome] = []
    warm_up = 3
    for repeat in range(warm_up + repeats):
        took_floor = math.nan
        if measured.floor:
            measured.reset()
            took_floor, _ = milliseconds(measured.floor)
        measured.reset()
        took, result = milliseconds(measured.run)
        outcome = measured.outcome(result)
        if repeat < warm_up:
            continue
        times.append(took)
        outcomes.append(outcome)
        floors.append(took_floor * measured.floor_scale)
        every = max(1, repeats // RIVAL_REPEATS)
        if with_rival and measured.rival and (repeat - warm_up) % every == 0:
            measured.reset()
            rivals.append(milliseconds(measured.rival)[0])
    moved = measured.bytes_per_element
    return summary(
        case,
        times,
        floors,
        rivals,
        outcomes,
        rival=measured.rival_name,
        bytes_per_element=None if math.isnan(moved) else moved,
        gigabytes_per_second=(
            None if math.isnan(moved) else moved * case.numel / statistics.median(times) / 1e6
        ),
    )


def measure_steps(case: Case, steps: int, drift: bool, with_rival: bool) -> dict[str, Any]:
    """Select from gradients that follow each other; each method owes to a residual of its own."""
    select: Select
    if case.op == "accumulate_topk":
        select = bench_select.TopK(case)
    elif case.op == "accumulate_gaussiank":
        select = bench_select.gaussiank(case)
    else:
        select = bench_select.published(case)
    milliseconds = timer(case.device)
    dtype = DTYPES[case.dtype]
    residual, bare = (torch.zeros(case.numel, device=case.device) for _ in range(2))
    times: list[float] = []
    floors: list[float] = []
    rivals: list[float] = []
    outcomes: list[Outcome] = []
    for step, flat in enumerate(Sequence(case.distribution, case.numel, steps, drift, seed=1)):
        wide = flat.to(case.device)
        narrow = wide.to(dtype)
        bare.copy_(residual)
        floors.append(milliseconds(lambda w=wide: add(w, bare))[0])  # type: ignore[misc]
        if with_rival and step % max(1, steps // RIVAL_REPEATS) == 0:
            bare.copy_(residual)
            took, _ = milliseconds(lambda w=wide: composition(w, bare, case.k))  # type: ignore[misc]
            rivals.append(took)
        took, chosen = milliseconds(lambda n=narrow: select(n, residual))  # type: ignore[misc]
        times.append(took)
        outcomes.append(select.outcome(chosen))
    moved = 8.0 + dtype.itemsize
    return summary(
        case,
        times,
        floors,
        rivals,
        outcomes,
        rival="add_, abs, topk, gather, zero",
        bytes_per_element=moved,
        gigabytes_per_second=moved * case.numel / statistics.median(times) / 1e6,
        steps=steps,
        drift=drift,
    )


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Name every row that was asked for, the slowly changing first."""
    distributions = options.distribution
    if "all" in distributions:
        distributions = list(DISTRIBUTIONS)
    for op, device, numel, distribution, density, dtype, threads in itertools.product(
        options.op,
        options.device,
        options.numel,
        distributions,
        options.density,
        options.dtype,
        options.threads,
    ):
        for prediction in options.prediction if op in PREDICTED else ["none"]:
            yield Case(op, device, dtype, numel, density, distribution, threads, prediction)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def several(flag: str, default: list[Any], help: str, **more: Any) -> None:
        parser.add_argument(flag, nargs="+", default=default, help=help, **more)

    several("--op", ["accumulate_topk"], "operations", choices=list(OPERATIONS))
    several("--numel", [25_600_000], "entries of the gradient", type=int)
    several("--density", [0.001], "fraction of entries kept", type=float)
    several("--dtype", ["float32"], "of the gradient", choices=list(DTYPES))
    several("--distribution", ["normal"], "of the entries, or all", choices=[*DISTRIBUTIONS, "all"])
    several("--threads", [torch.get_num_threads()], "CPU threads", type=int)
    several("--device", ["cpu"], "cpu, cuda or cuda:0")
    several("--prediction", ["last"], "of top-k's threshold", choices=["last", "none"])
    parser.add_argument("--repeats", type=int, default=21, help="timed calls of a row")
    parser.add_argument("--no-rival", action="store_true", help="do not time the rivals")
    parser.add_argument("--steps", type=int, default=0, help="measure a sequence of so many steps")
    parser.add_argument("--drift", action="store_true", help="let its gradients drift")
    parser.add_argument("--json", type=Path, help="write one JSON object a row to this file")
    parser.add_argument("--plot", type=Path, help="write a chart to this file")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.steps < 0:
        parser.error("--repeats must be at least 1 and --steps at least 0")
    if any(numel < 1 for numel in options.numel):
        parser.error("--numel must be at least 1")
    if any(threads < 1 for threads in options.threads):
        parser.error("--threads must be at least 1")
    if any(not 0 < density <= 1 for density in options.density):
        parser.error("--density must lie in (0, 1]; it is the fraction of entries kept")
    if options.steps and any(op not in SELECTING for op in options.op):
        parser.error(f"--steps measures {', '.join(SELECTING)} only")
    if options.drift and not options.steps:
        parser.error("--drift needs --steps")
    for device in options.device:
        if device != "cpu" and not torch.cuda.is_available():
            parser.error(f"--device {device} needs a GPU, and torch finds none; use --device cpu")
        if device != "cpu" and device_operations(device) is None:
            parser.error(
                f"--device {device} needs CuPy; pip install 'ddl[cuda13]' or 'ddl[cuda12]'"
            )
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if options.plot is not None and options.plot.suffix not in flags.PLOT_FORMATS:
        parser.error(f"--plot {options.plot}, expected a name in {', '.join(flags.PLOT_FORMATS)}")
    return options


def run(options: argparse.Namespace, file: TextIO | None) -> list[dict[str, Any]]:
    """Measure every row; print each, and write it, as soon as it is there."""
    rows = []
    about = machine(options.device)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(bench_report.header())
    for case in cases(options):
        torch.set_num_threads(case.threads)
        kernels.set_num_threads(case.threads)
        if options.steps:
            row = measure_steps(case, options.steps, options.drift, not options.no_rival)
        else:
            row = measure(case, options.repeats, not options.no_rival)
        row |= about
        rows.append(row)
        print(bench_report.line(row), flush=True)
        if file:
            print(json.dumps(row), file=file, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.json:
        with options.json.open("w") as file:
            rows = run(options, file)
    else:
        rows = run(options, None)
    if options.plot:
        bench_report.plot(rows, options.plot)


if __name__ == "__main__":
    main()
