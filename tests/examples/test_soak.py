"""The soak test itself: it looks, says what it saw, and fails where it has to."""

import pytest
import soak
from launch import ROOT

SCRIPT = str(ROOT / "examples" / "soak.py")


@pytest.mark.mpi
def test_a_short_soak_is_good_and_shows_its_looks(mpirun):
    done = mpirun(2, [SCRIPT, "--steps", "5", "--every", "2", "--settled", "2"])
    assert done.returncode == 0, done.stderr
    *looks, verdict = done.stdout.splitlines()
    assert verdict == "good"
    assert [look.split(":")[0] for look in looks] == ["step 2", "step 4", "step 5"]
    assert all("on 2 of 2 ranks" in look and "since step 2" in look for look in looks)


def test_memory_that_grows_fails_it(monkeypatch, capsys):
    sizes = iter([100, 100, 103])
    monkeypatch.setattr(soak, "resident_bytes", lambda: next(sizes) * 2**20)
    assert soak.main(["--steps", "2", "--every", "1", "--settled", "1"]) == 1
    printed = capsys.readouterr().out
    assert "+3.00% since step 1" in printed and "bad: ranks differ, or memory grows" in printed


def test_arguments_that_cannot_be_used_end_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        soak.parse(["--every", "0"])
    assert ended.value.code == 2
    assert "--every must be at least 1" in capsys.readouterr().err
