"""The kernel benchmark times the launches that wait for nothing, and says how near the roof."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import emulated
from places import Place

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPERATIONS = ("accumulate_topk", "accumulate_gaussiank", "accumulate_at", "merge", "scatter")


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_timed_launches_do_what_the_waiting_forms_do(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    operations = importlib.import_module("bench_operations")
    select = importlib.import_module("bench_select")
    case = select.Case(op, "cpu", "float32", 9000, 0.01, "normal", 1, "last")
    waiting = operations.OPERATIONS[op](case)
    for module in (operations, select):
        monkeypatch.setattr(module, "device_operations", lambda device: emulated(1))
    launched = operations.OPERATIONS[op](case)
    for _ in range(3):  # the later ones with a prediction
        outcomes = []
        for measured in (waiting, launched):
            measured.reset()
            outcomes.append(measured.outcome(measured.run()))
        assert outcomes[0].count == outcomes[1].count
    assert not outcomes[1].repaired


@pytest.mark.gpu
def test_it_runs_on_the_gpu_as_printed(tmp_path: Path, gpu: Place) -> None:
    rows = tmp_path / "rows.jsonl"
    flags = (
        *("--device", "cuda", "--op", *OPERATIONS, "dgc", "--numel", "1000000", "20000000"),
        *("--dtype", "float32", "bfloat16", "--prediction", "last", "none", "--repeats", "5"),
        *("--json", str(rows), "--plot", str(tmp_path / "chart.png")),
    )
    command = [sys.executable, str(BENCHMARKS / "bench_kernels.py"), *flags]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr
    print(answer.stdout)
    for row in map(json.loads, rows.read_text().splitlines()):
        assert row["gpu"] == torch.cuda.get_device_name()
        assert row["median_ms"] > 0
        if row["op"] == "accumulate_topk":
            # No kernel moves its bytes faster than a copy moves as many.
            assert 0 < row["roof_percent"] < 110
            assert row["slow_path_rate"] == 0
            assert row["count_over_k"] == 1


@pytest.mark.gpu
def test_a_sequence_of_steps_runs_on_the_gpu(tmp_path: Path, gpu: Place) -> None:
    rows = tmp_path / "rows.jsonl"
    flags = ("--device", "cuda", "--numel", "1000000", "--steps", "10", "--drift", "--json")
    command = [sys.executable, str(BENCHMARKS / "bench_kernels.py"), *flags, str(rows)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert row["steps"] == 10
    assert row["slow_path_rate"] < 0.5
