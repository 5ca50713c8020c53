"""Does compression pay here, and which? See `python -m ddl.advise --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ddl import flags
from ddl.advise import candidates, offline, plot, report
from ddl.advise.advice import advise
from ddl.advise.arguments import BadInput, parse
from ddl.advise.measured import Measurement, imagined, measure
from ddl.advise.predictions import predict
from ddl.errors import DDLError


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or look up, predict, advise."""
    options = parse(arguments)
    try:
        if options.plot:
            plot.load_matplotlib()  # before minutes are spent
        measurement, speaks = _offline(options) if options.offline else _measured(options)
        if speaks:
            _report(options, measurement)
    except BadInput as error:
        if flags.is_first_rank():
            print(f"python -m ddl.advise: {error}", file=sys.stderr)
        sys.exit(2)


def _offline(options: argparse.Namespace) -> tuple[Measurement, bool]:
    chosen = [candidates.find(label, options.workers) for label in options.compressors]
    situation = offline.situation(
        options.model,
        options.batch_size,
        options.density,
        options.bucket_bytes,
        options.network,
        options.workers,
        options.compute,
        chosen,
    )
    return Measurement(situation, {}), True


def _measured(options: argparse.Namespace) -> tuple[Measurement, bool]:
    import torch

    from ddl import kernels
    from ddl.advise.computation import cores
    from ddl.advise.workloads import load
    from ddl.world import init

    try:
        comm = init()
    except (DDLError, ValueError) as error:
        raise BadInput(str(error)) from error
    if options.network is not None and comm.size > 1:
        raise BadInput(
            f"--network imagines workers, and there are {comm.size} to measure; start it alone, or "
            "leave out --network and --workers"
        )
    threads = options.threads or max(1, cores() // comm.local_size)
    torch.set_num_threads(threads)
    kernels.set_num_threads(threads)
    torch.manual_seed(0)
    workload = load(options.model, options.batch_size, options.image_size, seed=comm.rank)
    chosen = [candidates.find(label, comm.size) for label in options.compressors]
    measurement = measure(
        workload,
        chosen,
        options.density,
        options.bucket_bytes,
        comm,
        rounds=options.rounds,
        verify_steps=options.verify_steps if options.verify else 0,
    )
    if options.network is not None:
        there = [candidates.find(label, options.workers) for label in options.compressors]
        situation = imagined(measurement.situation, options.workers, options.network, there)
        measurement = Measurement(situation, {})
    return measurement, comm.rank == 0


def _report(options: argparse.Namespace, measurement: Measurement) -> None:
    situation = measurement.situation
    predictions = [predict(situation, candidate) for candidate in situation.aggregations]
    advice = advise(predictions, measurement.measured)
    # With JSON on stdout, people read stderr.
    out = sys.stderr if options.json == "-" else sys.stdout
    print(report.table(situation, predictions, measurement.measured), file=out)
    for line in (
        report.busy_line(measurement.own_share),
        report.hiding_line(situation, predictions, advice),
    ):
        if line:
            print(line, file=out)
    print(advice.sentence, file=out, flush=True)
    if options.json:
        answer = report.as_object(situation, predictions, advice, measurement.measured)
        text = json.dumps(answer, indent=1)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    if options.plot:
        plot.draw(situation, predictions, advice, options.plot)


if __name__ == "__main__":
    main()
