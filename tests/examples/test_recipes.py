"""Recipes are what they say, give way to flags, and tell what they did."""

import json
import pickle

import lstm_arguments
import numpy as np
import pytest
import train_resnet50
from arguments import BadInput, parse_arguments
from launch import ROOT
from recipes import IMAGES, LANGUAGE, RECIPES, names
from torchvision.datasets import CIFAR10

import ddl
from ddl.comm import threads

SCRIPT = str(ROOT / "examples" / "train_resnet50.py")
DATA = {  # what each needs, so that its command line is complete
    "alexnet-imagenet": ["--train-dir", "x", "--val-dir", "y"],
    "resnet50-imagenet": ["--train-dir", "x", "--val-dir", "y"],
    "lstm-ptb": ["--text", "x"],
}
PARSERS = {IMAGES: parse_arguments, LANGUAGE: lstm_arguments.parse_arguments}


def parse(name: str, *arguments: str):
    return PARSERS[RECIPES[name].script](["--recipe", name, *DATA.get(name, []), *arguments])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_command_line_of_its_script_with_the_published_sparsification(name):
    args = parse(name)
    assert (args.recipe.recipe.name, dict(args.recipe.overridden)) == (name, {})
    assert (args.compressor, args.density) == ("gtopk", 0.001)
    assert args.density_warmup == (0.25, 0.0625, 0.015625, 0.004)


def test_recipes_for_images_are_as_published():
    settings = ("model", "dataset", "batch_size", "epochs", "base_lr", "momentum", "wd", "lr_steps")
    cifar10, imagenet = (81, 122, 155), (30, 60, 80)
    expected = {
        "resnet20-cifar10": ("resnet20", "cifar10", 32, 141, 0.1, 0.9, 1e-4, cifar10),
        "vgg16-cifar10": ("vgg16-cifar", "cifar10", 32, 141, 0.1, 0.9, 1e-4, cifar10),
        "alexnet-imagenet": ("alexnet", "imagefolder", 256, 95, 0.01, 0.9, 5e-4, imagenet),
        "resnet50-imagenet": ("resnet50", "imagefolder", 64, 95, 0.01, 0.9, 5e-4, imagenet),
    }
    assert names(IMAGES) == list(expected)
    for name, values in expected.items():
        args = parse(name)
        assert tuple(getattr(args, setting) for setting in settings) == values
        assert (args.warmup_epochs, args.lr_scaling) == (10, "none")


def test_the_recipe_for_language_is_as_published():
    args = parse("lstm-ptb")
    assert names(LANGUAGE) == ["lstm-ptb"]
    assert (args.size, args.dropout, args.tied, args.vocabulary) == ("large", 0.65, False, 10_000)
    assert (args.batch_size, args.bptt, args.epochs, args.clip) == (20, 35, 50, 0.25)
    assert (args.base_lr, args.lr_decay, args.momentum, args.wd) == (1.0, 1.0, 0.0, 0.0)
    assert (args.train_tokens, args.tokenizer) == (0, "words")


@pytest.mark.parametrize("before", [True, False])
def test_flags_win_over_a_recipe_wherever_they_stand(before):
    flags = ["--epochs", "3", "--wd=0.5", "--base-lr", "0.1", "--seed", "7"]
    recipe = ["--recipe", "resnet20-cifar10"]
    args = parse_arguments([*flags, *recipe] if before else [*recipe, *flags])
    assert (args.epochs, args.wd, args.base_lr, args.seed, args.batch_size) == (3, 0.5, 0.1, 7, 32)
    # What is given as the recipe has it overrides nothing.
    assert args.recipe.overridden == {"--epochs": "3", "--wd": "0.5"}


def test_epochs_at_which_the_rate_falls_ascend():
    with pytest.raises(BadInput, match="expected epochs in ascending order"):
        parse_arguments(["--lr-steps", "5,2"])


def test_a_recipe_tells_what_it_set_and_what_it_did_not():
    text = str(parse("alexnet-imagenet", "--epochs", "3").recipe)
    for word in ("alexnet-imagenet", "1901.04359", "--batch-size 256", "--wd 5e-4", "image-net"):
        assert word in text
    assert "overridden: --epochs 3, not 95" in text
    assert "--epochs 95" not in text
    assert "not as published: images for validation" in text


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("alexnet-imagenet", [], ["--recipe alexnet-imagenet", "image-net.org", "--train-dir"]),
        ("resnet50-imagenet", ["--train-dir", "x"], ["ILSVRC 2012", "add --val-dir PATH"]),
        ("resnet20-cifar11", [], ["--recipe", "resnet20-cifar11", "resnet20-cifar10"]),
        ("lstm-ptb", [], ["--recipe", "lstm-ptb", "resnet20-cifar10"]),  # of the other script
        ("vgg16-cifar10", ["--train-dir", "x"], ["--train-dir", "cifar10"]),
    ],
)
def test_what_a_recipe_lacks_is_told_in_one_line(name, arguments, words):
    with pytest.raises(BadInput) as caught:
        parse_arguments(["--recipe", name, *arguments])
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_ptb_is_asked_for_and_not_replaced_by_other_text():
    with pytest.raises(BadInput, match=r"--recipe lstm-ptb without --text.*simple-examples.*add"):
        lstm_arguments.parse_arguments(["--recipe", "lstm-ptb"])


def test_a_missing_cifar10_ends_in_one_line_that_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_resnet50, "limit_threads", lambda: None)
    args = parse("resnet20-cifar10")
    with pytest.raises(BadInput) as caught:
        threads.run(2, lambda comm: train_resnet50.Trainer(args))
    for word in ("no CIFAR-10 in data/cifar10", "cs.toronto.edu", "--data-dir", "--download"):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


@pytest.mark.mpi
def test_a_recipe_trains_on_other_data_and_stands_in_the_log_and_the_summary(mpirun, tmp_path):
    recipe = ["--recipe", "resnet20-cifar10", "--dataset", "digits", "--max-steps", "3"]
    done = mpirun(2, [SCRIPT, *recipe, "--log-dir", "log"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("recipe resnet20-cifar10 (") == 1  # rank 0 alone
    assert "overridden: --dataset digits, not cifar10" in done.stderr
    summary = json.loads((tmp_path / "log" / "summary.json").read_text())
    assert (summary["steps"], summary["parameters_agree"]) == (3, True)
    assert summary["recipe"] == {
        "name": "resnet20-cifar10",
        "source": RECIPES["resnet20-cifar10"].source,
        "flags": dict(RECIPES["resnet20-cifar10"].flags),
        "overridden": {"--dataset": "digits"},
    }


def write_cifar10(folder, images):
    """CIFAR-10 as torchvision finds it on disk, but small; returns the names of its files."""
    files = {f"data_batch_{number}": images for number in range(1, 6)} | {"test_batch": images}
    (folder / "cifar-10-batches-py").mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in files.items():
        batch = {
            "data": random.integers(0, 256, (count, 3 * 32 * 32), dtype=np.uint8),
            "labels": [number % 10 for number in range(count)],
        }
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch))
    meta = {"label_names": [f"class {number}" for number in range(10)]}
    (folder / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps(meta))
    return list(files)


def test_the_recipe_for_resnet20_trains_on_cifar10_as_torchvision_keeps_it(tmp_path, monkeypatch):
    *train, test = write_cifar10(tmp_path / "data", images=32)
    # torchvision knows the checksums of the real files only.
    monkeypatch.setattr(CIFAR10, "train_list", [[name, None] for name in train])
    monkeypatch.setattr(CIFAR10, "test_list", [[test, None]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": None})
    monkeypatch.setattr(train_resnet50, "limit_threads", lambda: None)
    flags = ["--recipe", "resnet20-cifar10", "--data-dir", str(tmp_path / "data"), "--no-cuda"]
    flags += ["--max-steps", "3", "--log-dir", str(tmp_path / "log")]

    def run(comm):
        trainer = train_resnet50.Trainer(parse_arguments(flags))
        rates = [trainer.schedule.get_last_lr()[0], trainer.peak_lr]
        return rates, trainer.run(), trainer.steps_per_epoch

    # 160 images, of which two ranks see 64 in a step; the rate rises from half of 0.1 to 0.1.
    assert threads.run(2, run) == [([0.05, 0.1], True, 2)] * 2
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").open()]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["epoch"] for line in steps] == [0, 0, 1]
    first, _, third = (line["comm/density_actual"] for line in steps)
    assert first == pytest.approx(0.25, rel=0.01) and third == pytest.approx(0.0625, rel=0.01)


@pytest.mark.parametrize("script", PARSERS)
def test_help_names_the_recipes_and_a_command_line(script, capsys):
    ddl.init()  # rank 0 alone prints it
    with pytest.raises(SystemExit):
        PARSERS[script](["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for word in (*names(script), f"examples/{script} --recipe", "--lr-"):
        assert word in printed
