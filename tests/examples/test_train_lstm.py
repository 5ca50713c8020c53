import json
import re

import pytest
import train_lstm
from arguments import BadInput
from launch import ROOT
from lstm_arguments import parse_arguments

from ddl.comm import threads
from ddl.workloads.lstm import SIZES, LSTMLanguageModel

SCRIPT = str(ROOT / "examples" / "train_lstm.py")
QUICK = (
    *("--size", "tiny", "--train-tokens", "6000", "--vocabulary", "500", "--batch-size", "5"),
    *(
        "--held-out-tokens",
        "3000",
        "--epochs",
        "2",
        "--density",
        "0.05",
        "--density-warmup",
        "none",
    ),
)
STEP_KEYS = {
    *("step", "epoch", "train/loss", "train/perplexity", "throughput/tokens_per_sec"),
    *("time/data", "time/forward_backward", "time/select", "time/communicate", "time/wait"),
    *("time/step", "comm/bytes_sent", "comm/bytes_dense", "comm/ratio", "comm/density_actual"),
    *("comm/overlap_fraction", "residual/norm"),
}


@pytest.fixture
def train(mpirun, tmp_path):
    """Trains a tiny model on P ranks; returns the summary and the lines of metrics."""

    def run(P: int, *arguments: str) -> tuple[dict, list[dict]]:
        log_dir = tmp_path / "log"
        done = mpirun(P, [SCRIPT, *QUICK, "--log-dir", str(log_dir), *arguments], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout.splitlines()[-1])
        assert json.loads((log_dir / "summary.json").read_text()) == summary
        lines = (log_dir / "metrics.jsonl").read_text().splitlines()
        return summary, [json.loads(line) for line in lines]

    return run


@pytest.mark.mpi
def test_a_language_model_learns_on_three_ranks_and_they_agree(train, tmp_path):
    summary, metrics = train(3, "--diagnostics-every", "10")
    validations = [record for record in metrics if "val/loss" in record]
    steps = [record for record in metrics if "val/loss" not in record]
    assert summary["parameters_agree"] is True
    assert re.fullmatch("[0-9a-f]{64}", summary["parameters_sha256"])
    assert (summary["P"], summary["compressor"]) == (3, "gtopk")
    assert summary["steps"] == len(steps) == steps[-1]["step"]
    assert all(set(step) >= STEP_KEYS for step in steps)
    assert len(validations) == 2
    assert summary["val_perplexity"] == validations[-1]["val/perplexity"] < 450
    assert summary["vocabulary"] == 500
    assert (tmp_path / "log" / "diagnostics" / "diagnostics.jsonl").stat().st_size > 0


@pytest.mark.mpi
def test_equal_seeds_give_equal_parameters(train):
    one, two = (train(2, "--max-steps", "3", "--dropout", "0.5")[0] for _ in range(2))
    assert one["parameters_sha256"] == two["parameters_sha256"]


@pytest.mark.parametrize("P", [2, 3])
def test_perplexity_does_not_depend_on_how_many_ranks_judge(tmp_path, monkeypatch, P):
    weights = make_model().state_dict()

    monkeypatch.setattr(train_lstm, "limit_threads", lambda: None)

    def judge(comm):
        args = parse_arguments([*QUICK, "--no-cuda", "--log-dir", str(tmp_path)])
        trainer = train_lstm.Trainer(args)
        trainer.model.load_state_dict(weights)
        return trainer.judge(trainer.valid)

    (alone,), together = threads.run(1, judge), threads.run(P, judge)
    assert together == [pytest.approx(alone, rel=1e-6)] * P
    assert len(set(together)) == 1


def make_model():
    size = SIZES["tiny"]
    return LSTMLanguageModel(500, size.hidden, size.dropout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dropout", "1"], ["--dropout", "'1'", "[0, 1)"]),
        (["--lr-decay", "0.5"], ["--lr-decay", "'0.5'", "1 or more"]),
        (["--compressor", "none", "--diagnostics-every", "5"], ["--diagnostics-every"]),
        (["--compressor", "topk", "--collective", "tree"], ["--collective tree"]),
    ],
)
def test_bad_arguments_are_told_with_a_cure(arguments, words):
    with pytest.raises(BadInput) as caught:
        parse_arguments(arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.mpi
def test_bad_input_is_one_line_and_leaves_nothing(mpirun, tmp_path):
    done = mpirun(2, [SCRIPT, *QUICK, "--batch-size", "4000"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    for word in ("6000 training tokens", "2 ranks", "use fewer ranks"):
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mpi
def test_a_folder_that_cannot_hold_checkpoints_is_told_before_training(mpirun, tmp_path):
    (tmp_path / "file").write_text("")
    done = mpirun(2, [SCRIPT, *QUICK, "--checkpoint-dir", "file/saved"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot write into --checkpoint-dir file/saved" in done.stderr
    assert len(done.stderr.splitlines()) == 1
