# mpirun -np 4 python benchmarks/bench_training.py --models resnet20 fcn --single-first
"""Where an iteration of S-SGD goes, part by part, and how well it scales: the papers' study.

For each model: reading, copying, forward and backward pass, selecting, communicating, what of both
the backward pass does not hide, and the update; medians and quartiles over iterations of means over
ranks. Then throughput, efficiency, and what `ddl.perfmodel` predicts of the schedules naive and
wfbp (arXiv 1608.07249, 1711.05979).

1. *Alone*, if --single-first: rank 0 trains by itself, the others wait.
2. *Silent*: every rank trains at the same time, and nothing is communicated.
3. All ranks train with ddl, in turn with 2, on models of their own, so that noise meets both alike.

Efficiency is the time of an iteration of 2 (or 1) over that of 3; by turns, quartiles over pairs of
groups, which show how far the machine's noise lets it be trusted.

Effects are switches: --prefetch, --pin-memory, --cudnn-benchmark, --channels-last, --overlap, each
but the first with its --no- form; a run with and a run without one tell what it is worth.

    python benchmarks/bench_training.py --quick
    torchrun --nproc-per-node 4 benchmarks/bench_training.py --compressor none --no-overlap
    mpirun -np 2 python benchmarks/bench_training.py --models lstm fcn --data digits --prefetch 1
    mpirun -np 16 -hosts a,b,c,d python benchmarks/bench_training.py --json rows.jsonl

A row of --json is a model: seconds as {median, low, high}, rates as {mean, margin}. Exit code: 0; 1
if the parameters of the ranks differ at the end; 2 for bad input.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import collective_report
import torch
import training_report as report
from torch import nn
from torch.optim import SGD, Optimizer
from training_data import SOURCES, Images, Text, make_dataset, make_loader
from training_loop import Measured, Schedule, Training, alone, take_turns
from training_models import MODELS, Scale, why_refused
from training_prediction import predict, profile

import ddl
from ddl import flags
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.workloads.idx import FASHION_MNIST_DIR

TIMEOUT_SECONDS = 3600.0  # ranks wait while rank 0 trains alone
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
QUICK = ("--models", "resnet20", "--batch-size", "4", "--num-warmup-batches", "1")
QUICK_LENGTH = ("--num-batches-per-iter", "2", "--num-iters", "2")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = flags.Parser(
        prog="bench_training.py",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def one(flag: str, default: Any, type: Any, help: str, **more: Any) -> None:
        parser.add_argument(flag, default=default, type=type, help=help, **more)

    def switch(flag: str, default: bool, help: str) -> None:
        parser.add_argument(flag, default=default, action=BooleanOptionalAction, help=help)

    positive, count = flags.positive_int, flags.count
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="to train"
    )
    one("--batch-size", None, positive, "samples per worker; default the papers', small on CPUs")
    one("--image-size", None, positive, "pixels of a side, for models that take any size")
    one("--compressor", "gtopk", str, "how gradients travel", choices=ddl.COMPRESSORS)
    one("--density", 0.001, flags.density, "fraction of entries kept")
    one("--data", "synthetic", str, "random, or real; text for lstm", choices=SOURCES)
    one("--data-dir", FASHION_MNIST_DIR, Path, "folder of Fashion-MNIST")
    one("--prefetch", 0, count, "processes that read batches ahead; 0: read when needed")
    switch("--pin-memory", cuda, "copy to the GPU from page-locked memory, without waiting")
    switch("--cudnn-benchmark", cuda, "let cuDNN try its algorithms and take the fastest")
    switch("--channels-last", False, "images and weights in that order in memory")
    switch("--overlap", True, "aggregate during the backward pass, not after it")
    parser.add_argument("--single-first", action="store_true", help="also time rank 0 alone")
    one("--threads", None, positive, "of a rank, for torch; default its share of the cores")
    one("--num-warmup-batches", 10 if cuda else 2, count, "iterations that do not count")
    one("--num-batches-per-iter", 10 if cuda else 2, positive, "iterations of a rate")
    one("--num-iters", 10 if cuda else 5, positive, "rates")
    one("--json", None, flags.output_file, "write one JSON object a model to this file")
    parser.add_argument("--quick", action="store_true", help="one small model; given flags win")
    args = parser.parse_args(arguments)
    if args.quick:
        given = sys.argv[1:] if arguments is None else arguments
        args = parser.parse_args([*QUICK, *QUICK_LENGTH, *given])
    args.parser = parser
    args.scales = {name: scale_of(name, args, cuda) for name in args.models}
    for name, scale in args.scales.items():
        problem = why_refused(name, scale)
        if problem:
            parser.error(problem)
    return args


def scale_of(name: str, args: argparse.Namespace, cuda: bool) -> Scale:
    """What a model is fed."""
    model = MODELS[name]
    default = model.gpu if cuda else model.cpu
    resizable = model.channels and not model.fixed_size and args.image_size
    return Scale(args.batch_size or default.batch, args.image_size if resizable else default.size)


class Bench:
    """One rank of a job, and what it was asked for."""

    def __init__(self, comm: Communicator, args: argparse.Namespace) -> None:
        """Share the cores, or take a GPU. Collective."""
        self.comm, self.args = comm, args
        self.cores = _cores()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", comm.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        torch.backends.cudnn.benchmark = args.cudnn_benchmark
        torch.set_num_threads(args.threads or max(1, self.cores // comm.local_size))
        self.schedule = Schedule(args.num_warmup_batches, args.num_batches_per_iter, args.num_iters)
        self.machine = {
            "P": comm.size,
            "hosts": len(set(messages.gather_objects(comm, socket.gethostname()))),
            "transport": type(comm).__name__,
            "device": _name(self.device),
            "threads": torch.get_num_threads(),
            **collective_report.machine(),
        }

    def measure(self, name: str, dataset: Images | Text) -> dict[str, Any]:
        """Train one model, and print what was found on rank 0. Collective.

        Returns:
            The row for --json.
        """
        args, scale = self.args, self.args.scales[name]
        pinned = args.pin_memory and self.device.type == "cuda"
        torch.manual_seed(0)
        model = MODELS[name].make(scale.size)
        loader = make_loader(dataset, scale.batch, self.comm.rank, args.prefetch, pinned)
        batches = iter(loader)

        def training(model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]):
            order = {"channels_last": args.channels_last, "non_blocking": pinned}
            return Training(model, make_optimizer, batches, scale.batch, self.device, **order)

        numel = sum(parameter.numel() for parameter in model.parameters())
        if self.comm.rank == 0:
            print(f"\n{MODELS[name].title}: {numel:,} parameters, {self._what(name)}", flush=True)
        bare = training(copy.deepcopy(model), _sgd)
        single = alone(self.comm, bare, self.schedule) if args.single_first else None
        distributed = training(model, self._distributed)
        silent, real = take_turns(self.comm, [bare, distributed], self.schedule)
        optimizer = distributed.optimizer
        optimizer.close()
        totals = optimizer.totals.all
        sent = messages.gather_objects(self.comm, totals.bytes_sent / totals.steps)
        digests = messages.gather_objects(self.comm, ddl.parameters_digest(model))
        predicted = predict(profile(distributed.model, silent, scale.batch), real.buckets)
        if self.comm.rank == 0:
            print(report.rates(MODELS[name].unit, self.comm.size, real))
            print(report.table(real, silent, single))
            print(report.verdict(real, silent, single, predicted), flush=True)
        return {
            **self._asked_for(name, scale),
            "parameters": numel,
            **self._found(real, silent, single),
            "predicted": predicted,
            "buckets": len(real.buckets),
            "bytes_sent_per_step": sum(sent) / len(sent),
            "bytes_dense_per_step": totals.bytes_dense / totals.steps,
            "skipped_steps": optimizer.skipped_steps,
            "parameters_agree": len(set(digests)) == 1,
            **self.machine,
        }

    def _distributed(self, model: nn.Module) -> ddl.DistributedOptimizer:
        args = self.args
        return ddl.DistributedOptimizer(
            _sgd(model),
            model.named_parameters(),
            compressor=args.compressor,
            density=args.density,
            # The engine would wait for a second backward pass before it sends: step() comes instead
            # and sends the same buckets.
            backward_passes_per_step=1 if args.overlap else 2,
            comm=self.comm,
        )

    def _what(self, name: str) -> str:
        scale, model, args = self.args.scales[name], MODELS[name], self.args
        size = f"{model.channels} x {scale.size} x {scale.size}" if model.channels else "sequences"
        density = "" if args.compressor == "none" else f" of density {args.density:g}"
        return (
            f"batches of {scale.batch}, {size}, {args.data}; {args.compressor}{density}, "
            f"{'with' if args.overlap else 'without'} overlap"
        )

    def _asked_for(self, name: str, scale: Scale) -> dict[str, Any]:
        flags = ("compressor", "density", "overlap", "data", "prefetch", "pin_memory")
        more = ("cudnn_benchmark", "channels_last")
        return {
            "model": name,
            "batch_size": scale.batch,
            "size": scale.size,
            **{flag: getattr(self.args, flag) for flag in (*flags, *more)},
        }

    def _found(self, real: Measured, silent: Measured, single: Measured | None) -> dict[str, Any]:
        return {
            "measured": report.measured_as_dict(real),
            "silent": report.measured_as_dict(silent),
            "alone": report.measured_as_dict(single),
            "efficiency": report.efficiency(silent, real),
            "efficiency_by_turns": report.by_turns(silent, real)._asdict(),
            "efficiency_alone": report.efficiency(single, real),
        }


def work(comm: Communicator, args: argparse.Namespace, data: dict[str, Images | Text]) -> bool:
    """Measure everything; rank 0 writes each row as soon as it is there. Collective.

    Returns:
        Whether the ranks ended with the same parameters.
    """
    bench = Bench(comm, args)
    file: TextIO | None = None
    if comm.rank == 0:
        print(", ".join(f"{name} {of}" for name, of in bench.machine.items()))
        note = report.cores_note(comm.local_size, bench.cores, bench.device.type == "cpu")
        if note:
            print(f"note: {note}")
        file = args.json.open("w") if args.json else None
    agree = True
    try:
        for name in args.models:
            row = bench.measure(name, data[name])
            agree &= row["parameters_agree"]
            if file:
                print(json.dumps(row), file=file, flush=True)
    finally:
        if file:
            file.close()
    if not agree and comm.rank == 0:
        print("bench_training.py: the ranks' parameters differ", file=sys.stderr)
    return agree


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        data = {
            name: make_dataset(args.data, name, scale.size, args.data_dir)
            for name, scale in args.scales.items()
        }
    except (ValueError, OSError) as error:
        args.parser.error(str(error))
    try:
        return 0 if work(ddl.init(timeout=TIMEOUT_SECONDS), args, data) else 1
    finally:
        ddl.shutdown()


def _sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def _cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
