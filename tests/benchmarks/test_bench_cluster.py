"""The emulated cluster carries what is measured, and leaves nothing behind."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "bench_cluster.py"


@pytest.fixture
def network(monkeypatch):
    """The module that makes namespaces."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("cluster_network")


@pytest.fixture
def main(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    return importlib.import_module("bench_cluster").main


@pytest.fixture
def namespaces(network):
    """The names that processes of this test have made; others' benchmarks may run meanwhile.

    Skips where none can be made, and checks that none is left.
    """
    try:
        network.check_machine()
        with network.Network(1, "1gbit"):
            pass
    except network.ClusterError as error:
        pytest.skip(str(error))
    before = set(network.namespaces())

    def made_by(process: int) -> list[str]:
        prefix = f"{network.PREFIX}{process}-"
        made = set(network.namespaces()) - before
        return sorted(name for name in made if name.startswith(prefix))

    yield made_by
    assert made_by(os.getpid()) == []


def started_and_running(arguments, namespaces, seconds=60.0):
    """A benchmark in a process of its own, once it has made its hosts."""
    job = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Jobs in the background of a shell are started with Ctrl-C switched off.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + seconds
    while len(namespaces(job.pid)) < 3 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(namespaces(job.pid)) == 3
    return job


@pytest.mark.mpi
def test_two_hosts_measured_beside_predicted(namespaces, tmp_path):
    file = tmp_path / "rows.jsonl"
    flags = ("--quick", "--numel", "300000", "--ddp", "plain", "--json", str(file))
    names = ("--algorithms", "exact", "all-gather", "mpi-dense")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags, *names], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = [row["kind"] for row in rows]
    assert kinds == ["links", "collective", "collective", "collective", "ddp"]
    assert all(row["hosts"] == 2 and row["rate"] == "1gbit" for row in rows)
    for row in rows[1:4]:
        assert row["predicted_ms"] > 0 and row["unlimited_ms"] > 0
        assert row["limit"] in ("links", "both", "cores", "spins")
    dense = rows[3]
    # The interface, not shared memory: a whole gradient takes longer than the rate allows.
    assert dense["link_ratio"] == pytest.approx(1, abs=0.15)
    assert dense["median_ms"] > 4 * 300_000 * 8 / 1e9 * 1e3 * 0.6


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "kill"]
)
def test_an_interrupted_benchmark_leaves_nothing(namespaces, sent, status):
    job = started_and_running(["--hosts", "2"], namespaces)
    time.sleep(1.0)  # into the first program on the hosts
    job.send_signal(sent)
    job.communicate(timeout=60)
    assert job.returncode == status
    assert namespaces(job.pid) == []


def test_a_failure_leaves_nothing_and_ends_what_runs(namespaces, network):
    with pytest.raises(KeyError), network.Network(2, "1gbit") as cluster:
        host = cluster.hosts[0]
        job = subprocess.Popen(cluster.within(host, "sleep", "600"))
        assert cluster.traffic(host).received >= 0
        raise KeyError("lost")
    assert job.wait(timeout=10) != 0
    assert namespaces(os.getpid()) == []


def test_what_a_killed_benchmark_left_is_swept_away(namespaces, network):
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, mine = f"{network.PREFIX}{dead.pid}-0", f"{network.PREFIX}{os.getpid()}-7"
    try:
        for name in (left, mine):
            network.command("ip", "netns", "add", name)
        network.sweep()
        assert namespaces(dead.pid) == []
        assert namespaces(os.getpid()) == [mine]
    finally:
        subprocess.run(["ip", "netns", "delete", mine], check=True)


def test_rates_are_those_of_tc(network):
    assert network.rate_of("1gbit") == 1e9
    assert network.rate_of("2.5Gbit") == 2.5e9
    assert network.rate_of("100mbit") == 1e8
    for wrong in ("fast", "1", "gbit", "-1gbit", "0mbit"):
        with pytest.raises(ValueError, match="a rate is a number above 0"):
            network.rate_of(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "1"), "expected a whole number from 2 to 64"),
        (("--rate", "fast"), "a rate is a number above 0 and one of kbit, mbit, gbit"),
        (("--ddp", "zip"), "invalid choice: 'zip'"),
        (("--json", "/nowhere/rows.jsonl"), "there is no folder /nowhere"),
    ],
)
def test_bad_flags_end_in_one_line_and_status_2(main, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("missing", ["root", "iproute2"])
def test_without_root_or_iproute2_one_line_says_so(main, missing, monkeypatch, capsys):
    if missing == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        message = "needs root"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(shutil, "which", lambda tool: None)
        message = "install iproute2"
    with pytest.raises(SystemExit) as ended:
        main(["--quick"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "1"], "expected a whole number from 2 to 64"),
        (["--rate", "fast"], "a rate is a number above 0"),
        (["--density", "5"], "expected a density in (0, 1]"),
        (["--network", "10gbe", "--workers", "4"], "measure no links, and here are some"),
    ],
)
def test_advice_refuses_bad_input_before_anything_is_built(main, capsys, arguments, message):
    advise = importlib.import_module("cluster_advise").main
    with pytest.raises(SystemExit) as ended:
        advise(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err and err.count("\n") == 1
