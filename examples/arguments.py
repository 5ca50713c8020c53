"""Command lines of the examples. A wrong argument raises BadInput, which names the cure."""

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import recipes

import ddl
from ddl import flags
from ddl.compressors import GTOPK_CHOICES
from ddl.wires import WIRES

DATASETS = ("digits", "fashion-mnist", "cifar10", "imagefolder")


class BadInput(ValueError):
    """Something the user asked for cannot be done. The message is one line: got, expected, cure."""


def one_line(error: object) -> str:
    """The text of an error, its line breaks turned into spaces."""
    return " ".join(str(error).split())


momentum = flags.number(float, lambda value: 0 <= value < 1, "a number in [0, 1)")


def densities(text: str) -> tuple[float, ...]:
    """One density per epoch, or `none`."""
    return () if text == "none" else tuple(flags.density(part) for part in text.split(","))


def epochs(text: str) -> tuple[float, ...]:
    """Epochs at which something happens, each later than the one before, or `none`."""
    if text == "none":
        return ()
    moments = tuple(flags.positive_float(part) for part in text.split(","))
    if any(after <= before for before, after in pairwise(moments)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected epochs in ascending order")
    return moments


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class _Parser(argparse.ArgumentParser):
    """Speaks once, not once per rank, and ends in BadInput, not in a usage dump."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{one_line(message)}; --help lists all arguments")

    def print_help(self, file: Any = None) -> None:
        if ddl.rank() == 0:
            super().print_help(file)


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser without arguments yet."""
    return _Parser(
        prog=prog, description=description, formatter_class=_HelpFormatter, allow_abbrev=False
    )


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Reads a command line behind that of its recipe, so that flags given there win.

    Returns:
        The arguments; `recipe` is a `recipes.UsedRecipe`, or None.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    if args.recipe is not None:
        recipe = recipes.RECIPES[args.recipe]
        args = parser.parse_args([*recipe.words, *given])
        args.recipe = recipes.use(recipe, given)
    return args


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; `arguments` stands in for it in tests.

    Raises:
        BadInput: an argument is unknown, or has a value that no run can use.
    """
    parser = make_parser(
        "train_resnet50.py",
        "Train an image classifier with sparsified gradients, one process per worker.",
    )
    add_recipe(parser, recipes.IMAGES)
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", choices=DATASETS, default="digits", help="what to learn")
    data.add_argument("--data-dir", type=Path, help="folder of fashion-mnist or cifar10")
    data.add_argument("--download", action="store_true", help="fetch cifar10 if it is not there")
    data.add_argument("--train-dir", type=Path, help="imagefolder: one folder per class")
    data.add_argument("--val-dir", type=Path, help="imagefolder: the same classes, other images")
    data.add_argument("--synthetic", action="store_true", help="random images, to measure speed")
    data.add_argument(
        "--image-size", type=flags.positive_int, help="pixels; default: as the model needs"
    )
    data.add_argument("--workers", type=flags.count, default=0, help="loader processes per worker")

    training = parser.add_argument_group("training")
    training.add_argument(
        "--model", default="resnet50", help="resnet20, vgg16-cifar, or one of torchvision"
    )
    training.add_argument(
        "--batch-size", type=flags.positive_int, default=16, help="images per worker"
    )
    training.add_argument(
        "--epochs", type=flags.positive_int, default=8, help="passes over the data"
    )
    training.add_argument("--max-steps", type=flags.positive_int, help="end after so many steps")
    training.add_argument(
        "--base-lr", type=flags.positive_float, default=0.01, help="learning rate of one worker"
    )
    training.add_argument(
        "--lr-scaling",
        choices=("linear", "none"),
        default="linear",
        help="the peak rate: P * base-lr, or base-lr",
    )
    training.add_argument(
        "--warmup-epochs",
        type=flags.not_negative,
        default=2.0,
        help="rise to the peak from 1/P of it",
    )
    training.add_argument(
        "--lr-steps",
        type=epochs,
        default="none",
        help="epochs after which the rate falls to a tenth; none: it falls along half a cosine",
    )
    training.add_argument("--momentum", type=momentum, default=0.9, help="of SGD")
    training.add_argument("--wd", type=flags.not_negative, default=1e-4, help="weight decay")
    training.add_argument("--seed", type=flags.count, default=42, help="of weights and shuffling")
    training.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    training.add_argument("--log-dir", type=Path, help="default: logs/MODEL-DATASET-COMPRESSOR-P")
    add_timeline(training)

    add_checkpoints(parser)
    add_compression(parser)
    args = parse(parser, arguments)
    _check_together(args)
    check_checkpoints(args)
    check_compression(args)
    return args


def add_recipe(parser: argparse.ArgumentParser, script: str) -> None:
    """What `parse` reads."""
    choices = recipes.names(script)
    recipe = parser.add_argument_group(
        "recipe",
        "Published settings of gTop-k S-SGD. Flags given beside it win, as in: mpirun -np 4 python "
        f"examples/{script} --recipe {choices[0]} --batch-size 128",
    )
    recipe.add_argument("--recipe", choices=choices, help="what the defaults are taken from")


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """What `checkpoints.Checkpoints` reads."""
    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument(
        "--checkpoint-dir", type=Path, help="save here after each epoch and at the end"
    )
    checkpoints.add_argument(
        "--checkpoint-every", type=flags.positive_int, help="save after every so many steps, too"
    )
    checkpoints.add_argument(
        "--resume", action="store_true", help="go on from the newest one in --checkpoint-dir"
    )


def add_timeline(group: Any) -> None:
    """What `script.wrap` reads, too."""
    group.add_argument(
        "--timeline", type=Path, help="file for a timeline of the first steps; DDL_TIMELINE"
    )


def add_compression(parser: argparse.ArgumentParser) -> None:
    """What `script.wrap` reads."""
    compression = parser.add_argument_group("gradient compression")
    compression.add_argument(
        "--compressor", choices=tuple(ddl.COMPRESSORS), default="gtopk", help="what is sent"
    )
    compression.add_argument("--density", type=flags.density, default=0.001, help="fraction sent")
    compression.add_argument(
        "--density-warmup",
        type=densities,
        default=recipes.PUBLISHED_WARMUP,
        help="densities of the first epochs, or none",
    )
    compression.add_argument(
        "--global-density",
        type=flags.density,
        help="fraction kept of the sum; default: the density, twice that with exact sums",
    )
    compression.add_argument("--collective", choices=GTOPK_CHOICES, help="how gtopk aggregates")
    compression.add_argument(
        "--hierarchical",
        choices=("auto", "yes", "no"),
        default="auto",
        help="add up within nodes first",
    )
    compression.add_argument(
        "--wire", choices=tuple(WIRES), help="how entries travel; default: plain"
    )
    compression.add_argument(
        "--bucket-mb",
        type=flags.positive_float,
        default=25.0,
        help="gradients sent together, in MiB",
    )
    compression.add_argument(
        "--dense-below",
        type=flags.count,
        default=0,
        help="parameters smaller than this are sent whole",
    )
    compression.add_argument(
        "--diagnostics-every",
        type=flags.count,
        default=0,
        help="look into gradients and residuals of rank 0 every so many steps",
    )


def _check_together(args: argparse.Namespace) -> None:
    """What argparse cannot see: arguments that need or exclude each other."""
    folders = args.dataset == "imagefolder"
    for flag, value in (("--train-dir", args.train_dir), ("--val-dir", args.val_dir)):
        if folders and value is None and not args.synthetic:
            asked, data = "--dataset imagefolder", "a folder with a sub-folder of images per class"
            if args.recipe is not None and "--dataset" not in args.recipe.overridden:
                asked, data = f"--recipe {args.recipe.recipe.name}", args.recipe.recipe.data
            raise BadInput(f"{asked} without {flag}, expected {data}; add {flag} PATH")
        if not folders and value is not None:
            raise BadInput(
                f"{flag} with --dataset {args.dataset}, expected imagefolder; "
                f"add --dataset imagefolder or leave {flag} out"
            )
    if args.data_dir and args.dataset not in ("fashion-mnist", "cifar10"):
        raise BadInput(
            f"--data-dir with --dataset {args.dataset}, expected fashion-mnist or cifar10; "
            "leave --data-dir out"
        )
    if args.download and args.dataset != "cifar10":
        raise BadInput(
            f"--download with --dataset {args.dataset}, expected cifar10; leave --download out"
        )


def check_checkpoints(args: argparse.Namespace) -> None:
    """Of the arguments of `add_checkpoints`, those that need each other."""
    for flag, value in (("--resume", args.resume), ("--checkpoint-every", args.checkpoint_every)):
        if value and not args.checkpoint_dir:
            raise BadInput(
                f"{flag} without --checkpoint-dir, expected the folder of checkpoints; add "
                "--checkpoint-dir PATH"
            )
    # Without a look they would be removed one by one, as this run saves its own.
    if args.checkpoint_dir and not args.resume and any(args.checkpoint_dir.glob("*-step-*")):
        raise BadInput(
            f"--checkpoint-dir {args.checkpoint_dir} holds checkpoints of another run, expected "
            "none; add --resume to go on with it, or give another folder"
        )


def check_compression(args: argparse.Namespace) -> None:
    """Of the arguments of `add_compression`, those that need or exclude each other."""
    has_choice = args.compressor.endswith("gtopk")
    for flag, value in (
        ("--collective", args.collective),
        ("--global-density", args.global_density),
    ):
        if value is not None and not has_choice:
            raise BadInput(
                f"{flag} {value} with --compressor {args.compressor}, expected gtopk or "
                f"gaussiank-gtopk; leave {flag} out"
            )
    if args.wire and args.compressor in ("none", "randomk"):
        raise BadInput(
            f"--wire {args.wire} with --compressor {args.compressor}, which sends no indices, "
            "expected another compressor; leave --wire out"
        )
    if args.diagnostics_every and args.compressor == "none":
        raise BadInput(
            "--diagnostics-every with --compressor none, which leaves nothing to look at, expected "
            "another compressor; leave --diagnostics-every out"
        )
