"""Numba's kernels are compiled once per machine; CUDA sources are found and compile."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import compile_matrix
import pytest

from ddl.kernels import nvrtc, sources
from ddl.kernels.compiler import Compiler, compiler

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


@pytest.fixture(scope="module")
def using() -> Compiler:
    """NVRTC. In CI there must be one."""
    try:
        return compiler()
    except RuntimeError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error).partition(" (")[0])


def test_every_kernel_compiles_for_every_architecture_and_stays_in_registers(
    using: Compiler,
) -> None:
    rows = compile_matrix.compile_all(sources.names(".cu"), using)
    print(f"\n{using}\n{compile_matrix.table(rows)}")
    local = [str(row) for row in rows if row.stack or row.spilled]
    assert not local, "local memory is used:\n" + "\n".join(local)


# What must be noticed: an array whose index is known at run time only, and more live values than
# __launch_bounds__ leaves registers for.
ARRAY = """
extern "C" __global__ void good(float *x) { x[threadIdx.x] += 1.0f; }
extern "C" __global__ void bad(float *x, int at) {
    float own[64];
    for (int i = 0; i < 64; ++i) own[(i * at) & 63] = x[i];
    x[at] = own[at & 63];
}
"""
SPILL = """
extern "C" __global__ void good(float *x) { x[threadIdx.x] += 1.0f; }
extern "C" __global__ void __launch_bounds__(1024) bad(float *x, int rounds) {
    float own[96]; // a block of 1024 leaves a thread 64 registers
#pragma unroll
    for (int i = 0; i < 96; ++i) own[i] = x[i * 1024 + threadIdx.x];
#pragma unroll 1
    for (int round = 0; round < rounds; ++round)
#pragma unroll
        for (int i = 0; i < 96; ++i) own[i] *= own[95 - i];
#pragma unroll
    for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = own[i];
}
"""


@pytest.mark.parametrize(("text", "spills"), [(ARRAY, False), (SPILL, True)])
@pytest.mark.parametrize("target", ["sm_75", "sm_90", "sm_120"])
def test_local_memory_would_be_noticed(
    text: str, spills: bool, target: str, using: Compiler
) -> None:
    compiled = using.compile_text("bad.cu", text, target, compile_matrix.REPORT)
    bad, good = compile_matrix.usage("bad.cu", target, compiled.code, compiled.log)
    assert (bad.kernel, good.kernel) == ("bad", "good")
    assert bad.stack > 0
    assert (bad.spilled > 0) == spills
    assert good.stack == good.spilled == 0
    assert 0 < good.registers < bad.registers


def test_a_report_that_is_not_understood_is_no_proof(using: Compiler) -> None:
    compiled = using.compile("scatter.cu", "sm_90", compile_matrix.REPORT)
    for log in ("", compiled.log.replace("registers", "Register"), compiled.log[:300]):
        with pytest.raises(ValueError, match=r"did not report on every kernel of scatter\.cu"):
            compile_matrix.usage("scatter.cu", "sm_90", compiled.code, log)


@pytest.mark.parametrize("name", sources.names(".cu"))
def test_nvcc_has_no_warnings(name: str, tmp_path: Path) -> None:
    """A second front end; other than NVRTC it also compiles for the host."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH; NVRTC compiles the same elsewhere")
    listed = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=True)
    wanted = {f"sm_{architecture}" for architecture in compile_matrix.ARCHITECTURES}
    targets = sorted(wanted & set(listed.stdout.split()))
    assert targets
    # Its front end warns alike for all; the assembler of each was NVRTC's part.
    command = ["nvcc", *sources.OPTIONS, "-ptx", "-Werror", "all-warnings"]
    for target in (targets[0], targets[-1]):
        arch = f"-arch={target.replace('sm', 'compute')}"
        path = str(sources.source_directory() / name)
        done = subprocess.run(
            [*command, arch, "-o", str(tmp_path / "out.ptx"), path], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
