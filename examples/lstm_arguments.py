"""The command line of train_lstm.py."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import arguments as shared
import recipes

from ddl import flags
from ddl.workloads.lstm import SIZES
from ddl.workloads.text import TOKENIZERS

# Without --text; more would take longer than the minutes that a first try should take.
DEFAULT_TRAIN_TOKENS, DEFAULT_HELD_OUT_TOKENS = 400_000, 50_000


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; `arguments` stands in for it in tests.

    Raises:
        BadInput: an argument is unknown, or has a value that no run can use.
    """
    parser = shared.make_parser(
        "train_lstm.py",
        "Train a language model with sparsified gradients, one process per worker.",
    )
    shared.add_recipe(parser, recipes.LANGUAGE)
    data = parser.add_argument_group("text")
    data.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        help="files; names with valid and test in them "
        "say which are for judging; default: Python's own library",
    )
    data.add_argument(
        "--tokenizer", choices=tuple(TOKENIZERS), help="default: words for --text, else code"
    )
    data.add_argument("--vocabulary", type=_words, default=10_000, help="most frequent words kept")
    data.add_argument(
        "--train-tokens", type=flags.count, help="0: all; default: all of --text, else 400,000"
    )
    data.add_argument(
        "--held-out-tokens", type=flags.count, help="0: all; default: all of --text, else 50,000"
    )

    training = parser.add_argument_group("training")
    training.add_argument("--size", choices=tuple(SIZES), default="small", help="of the model")
    training.add_argument("--tied", action="store_true", help="embedding and output share weights")
    training.add_argument("--dropout", type=_dropout, help="default: as the size has it")
    training.add_argument(
        "--batch-size", type=flags.positive_int, default=20, help="streams of text per worker"
    )
    training.add_argument(
        "--bptt", type=flags.positive_int, default=35, help="words before gradients are cut"
    )
    training.add_argument("--epochs", type=flags.positive_int, default=6, help="passes")
    training.add_argument("--max-steps", type=flags.positive_int, help="end after so many steps")
    training.add_argument(
        "--base-lr", type=flags.positive_float, default=20.0, help="learning rate, on any P"
    )
    training.add_argument(
        "--lr-decay",
        type=flags.at_least_one,
        default=4.0,
        help="divisor after an epoch without improvement; 1: the rate stays",
    )
    training.add_argument("--clip", type=flags.positive_float, default=0.25, help="gradient norm")
    training.add_argument("--momentum", type=shared.momentum, default=0.0, help="of SGD")
    training.add_argument("--wd", type=flags.not_negative, default=0.0, help="weight decay")
    training.add_argument("--seed", type=flags.count, default=42, help="of weights and dropout")
    training.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    training.add_argument("--log-dir", type=Path, help="default: logs/lstm-SIZE-COMPRESSOR-P")
    shared.add_timeline(training)

    shared.add_checkpoints(parser)
    shared.add_compression(parser)
    args = shared.parse(parser, arguments)
    shared.check_checkpoints(args)
    shared.check_compression(args)
    if args.recipe is not None and not args.text:
        recipe = args.recipe.recipe
        raise shared.BadInput(
            f"--recipe {recipe.name} without --text, expected {recipe.data}; "
            "add --text ptb.train.txt ptb.valid.txt ptb.test.txt"
        )
    args.tokenizer = args.tokenizer or ("words" if args.text else "code")
    if args.train_tokens is None:
        args.train_tokens = 0 if args.text else DEFAULT_TRAIN_TOKENS
    if args.held_out_tokens is None:
        args.held_out_tokens = 0 if args.text else DEFAULT_HELD_OUT_TOKENS
    return args


_words = flags.number(int, lambda value: value >= 2, "a whole number of 2 or more")
_dropout = flags.number(float, lambda value: 0 <= value < 1, "a number in [0, 1)")
