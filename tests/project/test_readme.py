"""What the README promises by the letter."""

import os
import re
import subprocess
import sys

from launch import ROOT

import ddl

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_two_commands_set_everything_up():
    assert [block.strip() for block in blocks("bash")] == [
        "pip install -e '.[examples,mpich]' && "
        "mpirun -np 4 python examples/train_resnet50.py --compressor gtopk",
        "pip install -e '.[test]' && pytest",
    ]


def test_ci_runs_the_test_command_of_the_readme():
    assert "pip install -q -e '.[test]' && pytest" in (ROOT / ".ci" / "run").read_text()


def test_python_snippets_run(tmp_path):
    for block in blocks("python"):
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr


def test_the_compressor_table_is_complete():
    table = README.split("## Which compressor")[1].split("\n\n")[1]
    assert re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)[1:] == list(ddl.COMPRESSORS)


def test_the_guided_tour_names_files_that_exist_and_leaves_none_of_the_engine_out():
    tour = README.split("## Guided tour")[1].split("## Sources")[0]
    named = set(re.findall(r"`((?:ddl|kernels|csrc|tests)/[\w./]+?)`", tour))
    for name in named:
        assert (ROOT / name).exists(), name
    for path in (ROOT / "ddl").glob("*.py"):
        if path.name != "__init__.py":
            assert f"ddl/{path.name}" in named, f"the tour does not mention {path.name}"
