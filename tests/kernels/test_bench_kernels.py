"""The kernel benchmark runs as printed and writes what it promises."""

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddl import kernels

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_kernels.py"
KEYS = {
    *("op", "device", "dtype", "numel", "density", "distribution", "threads"),
    *("median_ms", "p20_ms", "p80_ms", "floor_ms", "ratio_to_floor", "bytes_per_element"),
    *("rival", "rival_ms", "speedup", "slow_path_rate", "torch", "numba", "cpu"),
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return the benchmark's main, for flags as strings; the number of threads is put back."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(kernels.workers, "_wanted", None)
    main = importlib.import_module("bench_kernels").main
    return lambda *flags: main(list(flags))


def rows_of(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_every_operation_gives_a_row_with_every_key(tmp_path: Path) -> None:
    """As a user starts it; the other tests call its main."""
    operations = "accumulate_topk accumulate_gaussiank accumulate_at merge scatter dgc".split()
    flags = (
        *("--op", *operations, "published_gaussiank", "--numel", "4000", "9000"),
        *("--density", "0.01", "--threads", "1", "--repeats", "2", "--prediction", "last", "none"),
        *("--json", str(tmp_path / "rows.jsonl"), "--plot", str(tmp_path / "chart.png")),
    )
    command = [sys.executable, str(SCRIPT), *flags]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    rows = rows_of(tmp_path / "rows.jsonl")
    assert len(rows) == 2 * (len(operations) + 2)
    for row in rows:
        assert row.keys() >= KEYS
        assert row["median_ms"] > 0
        assert 0 <= row["slow_path_rate"] <= 1
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
    assert {row["op"] for row in rows} == {*operations, "published_gaussiank"}
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert len(answer.stdout.splitlines()) == 2 + len(rows)


def test_every_distribution_is_exact_and_within_bounds(
    bench: Callable[..., None], tmp_path: Path
) -> None:
    bench(
        *("--op", "accumulate_topk", "accumulate_gaussiank", "--numel", "5000"),
        *("--density", "0.01", "--distribution", "all", "--threads", "1", "--repeats", "1"),
        *("--dtype", "float32", "bfloat16", "--no-rival", "--json", str(tmp_path / "rows.jsonl")),
    )
    rows = rows_of(tmp_path / "rows.jsonl")
    assert len(rows) == 2 * 2 * 13
    for row in rows:
        assert row["rival_ms"] is None
        assert row["count_over_k_max"] <= 4 / 3
        assert row["count_over_k_min"] >= 2 / 3 or row["distribution"] in ("zeros", "sparse")


@pytest.mark.parametrize("op", ["accumulate_topk", "accumulate_gaussiank", "dgc"])
def test_steps_that_drift(bench: Callable[..., None], op: str, tmp_path: Path) -> None:
    bench(
        *("--op", op, "--numel", "5000", "--density", "0.01", "--threads", "1"),
        *("--steps", "20", "--drift", "--json", str(tmp_path / "rows.jsonl")),
    )
    (row,) = rows_of(tmp_path / "rows.jsonl")
    assert row.keys() >= KEYS
    assert row["steps"] == 20
    assert row["drift"] is True
    assert math.isfinite(row["count_over_k"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drift",), "--drift needs --steps"),
        (("--density", "1.5"), "fraction of entries kept"),
        (("--op", "merge", "--steps", "3"), "--steps measures"),
        (("--numel", "0"), "--numel must be at least 1"),
        (("--json", "/nowhere/rows.jsonl"), "there is no folder /nowhere"),
        (("--plot", "chart.xyz"), "expected a name in .png, .pdf, .svg"),
    ],
)
def test_bad_flags_are_refused(
    bench: Callable[..., None],
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        bench(*arguments)
    assert message in capsys.readouterr().err
