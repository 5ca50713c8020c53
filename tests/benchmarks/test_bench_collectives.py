"""The collectives' benchmark runs as printed, finds what is lost, and writes what it promises."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddl import kernels
from ddl.collectives import Collected
from ddl.comm import threads

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "bench_collectives.py"
KEYS = {
    *("algorithm", "wire", "P", "numel", "density", "k", "correlation", "dtype", "size_bytes"),
    *("count", "median_ms", "p20_ms", "p80_ms", "repeats", "algbw_MBps", "busbw_MBps"),
    *("bytes_per_rank", "busiest_bytes", "link_bytes", "rounds", "cpu_ms", "idle", "delivered"),
    *("recall", "lost_share", "lost_mass", "waiting_cpu", "transport", "torch", "cpu"),
}
ENGINE = ("auto", "exact", "butterfly", "tree", "all-gather")
SMALL = ("--numel", "20000", "--density", "0.01", "--repeats", "1")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return the benchmark's main, for flags as strings; the number of threads is put back."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(kernels.workers, "_wanted", None)
    main = importlib.import_module("bench_collectives").main
    return lambda *flags: main(list(flags))


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("collective_gradients")


def rows_of(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def by_name(rows: list[dict]) -> dict[str, dict]:
    return {row["algorithm"]: row for row in rows}


def test_the_published_tree_loses_what_the_engine_keeps(bench, tmp_path) -> None:
    flags = ("--correlation", "0.5", "--json", str(tmp_path / "rows.jsonl"))
    bench("--ranks", "8", *SMALL, "--plot", str(tmp_path / "chart.png"), *flags)
    rows = by_name(rows_of(tmp_path / "rows.jsonl"))
    assert set(rows) == {*ENGINE, "published-tree"}
    for row in rows.values():
        assert row.keys() >= KEYS
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
    for name in ENGINE:
        assert rows[name]["lost_share"] == rows[name]["lost_mass"] == 0
    assert rows["published-tree"]["lost_share"] > 0.01
    assert rows["published-tree"]["lost_mass"] > 0.001
    assert rows["exact"]["recall"] == rows["all-gather"]["recall"] == 1
    assert rows["tree"]["recall"] == rows["published-tree"]["recall"] < 1
    assert rows["butterfly"]["rounds"] == 3 and rows["tree"]["rounds"] == 6
    assert rows["auto"]["chosen"] in ENGINE
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_any_number_of_ranks_and_every_wire(bench, tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    names = ("exact", "butterfly", "all-gather", "dense", "published-tree", "step:exact")
    flags = ("--algorithms", *names, "--wire", "plain", "compact", "--json", str(file))
    bench("--ranks", "3", *SMALL, *flags)
    rows = rows_of(file)
    assert len(rows) == 4 * 2 + 1  # the published tree needs a power of two
    for row in rows:
        if row["recall"] is not None:
            assert row["lost_share"] == 0
        if row["wire"] == "compact" and row["algorithm"] == "all-gather":
            assert row["bytes_per_rank"] < 2 * 200 * 4.5


@pytest.mark.mpi
def test_rivals_of_mpi_and_waiting_under_mpirun(mpirun, tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    done = mpirun(2, [str(SCRIPT), *SMALL, "--late", "0.3", "--json", str(file)])
    assert done.returncode == 0, done.stderr
    rows = by_name(rows_of(file))
    assert set(rows) == {*ENGINE, "published-tree", "mpi-dense", "mpi-all-gather"}
    assert len(done.stdout.splitlines()) == 2 + len(rows)
    for row in rows.values():
        assert 0 <= row["waiting_cpu"] <= 1.5
    assert rows["mpi-all-gather"]["recall"] == 1
    assert rows["mpi-dense"]["bytes_per_rank"] == 4 * 20_000
    assert rows["all-gather"]["bytes_per_rank"] == pytest.approx(8 * 200, rel=0.02)


@pytest.mark.parametrize("numel", [1, 1000, 5000])
def test_picks_are_the_largest_of_the_gradient(gradients, monkeypatch, numel) -> None:
    monkeypatch.setattr(gradients, "CHUNK", 700)
    k = max(1, numel // 10)
    for rank in range(2):
        picks = gradients.picks(numel, k, 0.5, rank)
        everything = gradients.picks(numel, numel, 0.5, rank)
        order = everything.values.abs().argsort(descending=True)[:k].sort().values
        assert torch.equal(picks.indices, everything.indices[order])
        assert torch.equal(picks.values, everything.values[order])
        assert everything.count == numel


def test_a_wrong_claim_and_a_wrong_result_are_found(gradients) -> None:
    def work(comm):
        local = gradients.picks(100, 10, 0.0, comm.rank)
        total = gradients.picks(100, 10, 0.0, 0)
        claims = torch.ones(10, dtype=torch.bool)
        fate = gradients.fate(comm, 10, local, Collected(total, claims, finite=True))
        if comm.rank == 1:  # a result of its own
            total = local
        with pytest.raises(SystemExit, match="results differ"):
            gradients.fate(comm, 10, local, Collected(total, claims, finite=True))
        return fate

    fate, same = threads.run(2, work)
    assert fate == same
    assert fate.lost_share == 1.0  # all that rank 1 picked
    assert 0.4 < fate.lost_mass < 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "use mpirun -np P, or --ranks P"),
        (("--ranks", "0"), "got '0', expected a whole number of 1 or more"),
        (("--ranks", "2", "--density", "1.5"), "fraction of entries kept"),
        (("--ranks", "2", "--correlation", "2"), "expected a number in [0, 1]"),
        (("--ranks", "2", "--algorithms", "mpi-dense"), "mpi-dense need mpirun"),
        (("--ranks", "2", "--algorithms", "fast"), "invalid choice: 'fast'"),
        (("--ranks", "2", "--json", "/nowhere/rows.jsonl"), "there is no folder /nowhere"),
        (("--ranks", "2", "--plot", "chart.xyz"), "expected a name in .png, .pdf, .svg"),
    ],
)
def test_bad_flags_end_in_one_line_and_status_2(bench, arguments, message, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(*arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.mpi
def test_bad_flags_are_refused_once_by_all_ranks(mpirun) -> None:
    done = mpirun(2, [str(SCRIPT), "--ranks", "2"])
    assert done.returncode == 2
    assert done.stderr.count("bench_collectives.py: ") == 1


def test_help_needs_no_mpi() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--late SECONDS" in done.stdout
