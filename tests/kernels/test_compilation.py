"""Numba's kernels are compiled once per machine; CUDA sources are found and compile."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddl.kernels import nvrtc

COUNT_COMPILATIONS = """
from ddl import kernels
kernels.warm_up()
from ddl.kernels import cpu_accumulate, cpu_select, cpu_sparse
print(sum(
    sum(function.stats.cache_misses.values())
    for module in (cpu_accumulate, cpu_select, cpu_sparse)
    for function in vars(module).values()
    if hasattr(function, "stats")
))
"""


def start(cache: Path, program: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "DDL_NATIVE": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    together = [start(tmp_path, COUNT_COMPILATIONS) for _ in range(3)]
    compiled = [int(process.communicate(timeout=120)[0]) for process in together]
    assert sorted(compiled)[:2] == [0, 0]
    assert max(compiled) > 0
    later = start(tmp_path, COUNT_COMPILATIONS)
    assert int(later.communicate(timeout=120)[0]) == 0


def test_importing_compiles_nothing() -> None:
    program = (
        "import sys, ddl.kernels; print('numba' in sys.modules, 'ddl.kernels.cpu' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["False", "False"]


def test_a_forked_child_has_threads_of_its_own() -> None:
    program = """
import os, torch
from ddl import kernels
kernels.set_num_threads(2)
torch.set_num_threads(1)  # torch's own threads do not survive a fork
flat, residual = torch.ones(3_000_000), torch.zeros(3_000_000)
def once():
    indices = kernels.accumulate_topk(flat, residual, 5).indices.tolist()
    residual.zero_()
    return indices
assert once() == [0, 1, 2, 3, 4]
child = os.fork()
if child == 0:
    os._exit(0 if once() == [0, 1, 2, 3, 4] else 1)
print(os.waitpid(child, 0)[1])
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "0"


def test_cuda_sources_are_found() -> None:
    assert (nvrtc.source_directory() / "scatter.cu").is_file()
    assert '#include "common.cuh"' in nvrtc.source("scatter.cu")
    with pytest.raises(FileNotFoundError, match=r"no CUDA source named 'x\.cu'; expected one of"):
        nvrtc.source("x.cu")
    with pytest.raises(FileNotFoundError):
        nvrtc.source("../setup.py")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_cuda_sources_compile_without_warnings(tmp_path: Path) -> None:
    listed = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=True)
    supported = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}
    targets = sorted(supported & set(listed.stdout.split()))
    assert targets
    for path in nvrtc.source_directory().glob("*.cu"):
        command = ["nvcc", "-std=c++17", "-fatbin", "-Werror", "all-warnings", "--threads", "2"]
        for code in targets:
            command += ["-gencode", f"arch={code.replace('sm', 'compute')},code={code}"]
        command += ["-o", str(tmp_path / "out.fatbin"), str(path)]
        compiled = subprocess.run(command, capture_output=True, text=True)
        assert compiled.returncode == 0, compiled.stderr
