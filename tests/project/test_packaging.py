"""Every way to install finds the CUDA sources, and importing needs neither GPU, MPI nor display."""

import os
import subprocess
import sys
import zipfile

import pytest
from launch import ROOT

CHECK_SOURCES = (
    "from ddl.kernels import nvrtc; import ddl, ddl.kernels; "
    "assert '__global__' in nvrtc.source('scatter.cu'); "
    "assert 'common.cuh' in {path.name for path in nvrtc.source_directory().iterdir()}; "
    "print(ddl.__file__)"
)


def python(code, cwd, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left behind in the source tree."""
    copy = tmp_path_factory.mktemp("source") / "ddl"
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--quiet", "--wheel-dir", str(target), str(copy)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("ddl-*.whl")
    return built


def test_an_editable_install_finds_the_cuda_sources(tmp_path):
    done = python(CHECK_SOURCES, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_wheel_holds_kernels_and_cuda_sources_inside_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ddl/csrc/scatter.cu", "ddl/csrc/common.cuh", "ddl/kernels/__init__.py"} <= set(names)
    assert {"ddl/py.typed", "ddl/comm/mpi.py", "ddl/collectives/gtopk.py"} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert tops <= {"ddl"} | {top for top in tops if top.endswith((".dist-info", ".libs"))}
    assert not [name for name in names if name.startswith(("kernels/", "csrc/"))]


def test_a_plain_install_finds_the_cuda_sources(wheel, tmp_path):
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True)
    done = python(CHECK_SOURCES, tmp_path, PYTHONPATH=str(target))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(target))


def test_importing_needs_no_gpu_no_mpi_and_no_display(tmp_path):
    code = (
        "import sys, builtins\n"
        "real = builtins.__import__\n"
        "def guarded(name, *rest, **more):\n"
        "    assert name.split('.')[0] not in {'mpi4py', 'cupy', 'matplotlib', 'numba'}, name\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = guarded\n"
        "import ddl, ddl.kernels, ddl.comm, ddl.collectives, ddl.csrc\n"
        "assert ddl.init().size == 1\n"
    )
    done = python(code, tmp_path, DISPLAY="", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


def test_a_missing_mpi_library_is_one_line_with_a_cure(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    code = (
        "import ddl\n"
        "try:\n    ddl.init('mpi')\n"
        "except ddl.CommunicationError as error:\n    print(error)\n"
    )
    done = python(code, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "MPI was not found (cannot load MPI library)" in done.stdout
    assert "pip install 'ddl[mpich]'" in done.stdout
    assert done.stdout.count("\n") == 1


def test_an_mpi_without_thread_support_is_refused_with_a_cure(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)\n"
        "def Query_thread(): return THREAD_SERIALIZED\n"
    )
    code = (
        "import ddl\n"
        "try:\n    ddl.init('mpi')\n"
        "except ddl.CommunicationError as error:\n    print(error)\n"
    )
    done = python(code, tmp_path, PYTHONPATH=str(tmp_path))
    assert "MPI gives MPI_THREAD_SERIALIZED, expected MPI_THREAD_MULTIPLE" in done.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            "the launcher started 2 processes (OMPI_COMM_WORLD_SIZE), MPI sees 1",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun started 2 tasks without MPI"),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused(tmp_path, variables, message):
    done = python("import ddl; ddl.init()", tmp_path, **variables)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_job_of_torch_distributed_without_an_address_is_told_what_is_missing(tmp_path):
    done = python("import ddl; ddl.init()", tmp_path, RANK="0", WORLD_SIZE="4")
    assert done.returncode != 0
    assert "no job of torch.distributed could be joined" in done.stderr
    assert "environment variable MASTER_ADDR expected" in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DDL_LOG_LEVEL", "LOUD"),
        ("DDL_FUSION_THRESHOLD", "25MB"),
        ("DDL_STALL_SHUTDOWN_TIME_SECONDS", "-1"),
    ],
)
def test_a_bad_variable_is_named(tmp_path, name, value):
    done = python("import ddl; ddl.init()", tmp_path, **{name: value})
    assert done.returncode != 0
    assert f"{name} must be" in done.stderr and repr(value) in done.stderr
