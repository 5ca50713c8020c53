"""The command line of `python -m ddl.advise`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddl import flags
from ddl.advise import candidates
from ddl.links import Line, Links
from ddl.perfmodel.hardware import LINKS, RESNET50_RATE, find_link
from ddl.perfmodel.networks import NETWORKS
from ddl.settings import Settings

EXAMPLES = """examples:
  mpirun -np 4 python -m ddl.advise --model resnet18 --image-size 64 --batch-size 4 --verify
  python -m ddl.advise --model resnet50 --network 10gbe --workers 16
  python -m ddl.advise --offline --network 10gbe --workers 64 --compute v100 --model resnet50
"""


class BadInput(Exception):
    """What the user gave cannot be used; the message is one line with the remedy."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; of bad input only one line remains, and exit status 2."""
    parser = flags.Parser(
        prog="python -m ddl.advise",
        description="Does compression pay here, and which? Start it under mpirun or torchrun, on "
        "the workers that are to train; alone with --network and --workers; or --offline.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        default="resnet50",
        help="a torchvision model, or MODULE:FUNCTION that returns an nn.Module, or a pair of one "
        f"and its input; with --offline one of {', '.join(NETWORKS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=flags.positive_int,
        default=32,
        help="samples of a worker (default: %(default)s)",
    )
    parser.add_argument(
        "--image-size",
        type=flags.positive_int,
        help="pixels of a side (default: 224); not with --offline",
    )
    parser.add_argument(
        "--density",
        type=flags.density,
        default=0.001,
        help="fraction of entries kept (default: %(default)s)",
    )
    parser.add_argument(
        "--compressors",
        nargs="+",
        default=list(candidates.DEFAULT),
        metavar="NAME[:COLLECTIVE]",
        help=f"to compare (default: {' '.join(candidates.DEFAULT)})",
    )
    parser.add_argument(
        "--bucket-bytes",
        type=flags.positive_int,
        help="gradient bytes aggregated together (default: DDL_FUSION_THRESHOLD, 25 MiB)",
    )
    parser.add_argument(
        "--rounds",
        type=flags.positive_int,
        default=9,
        help="measurements of everything, in turns, of which medians count; up to three times as "
        "many where they scatter (default: %(default)s)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="run steps with each compressor and time them, too"
    )
    parser.add_argument(
        "--verify-steps",
        type=flags.positive_int,
        default=2,
        help="steps with each compressor in each round (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=flags.positive_int,
        help="torch's threads of a worker (default: its share of the machine's cores)",
    )
    parser.add_argument(
        "--offline", action="store_true", help="measure nothing; take published figures"
    )
    parser.add_argument(
        "--network",
        type=_network,
        help=f"one of {', '.join(LINKS)}, or ALPHA,BETA in seconds and seconds per byte",
    )
    parser.add_argument(
        "--workers",
        type=flags.number(int, lambda value: 1 <= value <= 2**20, "a whole number of 1 or more"),
        help="on that network",
    )
    parser.add_argument(
        "--compute", choices=list(RESNET50_RATE), help="with --offline: what each worker has"
    )
    parser.add_argument(
        "--plot", type=flags.plot_file, metavar="FILE", help="draw what is predicted"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=_output, help="write one JSON object to a file, or to - "
    )
    options = parser.parse_args(arguments)
    try:
        _check(options)
        if options.bucket_bytes is None:
            options.bucket_bytes = Settings.from_environment().bucket_bytes
    except ValueError as error:
        parser.error(str(error))
    return options


def _check(options: argparse.Namespace) -> None:
    for label in options.compressors:
        candidates.find(label, 2)
    if len(set(options.compressors)) < len(options.compressors):
        raise ValueError("--compressors names one twice, expected each once")
    if options.offline:
        missing = [
            flag for flag in ("network", "workers", "compute") if getattr(options, flag) is None
        ]
        if missing:
            raise ValueError(f"--offline needs --{' and --'.join(missing)}, too")
        if options.verify:
            raise ValueError("--verify runs steps, and --offline runs nothing; leave one out")
        if options.image_size is not None:
            raise ValueError("--offline knows models at one image size only; leave --image-size")
        if options.model not in NETWORKS:
            raise ValueError(
                f"--offline knows {', '.join(NETWORKS)}, got --model {options.model}; without "
                "--offline it may be any model"
            )
        return
    if options.compute is not None:
        raise ValueError("--compute goes with --offline; otherwise computing is measured")
    if (options.network is None) != (options.workers is None):
        raise ValueError("--network and --workers go together; give both or none")
    if options.network is not None and options.verify:
        raise ValueError("--verify needs the workers, and --network only imagines them")


def _network(text: str) -> Links:
    try:
        if "," in text:
            return Links.parse(text)
        link = find_link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor ALPHA,BETA") from error
    return Links(Line(link.alpha, link.beta))


def _output(text: str) -> str:
    """A file whose folder exists, or - for stdout."""
    return text if text == "-" else str(flags.output_file(text))
