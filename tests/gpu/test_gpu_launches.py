"""On the GPU the launches wait for nothing, follow torch's streams, and can be captured."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import (
    BEST,
    COSTS,
    OPERATIONS,
    Operation,
    assert_same,
    draw,
    same_bits,
    some_indices,
    using,
    with_nonfinite,
)
from places import Place

from ddl import kernels
from ddl.kernels import prebuild
from ddl.kernels.launch import COUNT, NONFINITE, Workspace

pytestmark = pytest.mark.gpu

N, K = 300_001, 3000
LONG = 1_000_000_000  # clock cycles that a GPU sleeps: about half a second
TOPK = Operation("accumulate_topk", lambda n, seed, dtype: {})
MERGE = Operation("merge", lambda n, seed, dtype: {})


def inputs(seed: int) -> dict[str, Any]:
    return {
        "flat": with_nonfinite(draw("normal", N, seed), seed, seed % 3),
        "residual": draw("laplace", N, seed + 1),
        "k": K,
        "scale": 0.5,
    }


def sparse(seed: int) -> dict[str, Any]:
    return {
        "a_indices": some_indices(N, K, seed),
        "a_values": draw("student", K, seed + 1),
        "b_indices": some_indices(N, K, seed + 2),
        "b_values": draw("student", K, seed + 3),
        "k": K,
    }


def right(operation: Operation, arguments: dict[str, Any]) -> dict[str, Any]:
    with using(f"{BEST}-2"):
        return operation.call(arguments)


def check_picks(picks: Any, residual: torch.Tensor, arguments: dict[str, Any]) -> None:
    expected = right(TOPK, arguments)
    report = picks.report.tolist()
    count = report[COUNT]
    assert torch.equal(picks.indices[:count].cpu(), expected["indices"])
    assert same_bits(picks.values[:count].cpu(), expected["values"])
    assert same_bits(residual.cpu(), expected["residual after"])
    assert (report[NONFINITE] == 0) == expected["finite"]


def check_merged(merged: Any, arguments: dict[str, Any]) -> None:
    expected = right(MERGE, arguments)
    count = int(merged.report[COUNT])
    assert torch.equal(merged.indices[:count].cpu(), expected["indices"])
    assert same_bits(merged.values[:count].cpu(), expected["values"])
    assert torch.equal(merged.fate_a.cpu(), expected["fate_a"])
    assert torch.equal(merged.fate_b.cpu(), expected["fate_b"])


def launches(gpu: Place) -> dict[str, Callable[[], Any]]:
    """Every operation that waits for nothing, on inputs that are already there."""
    operations, workspace = gpu.operations, gpu.workspace()
    own, pair = gpu.put(inputs(1)), gpu.put(sparse(1))
    flat, residual, at = own["flat"], own["residual"], pair["a_indices"]
    mask = pair["a_values"] > 0
    return {
        "topk": lambda: operations.launch_topk(flat, residual, K, 0.5, 0.0, workspace),
        "topk predicted": lambda: operations.launch_topk(flat, residual, K, 0.5, 2.0, workspace),
        "topk repaired": lambda: operations.launch_topk(flat, residual, K, 0.5, 1e9, workspace),
        "gaussiank": lambda: operations.launch_gaussiank(flat, residual, K, 0.5, workspace),
        "at": lambda: operations.launch_at(flat, residual, at, 0.5, workspace),
        "merge": lambda: operations.launch_merge(**pair, workspace=workspace),
        "random": lambda: operations.launch_random_indices(N, K, 5, gpu.device),
        "scatter": lambda: operations.scatter(flat, at, pair["a_values"], 0.5),
        "give_back": lambda: operations.give_back(residual, at, pair["a_values"], mask),
    }


NAMES = (
    *("topk", "topk predicted", "topk repaired", "gaussiank", "at", "merge", "random", "scatter"),
    "give_back",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_does_not_wait_for_the_gpu(name: str, gpu: Place) -> None:
    launch = launches(gpu)[name]
    launch()  # compiles, and grows the workspace
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(LONG)
        slept = torch.cuda.Event()
        slept.record()
        launch()
        assert not slept.query(), "the launch returned only after the work before it was done"
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()


@pytest.mark.parametrize("legacy", [False, True])
def test_launches_follow_torchs_current_stream(legacy: bool, gpu: Place) -> None:
    """The inputs come late on that stream: a launch on any other would read the old ones."""
    stream = torch.cuda.default_stream() if legacy else torch.cuda.Stream()
    other = torch.cuda.Stream()
    operations, workspace = gpu.operations, gpu.workspace()
    old, new = gpu.put(inputs(1)), gpu.put(inputs(2))
    old_pair, new_pair = gpu.put(sparse(1)), gpu.put(sparse(2))
    operations.launch_topk(**gpu.put(inputs(3)), threshold=0.0, workspace=workspace)
    operations.launch_merge(**old_pair, workspace=gpu.workspace())
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(LONG // 10)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG // 2)
            for there, source in ((old, new), (old_pair, new_pair)):
                for name, value in source.items():
                    if isinstance(value, torch.Tensor):
                        there[name].copy_(value)
            picks = operations.launch_topk(**old, threshold=0.0, workspace=workspace)
            merged = operations.launch_merge(**old_pair, workspace=gpu.workspace())
    torch.cuda.synchronize()
    check_picks(picks, old["residual"], inputs(2))
    check_merged(merged, sparse(2))


@pytest.mark.parametrize("threshold", [0.0, 1.0, 1e9])
def test_a_selection_can_be_captured_and_replayed(threshold: float, gpu: Place) -> None:
    """Inputs of any kind, with a prediction that is none, of use and of none."""
    operations, workspace = gpu.operations, gpu.workspace()
    static = gpu.put(inputs(0))
    operations.launch_topk(**static, threshold=threshold, workspace=workspace)  # not captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picks = operations.launch_topk(**static, threshold=threshold, workspace=workspace)
    for seed in range(1, 7):
        arguments = inputs(seed)
        if seed == 4:
            arguments["flat"] = torch.zeros(N)
        if seed == 5:
            arguments["residual"] = draw("equal", N, seed)
        static["flat"].copy_(arguments["flat"])
        static["residual"].copy_(arguments["residual"])
        graph.replay()
        torch.cuda.synchronize()
        check_picks(picks, static["residual"], arguments)


def test_a_merge_can_be_captured_and_replayed(gpu: Place) -> None:
    workspace = gpu.workspace()
    static = gpu.put(sparse(0))
    gpu.operations.launch_merge(**static, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merged = gpu.operations.launch_merge(**static, workspace=workspace)
    for seed in range(1, 7):
        arguments = sparse(seed)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        check_merged(merged, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_every_launch_can_be_captured(name: str, gpu: Place) -> None:
    launch = launches(gpu)[name]
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    torch.cuda.synchronize()


def test_a_capture_right_after_prepare_needs_no_launch_before(gpu: Place) -> None:
    """In a process of its own, where nothing was compiled or loaded."""
    program = """
import torch
from ddl.kernels import CudaOperations, nvrtc
from ddl.kernels.launch import COUNT, Workspace
device = torch.device("cuda", 0)
driver = nvrtc.driver_for(device)
driver.prepare()
operations, workspace = CudaOperations(driver), Workspace(device)
flat, residual = torch.arange(100.0, device=device), torch.zeros(100, device=device)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    picks = operations.launch_topk(flat, residual, 3, 1.0, 0.0, workspace)
graph.replay()
print(picks.indices.tolist())
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "[97, 98, 99]"


def test_code_built_ahead_is_used(tmp_path: Path, gpu: Place) -> None:
    major, minor = torch.cuda.get_device_capability()
    prebuild.build(f"sm_{major}{minor}", tmp_path)
    program = """
import torch
from ddl import kernels
from ddl.kernels import compiler
def refuse(*_):
    raise AssertionError("compiles")
compiler.Compiler.compile = refuse
flat, residual = torch.arange(100.0, device="cuda"), torch.zeros(100, device="cuda")
print(kernels.accumulate_topk(flat, residual, 3).indices.tolist())
"""
    environment = os.environ | {prebuild.VARIABLE: str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "[97, 98, 99]"


def test_threads_with_streams_of_their_own_do_not_meet(gpu: Place) -> None:
    jobs = [
        (operation, operation.arguments(N, seed, torch.float32))
        for seed in range(3)
        for operation in OPERATIONS
        if operation.name != "random_indices"
    ]
    expected = [right(operation, arguments) for operation, arguments in jobs]
    got: list = [None] * len(jobs)
    gate = threading.Barrier(len(jobs))

    def work(i: int) -> None:
        operation, arguments = jobs[i]
        gate.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            outcome = operation.call(gpu.put(arguments))
            torch.cuda.current_stream().synchronize()
        got[i] = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in outcome.items()
        }

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other, without=COSTS)


def test_every_gpu_of_the_machine_and_the_current_one_stays_current(gpu: Place) -> None:
    before = torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        operations = kernels.device_operations(device)
        assert operations is not None
        place = Place(device, operations, N)
        there = place.put(inputs(index))
        picks = operations.launch_topk(**there, threshold=0.0, workspace=Workspace(device))
        assert torch.cuda.current_device() == before
        torch.cuda.synchronize(device)
        check_picks(picks, there["residual"], inputs(index))


def test_no_kernel_uses_local_memory_on_this_gpu(gpu: Place) -> None:
    driver = gpu.operations._driver
    driver.prepare()
    for source, functions in driver._sources.items():
        for name, function in functions.items():
            with driver._gpu():
                assert function.attributes["local_size_bytes"] == 0, (source, name)
