import pytest
from arguments import BadInput, parse_arguments

import ddl


def complaint(*arguments: str) -> str:
    with pytest.raises(BadInput) as caught:
        parse_arguments(arguments)
    return str(caught.value)


def test_defaults_are_the_main_job():
    args = parse_arguments([])
    assert (args.model, args.dataset, args.compressor) == ("resnet50", "digits", "gtopk")
    assert args.density == 0.001
    assert args.density_warmup == (0.25, 0.0625, 0.015625, 0.004)


def test_density_warmup_can_be_set_and_switched_off():
    assert parse_arguments(["--density-warmup", "0.5,0.1"]).density_warmup == (0.5, 0.1)
    assert parse_arguments(["--density-warmup", "none"]).density_warmup == ()


@pytest.mark.parametrize("compressor", ddl.COMPRESSORS)
def test_every_compressor_is_an_argument(compressor):
    assert parse_arguments(["--compressor", compressor]).compressor == compressor


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compressor", "gtopkk"], ["--compressor", "gtopkk", "gaussiank"]),
        (["--dataset", "mnist"], ["--dataset", "mnist", "fashion-mnist"]),
        (["--density", "0"], ["--density", "'0'", "(0, 1]"]),
        (["--density", "1.5"], ["--density", "'1.5'", "(0, 1]", "not a percentage"]),
        (["--density", "nan"], ["--density", "'nan'", "(0, 1]"]),
        (["--density-warmup", "0.25,7"], ["--density-warmup", "'7'", "(0, 1]"]),
        (["--density-warmup", ""], ["--density-warmup", "(0, 1]"]),
        (["--batch-size", "0"], ["--batch-size", "'0'", "1 or more"]),
        (["--batch-size", "2.5"], ["--batch-size", "'2.5'", "whole number"]),
        (["--epochs", "many"], ["--epochs", "'many'"]),
        (["--epochs", "1" + 400 * "0"], ["--epochs", "whole number"]),
        (["--base-lr", "inf"], ["--base-lr", "'inf'", "above 0"]),
        (["--lr-steps", "30,0"], ["--lr-steps", "'0'", "above 0"]),
        (["--lr-steps", "30,"], ["--lr-steps", "above 0"]),
        (["--lr-scaling", "square"], ["--lr-scaling", "square", "linear"]),
        (["--momentum", "1"], ["--momentum", "[0, 1)"]),
        (["--wd", "-1"], ["--wd", "'-1'", "0 or more"]),
        (["--bucket-mb", "0"], ["--bucket-mb", "above 0"]),
        (["--frobnicate"], ["--frobnicate", "--help"]),
        (["--comp", "topk"], ["--comp", "--help"]),
        (["--dataset", "imagefolder"], ["--train-dir", "--dataset imagefolder"]),
        (["--dataset", "imagefolder", "--train-dir", "x"], ["--val-dir"]),
        (["--train-dir", "x"], ["--train-dir", "digits", "imagefolder"]),
        (["--download"], ["--download", "digits", "cifar10"]),
        (["--compressor", "topk", "--collective", "tree"], ["tree", "topk", "gtopk"]),
        (["--collective", "star"], ["--collective", "star", "tree"]),
        (["--wire", "zip"], ["--wire", "zip", "compact"]),
        (["--compressor", "randomk", "--wire", "compact"], ["--wire compact", "randomk"]),
        (["--global-density", "2"], ["--global-density", "'2'", "(0, 1]"]),
        (["--compressor", "topk", "--global-density", "0.1"], ["--global-density 0.1", "topk"]),
    ],
)
def test_bad_arguments_are_told_in_one_line(arguments, words):
    text = complaint(*arguments)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_synthetic_imagefolder_needs_no_folders():
    assert parse_arguments(["--dataset", "imagefolder", "--synthetic"]).synthetic
