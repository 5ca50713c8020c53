"""ddl comes into a script in three lines, and the script still ends well, alone and on ranks."""

import ast
import difflib
import subprocess
import sys

import pytest
from launch import ROOT

FOLDER = ROOT / "examples" / "adoption"
LINES = {"loop": 3, "trainer": 3, "gan": 3}


def code(path):
    """Its lines, but for the comment and docstring on top, and empty ones."""
    text = path.read_text()
    docstring = ast.parse(text).body[0]
    return [line for line in text.splitlines()[docstring.end_lineno :] if line.strip()]


@pytest.mark.parametrize("name", LINES)
def test_adoption_changes_so_few_lines(name):
    plain, adopted = code(FOLDER / f"plain_{name}.py"), code(FOLDER / f"{name}.py")
    matcher = difflib.SequenceMatcher(None, plain, adopted, autojunk=False)
    changed = [op for op in matcher.get_opcodes() if op[0] != "equal"]
    count = sum(max(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in changed)
    assert count == LINES[name], changed
    assert not any("ddl." in line for line in plain)


def test_every_script_has_a_plain_twin():
    names = {path.stem for path in FOLDER.glob("*.py")} - {"digits"}
    assert names == {*LINES, *(f"plain_{name}" for name in LINES)}


@pytest.mark.mpi
@pytest.mark.parametrize("name", LINES)
def test_the_script_ends_well_on_two_ranks(mpirun, tmp_path, name):
    done = mpirun(2, [str(FOLDER / f"{name}.py")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("2 ranks agree\n") and done.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_script_ends_well_alone(tmp_path):
    command = [sys.executable, str(FOLDER / "trainer.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("1 ranks agree\n")
