"""An example run that is interrupted and resumed ends with the same parameters."""

import json

import pytest
import torch
from arguments import BadInput, parse_arguments
from data_order import Repeatable, ResumableSampler
from launch import ROOT
from torch.utils.data import DataLoader

SCRIPT = str(ROOT / "examples" / "train_resnet50.py")
# Three steps an epoch on two ranks.
OPTIONS = ["--model", "resnet20", "--image-size", "8", "--batch-size", "180", "--epochs", "2"]
OPTIONS += ["--density", "0.01", "--density-warmup", "0.1"]


@pytest.fixture
def train(mpirun, tmp_path):
    def run(P, name, *arguments):
        folders = ["--log-dir", f"log-{name}", "--checkpoint-dir", f"saved-{name}"]
        done = mpirun(P, [SCRIPT, *OPTIONS, *folders, *arguments], cwd=tmp_path)
        return done.returncode, done.stdout.splitlines()[-1:], done.stderr

    return run


@pytest.mark.mpi
def test_a_resumed_run_ends_as_the_uninterrupted_one(train, tmp_path):
    code, [whole], stderr = train(2, "whole", "--max-steps", "5", "--checkpoint-every", "1")
    assert code == 0, stderr
    code, _, stderr = train(2, "parts", "--max-steps", "4")  # in the middle of the second epoch
    assert code == 0, stderr
    code, [resumed], stderr = train(2, "parts", "--max-steps", "5", "--resume")
    assert code == 0, stderr
    assert "goes on" not in stderr
    whole, resumed = json.loads(whole), json.loads(resumed)
    for what in ("parameters_sha256", "val_accuracy", "steps"):
        assert resumed[what] == whole[what], what
    lines = [json.loads(line) for line in (tmp_path / "log-parts/metrics.jsonl").open()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5]

    code, [more], stderr = train(3, "parts", "--max-steps", "4", "--resume")
    assert code == 0, stderr  # two steps an epoch on three ranks
    assert "2 ranks wrote it, 3 go on" in stderr
    assert json.loads(more)["parameters_agree"] and json.loads(more)["steps"] == 4

    code, _, stderr = train(3, "parts", "--resume", "--wd", "0.5")
    assert code == 2
    assert "--resume with wd 0.5, expected 0.0001" in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--resume"], ["--checkpoint-every", "5"]])
def test_what_needs_a_folder_of_checkpoints_says_so(arguments):
    with pytest.raises(BadInput, match=f"{arguments[0]} without --checkpoint-dir.*add"):
        parse_arguments(arguments)


def test_checkpoints_of_another_run_are_not_pushed_out(tmp_path):
    (tmp_path / "0001-step-7").mkdir()
    folder = ["--checkpoint-dir", str(tmp_path)]
    with pytest.raises(BadInput, match=r"holds checkpoints of another run.*add --resume"):
        parse_arguments(folder)
    assert parse_arguments([*folder, "--resume"]).resume


class Noise:
    """Items that are drawn at random, as crops are."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, torch.rand(()).item()


def passes(workers, starts):
    """What rank 1 of 2 sees in two epochs."""
    sampler = ResumableSampler(Noise(), num_replicas=2, rank=1, seed=3)
    loader = DataLoader(
        Repeatable(Noise(), seed=3),
        batch_size=2,
        sampler=sampler,
        num_workers=workers,
        generator=torch.Generator(),
    )
    seen = []
    for epoch, start in enumerate(starts):
        sampler.set_epoch(epoch)
        sampler.start = start
        seen.append(
            [tuple(pair) for batch in loader for pair in zip(*map(list, batch), strict=True)]
        )
    return seen


def test_the_data_goes_on_in_the_middle_of_an_epoch_and_leaves_dropout_alone():
    before = torch.get_rng_state()
    first, second = passes(0, (0, 0))
    assert passes(0, (4, 0)) == [first[4:], second]
    assert passes(2, (4, 0)) == [first[4:], second]  # loader processes
    assert sorted(i for i, _ in first) != sorted(i for i, _ in second) and len(first) == 10
    assert torch.equal(torch.get_rng_state(), before)
