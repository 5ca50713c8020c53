"""A language model that is interrupted and resumed ends with the same parameters."""

import json

import pytest
import train_lstm
from arguments import BadInput
from launch import ROOT
from lstm_arguments import parse_arguments

from ddl.comm import threads

SCRIPT = str(ROOT / "examples" / "train_lstm.py")
# 18 steps an epoch on one rank, 9 on two, 6 on three.
OPTIONS = ["--size", "tiny", "--train-tokens", "6000", "--vocabulary", "500", "--batch-size", "10"]
OPTIONS += ["--held-out-tokens", "2000", "--epochs", "4", "--dropout", "0.5", "--base-lr", "20"]
OPTIONS += ["--momentum", "0.9", "--density", "0.05", "--density-warmup", "0.2", "--no-cuda"]
SAME = ("parameters_sha256", "val_perplexity", "best_val_perplexity", "test_perplexity", "steps")


@pytest.mark.mpi
def test_a_resumed_language_model_ends_as_the_uninterrupted_one(mpirun, tmp_path):
    def train(name, *arguments):
        folders = ["--log-dir", f"log-{name}", "--checkpoint-dir", f"saved-{name}"]
        done = mpirun(2, [SCRIPT, *OPTIONS, *folders, *arguments], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    whole = train("whole", "--max-steps", "14")
    train("parts", "--max-steps", "5")  # a state is carried, by each rank its own
    resumed = train("parts", "--max-steps", "14", "--resume")
    assert {key: resumed[key] for key in SAME} == {key: whole[key] for key in SAME}


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains on so many ranks in this process; returns the summary."""
    monkeypatch.setattr(train_lstm, "limit_threads", lambda: None)

    def run(P, name, *arguments):
        folders = ["--log-dir", f"{tmp_path}/log-{name}", "--checkpoint-dir", f"{tmp_path}/{name}"]
        args = [*OPTIONS, *folders, *arguments]
        threads.run(P, lambda comm: train_lstm.Trainer(parse_arguments(args)).run())
        return json.loads((tmp_path / f"log-{name}" / "summary.json").read_text())

    return run


def test_it_may_be_interrupted_often_and_anywhere(train, tmp_path, monkeypatch):
    # After 18 steps each an epoch is judged, and the second is worse, so that the rate is lowered;
    # how a run is judged where it is interrupted must not count.
    losses = {18: 5.0, 36: 6.0, 54: 4.0}
    monkeypatch.setattr(
        train_lstm.Trainer, "judge", lambda trainer, tokens: losses.get(trainer.step, 1.0)
    )
    whole = train(1, "whole", "--max-steps", "62", "--checkpoint-every", "7")
    train(1, "parts", "--max-steps", "10")  # within an epoch
    train(1, "parts", "--max-steps", "22", "--resume")  # within one that is judged by the first
    train(1, "parts", "--max-steps", "36", "--resume")  # at the end of that
    resumed = train(1, "parts", "--max-steps", "62", "--resume")
    assert {key: resumed[key] for key in SAME} == {key: whole[key] for key in SAME}
    lines = [json.loads(line) for line in (tmp_path / "log-parts/metrics.jsonl").open()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 63))
    validations = {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    assert losses.items() <= validations.items()

    # 8 of 18 steps of the last epoch are done: of 6 steps on three ranks 2.
    more = train(3, "parts", "--max-steps", "22", "--resume")
    assert more["parameters_agree"] and more["steps"] == 22


def test_it_is_not_resumed_with_other_text_or_settings_nor_beyond_its_end(train, tmp_path):
    train(1, "run", "--max-steps", "2")
    text = tmp_path / "numbers.txt"
    text.write_text(" ".join(str(number % 700) for number in range(8000)))
    for change, words in {
        ("--bptt", "20"): "bptt 20, expected 35",
        ("--train-tokens", "5000"): "train_tokens 5000, expected 6000",
        ("--text", str(text)): r"expected standard library [0-9a-f]{12} as in",
    }.items():
        with pytest.raises(BadInput, match=f"--resume with .*{words}"):
            train(1, "run", "--tokenizer", "code", "--resume", *change)
    with pytest.raises(BadInput, match=r"--resume: .* is at step 2, .* raise --epochs or"):
        train(1, "run", "--max-steps", "2", "--resume")


@pytest.mark.parametrize("arguments", [["--resume"], ["--checkpoint-every", "5"]])
def test_what_needs_a_folder_of_checkpoints_says_so(arguments):
    with pytest.raises(BadInput, match=f"{arguments[0]} without --checkpoint-dir.*add"):
        parse_arguments(arguments)
