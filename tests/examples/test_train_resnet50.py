import json
import math
import re
import subprocess
import sys

import pytest
from launch import ROOT
from train_resnet50 import warmup_then_cosine, warmup_then_steps

import ddl

SCRIPT = str(ROOT / "examples" / "train_resnet50.py")
STEP_KEYS = {
    "step",
    "epoch",
    "train/loss",
    "train/accuracy",
    "throughput/samples_per_sec",
    "time/data",
    "time/forward_backward",
    "time/select",
    "time/communicate",
    "time/wait",
    "time/step",
    "comm/bytes_sent",
    "comm/bytes_dense",
    "comm/ratio",
    "comm/density_actual",
    "comm/overlap_fraction",
    "residual/norm",
    *(f"bucket/{what}" for what in ("numel", "picked", "bytes_sent")),
    *(f"bucket/{what}" for what in ("select", "communicate", "wait")),
}


def test_learning_rate_rises_in_a_line_then_falls_along_a_cosine():
    rates = [warmup_then_cosine(epoch, 2, 10, start=0.25) for epoch in (0, 1, 2, 6, 10)]
    assert rates == pytest.approx([0.25, 0.625, 1.0, 0.5, 0.0])


def test_learning_rate_falls_to_a_tenth_at_each_of_the_given_epochs():
    epochs = (0, 1, 2, 3.9, 4, 7, 8, 99)
    rates = [warmup_then_steps(epoch, 2, (4, 8), start=0.25) for epoch in epochs]
    assert rates == pytest.approx([0.25, 0.625, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01])


def test_learning_rate_without_warmup_starts_at_the_peak():
    assert warmup_then_cosine(0, 0, 10, start=0.25) == 1.0


def test_learning_rate_of_a_run_that_ends_within_warmup_stays_finite():
    rates = [warmup_then_cosine(epoch / 10, 5, 1, start=0.25) for epoch in range(11)]
    assert rates == sorted(rates)
    assert all(math.isfinite(rate) and rate < 1 for rate in rates)


@pytest.fixture
def train(mpirun, tmp_path):
    """Trains resnet20 for four steps on P ranks; returns the summary and the lines of metrics."""

    def run(P: int, *arguments: str) -> tuple[dict, list[dict]]:
        log_dir = tmp_path / "log"
        options = ["--model", "resnet20", "--max-steps", "4", "--log-dir", str(log_dir)]
        done = mpirun(P, [SCRIPT, *options, *arguments], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout.splitlines()[-1])
        assert json.loads((log_dir / "summary.json").read_text()) == summary
        lines = (log_dir / "metrics.jsonl").read_text().splitlines()
        return summary, [json.loads(line) for line in lines]

    return run


def check(summary: dict, metrics: list[dict], P: int, compressor: str) -> None:
    *steps, validation = metrics
    assert summary["parameters_agree"] is True
    assert re.fullmatch("[0-9a-f]{64}", summary["parameters_sha256"])
    assert (summary["P"], summary["compressor"]) == (P, compressor)
    assert summary["steps"] == 4 == len(steps)
    assert all(set(step) == STEP_KEYS for step in steps)
    assert set(validation) == {"step", "epoch", "val/loss", "val/accuracy"}
    assert summary["val_accuracy"] == validation["val/accuracy"]
    assert (summary["bytes_sent_per_step"] > 0) == (P > 1)
    assert summary["images_per_second"] > 0
    for step in steps:
        for what in ("select", "communicate", "wait"):
            assert sum(step[f"bucket/{what}"]) == pytest.approx(step[f"time/{what}"], abs=1e-4)
        assert sum(step["bucket/bytes_sent"]) == step["comm/bytes_sent"]
    costs = summary["costs"]
    assert costs["steps"] == 4 and costs["skipped"] == costs["discarded"] == 0
    assert sum(bucket["numel"] for bucket in costs["buckets"]) == sum(steps[0]["bucket/numel"])
    mean = sum(step["time/communicate"] for step in steps) / 4
    assert costs["communicate_seconds"] == pytest.approx(mean)


@pytest.mark.mpi
@pytest.mark.parametrize("compressor", ddl.COMPRESSORS)
def test_every_compressor_trains_on_two_ranks(train, compressor):
    summary, metrics = train(2, "--compressor", compressor)
    check(summary, metrics, 2, compressor)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("P", "collective", "wire"),
    [(1, "tree", "plain"), (3, "butterfly", "compact-fp16"), (4, "exact", "compact")],
)
def test_gtopk_trains_on_any_number_of_ranks(train, P, collective, wire):
    summary, metrics = train(P, "--collective", collective, "--wire", wire)
    check(summary, metrics, P, "gtopk")
    assert (summary["collective"], summary["wire"]) == (collective, wire)


@pytest.mark.mpi
def test_equal_seeds_give_equal_parameters(train):
    one, two = (train(2, "--compressor", "gtopk", "--seed", "7")[0] for _ in range(2))
    assert one["parameters_sha256"] == two["parameters_sha256"]


@pytest.mark.mpi
def test_loader_processes_do_not_join_the_job(train):
    summary, metrics = train(2, "--workers", "1", "--max-steps", "4")
    check(summary, metrics, 2, "gtopk")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--density", "1.5"], ["--density", "1.5", "(0, 1]"]),
        (["--dataset", "fashion-mnist", "--data-dir", "nowhere"], ["--data-dir nowhere"]),
        (["--batch-size", "900"], ["1437", "2 ranks", "1800"]),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(mpirun, tmp_path, arguments, words):
    done = mpirun(2, [SCRIPT, *arguments], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bad_input_without_mpirun_is_the_same(tmp_path):
    command = [sys.executable, SCRIPT, "--model", "resnet51"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "'resnet51'" in done.stderr
    assert list(tmp_path.iterdir()) == []
