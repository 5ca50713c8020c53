"""The training benchmark times a GPU by events of its stream."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_training.py"


@pytest.mark.gpu
def test_every_part_of_an_iteration_is_measured_on_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    flags = ("--quick", "--models", "resnet20", "fcn", "--channels-last", "--json", str(file))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    for row in map(json.loads, file.read_text().splitlines()):
        assert row["device"] == torch.cuda.get_device_name()
        assert row["pin_memory"] and row["parameters_agree"]
        for part in ("t_io", "t_h2d", "t_f", "t_b", "t_u"):
            assert row["measured"][part]["median"] > 0
