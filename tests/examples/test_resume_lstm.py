"""A language model that is interrupted and resumed ends with the same parameters."""

import json

import pytest
from arguments import BadInput
from launch import ROOT
from lstm_arguments import parse_arguments

SCRIPT = str(ROOT / "examples" / "train_lstm.py")
# Nine steps an epoch on two ranks; the rate is so high that an epoch brings no improvement.
OPTIONS = ["--size", "tiny", "--train-tokens", "6000", "--vocabulary", "500", "--batch-size", "10"]
OPTIONS += ["--held-out-tokens", "2000", "--epochs", "4", "--dropout", "0.5", "--base-lr", "200"]
OPTIONS += ["--density", "0.05", "--density-warmup", "0.2"]


@pytest.fixture
def train(mpirun, tmp_path):
    def run(P, name, *arguments):
        folders = ["--log-dir", f"log-{name}", "--checkpoint-dir", f"saved-{name}"]
        done = mpirun(P, [SCRIPT, *OPTIONS, *folders, *arguments], cwd=tmp_path)
        return done.returncode, done.stdout.splitlines()[-1:], done.stderr

    return run


@pytest.mark.mpi
def test_a_resumed_language_model_ends_as_the_uninterrupted_one(train, tmp_path):
    code, [whole], stderr = train(2, "whole", "--max-steps", "31")
    assert code == 0, stderr
    # In the middle of the first epoch, where the state is carried on; at the end of the second,
    # where it is not; and within an epoch whose rate depends on those before.
    for step in ("5", "18", "22"):
        resume = ["--resume"] if step != "5" else []
        code, _, stderr = train(2, "parts", "--max-steps", step, *resume)
        assert code == 0, stderr
    code, [resumed], stderr = train(2, "parts", "--max-steps", "31", "--resume")
    assert code == 0, stderr
    assert "goes on" not in stderr
    whole, resumed = json.loads(whole), json.loads(resumed)
    for what in ("parameters_sha256", "best_val_perplexity", "test_perplexity", "steps"):
        assert resumed[what] == whole[what], what
    lines = [json.loads(line) for line in (tmp_path / "log-parts/metrics.jsonl").open()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 32))

    code, [more], stderr = train(3, "parts", "--max-steps", "22", "--resume")
    assert code == 0, stderr  # six steps an epoch on three ranks
    assert "2 ranks wrote it, 3 go on" in stderr
    assert json.loads(more)["parameters_agree"] and json.loads(more)["steps"] == 22

    code, _, stderr = train(3, "parts", "--resume", "--train-tokens", "5000")
    assert code == 2
    assert "--resume with train_tokens 5000, expected 6000" in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--resume"], ["--checkpoint-every", "5"]])
def test_what_needs_a_folder_of_checkpoints_says_so(arguments):
    with pytest.raises(BadInput, match=f"{arguments[0]} without --checkpoint-dir.*add"):
        parse_arguments(arguments)
