"""The models are arithmetic: they need neither torch nor the engine."""

import ast
import subprocess
import sys
from pathlib import Path

from launch import ROOT

FOLDER = ROOT / "ddl" / "perfmodel"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_nothing_but_numpy_and_the_standard_library_is_imported():
    for path in FOLDER.glob("*.py"):
        for name in imported(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names | {"numpy"} or name.startswith("ddl.perfmodel"), (
                f"{path.name} imports {name}"
            )


def test_they_work_where_there_is_no_torch(tmp_path):
    # `import ddl` brings the engine along; the package alone does not.
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = types.ModuleType('ddl')\n"
        f"package.__path__ = [{str(ROOT / 'ddl')!r}]\n"
        "sys.modules['ddl'] = package\n"
        f"for name in {MODULES!r}:\n"
        "    __import__(f'ddl.perfmodel.{name}')\n"
        "from ddl.perfmodel import networks, plans, schedules\n"
        "profile = networks.resnet50().profile(0.2)\n"
        "print(len(schedules.merged(profile, plans.Linear(1e-3, 1e-9)).buckets))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1
