"""The real driver hands CuPy what CuPy wants; code is compiled, kept, built ahead and refused.

A stand-in for CuPy records what it is told. That the real CuPy is called by its right names, is
checked against the real one, which needs no GPU for that; that it all works, by `pytest -m gpu`.
"""

import gc
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddl.kernels import binaries, compiler, nvrtc, prebuild, sources
from ddl.kernels.launch import THREADS


class FakeCupy:
    """The part of CuPy that the driver uses."""

    def __init__(self, version: int = 14, error: Exception | None = None) -> None:
        self.launches: list[SimpleNamespace] = []
        self.loaded: list[tuple[int | None, bytes]] = []
        self.entered: list[int] = []
        self.current: dict[str, Any] = {"device": None, "stream": None}
        self.error = error
        stream = SimpleNamespace(from_external=lambda s: self._stream(s.__cuda_stream__()))
        self.cuda = SimpleNamespace(
            Device=self._device,
            Stream=stream if version >= 14 else SimpleNamespace(),
            ExternalStream=lambda pointer, index: self._stream((index, pointer)),
        )

    @contextmanager
    def _device(self, index: int) -> Iterator[None]:
        self.entered.append(index)
        before, self.current["device"] = self.current["device"], index
        yield
        self.current["device"] = before

    @contextmanager
    def _stream(self, pointer: tuple[int, int]) -> Iterator[None]:
        before, self.current["stream"] = self.current["stream"], pointer
        yield
        self.current["stream"] = before

    def RawModule(self, *, path: str) -> Any:
        if self.error:
            raise self.error
        self.loaded.append((self.current["device"], Path(path).read_bytes()))
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Any:
        def call(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            told = {"kernel": name, "grid": grid, "block": block, "args": args}
            self.launches.append(SimpleNamespace(**told, **self.current))

        return call


class OnGpu(torch.Tensor):
    """A tensor that says it lies on GPU 1."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


def on_gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Let torch tell of GPUs; return what it tells, to be changed. Nothing is kept on disk."""
    tells: dict[str, Any] = {"stream": 4711, "capturing": False, "capability": (9, 0)}
    cuda = torch.cuda

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        yield

    monkeypatch.setattr(
        cuda, "get_device_properties", lambda i: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(cuda, "get_device_capability", lambda i: tells["capability"])
    monkeypatch.setattr(
        cuda, "current_stream", lambda d: SimpleNamespace(cuda_stream=tells["stream"])
    )
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: tells["capturing"])
    monkeypatch.setattr(cuda, "device", device)
    monkeypatch.setattr(nvrtc, "_drivers", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(prebuild.VARIABLE, raising=False)
    return tells


@pytest.fixture
def cupy(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture
def csrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of small sources in place of the package's own."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "common.cuh").write_text("constexpr float kOne = 1;\n")
    (folder / "small.cu").write_text(
        '#include "common.cuh"\nextern "C" __global__ void one(float *x) { *x = kOne; }\n'
    )
    monkeypatch.setattr(sources, "source_directory", lambda: folder)
    return folder


@pytest.mark.parametrize("stream", [0, 4711])
@pytest.mark.parametrize("version", [13, 14])
def test_a_launch_names_grid_block_stream_device_and_arguments(
    version: int, stream: int, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = FakeCupy(version)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    gpu["stream"] = stream
    driver = nvrtc.CupyDriver(1)
    assert driver.multiprocessors == 132
    tensor = on_gpu(1.0, 2.0)
    arguments = (tensor, np.int64(5), np.float32(0.5), None, np.uint32(2**32 - 1), tensor[1:])
    driver.launch("scatter.cu", "give_back", 12, arguments)
    (launch,) = cupy.launches
    assert (launch.kernel, launch.grid, launch.block) == ("give_back", (12,), (THREADS,))
    assert launch.device == 1
    assert launch.stream == ((0, stream) if version >= 14 else (1, stream))
    address = tensor.data_ptr()
    assert launch.args == (address, 5, 0.5, 0, 2**32 - 1, address + 4)
    assert [type(value).__name__ for value in launch.args] == [
        *("uint64", "int64", "float32", "uint64", "uint32", "uint64")
    ]
    assert cupy.current == {"device": None, "stream": None}


def test_arguments_that_no_kernel_can_take_are_refused(cupy: FakeCupy) -> None:
    driver = nvrtc.CupyDriver(1)
    with pytest.raises(ValueError, match=r"argument 1 of give_back must be on cuda:1, got .* cpu;"):
        driver.launch("scatter.cu", "give_back", 1, (on_gpu(1.0), torch.ones(1)))
    with pytest.raises(TypeError, match=r"argument 0 of give_back must be .*, got int; pass"):
        driver.launch("scatter.cu", "give_back", 1, (5,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scatter.cu has no kernel 'x'; it has give_back, "):
        driver.launch("scatter.cu", "x", 1, ())
    with pytest.raises(FileNotFoundError, match=r"no CUDA source named 'x.cu'"):
        driver.launch("x.cu", "x", 1, ())
    assert not cupy.launches


def test_a_source_is_loaded_once_however_many_threads_ask(cupy: FakeCupy) -> None:
    driver = nvrtc.CupyDriver(1)
    gate = threading.Barrier(8)

    def work() -> None:
        gate.wait()
        driver.launch("scatter.cu", "give_back", 1, ())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cupy.launches) == 8
    ((device, code),) = cupy.loaded
    assert device == 1
    assert compiler.kernels_in(code) == [
        *("give_back", "scatter_bfloat16", "scatter_float16", "scatter_float32")
    ]


def test_prepare_loads_every_source_without_a_launch(csrc: Path, cupy: FakeCupy) -> None:
    driver = nvrtc.CupyDriver(1)
    (csrc / "other.cu").write_text('extern "C" __global__ void two(float *x) { *x = 2; }\n')
    driver.prepare("small.cu")
    assert len(cupy.loaded) == 1
    driver.prepare()
    assert len(cupy.loaded) == 2
    assert not cupy.launches


def test_what_the_compiler_says_is_shown(csrc: Path, cupy: FakeCupy) -> None:
    (csrc / "small.cu").write_text('extern "C" __global__ void one() { int x = undeclared; }')
    driver = nvrtc.CupyDriver(1)
    with pytest.raises(RuntimeError) as caught:
        driver.launch("small.cu", "one", 1, ())
    text = str(caught.value)
    assert text.startswith("small.cu does not compile for sm_90 (NVRTC ")
    assert "-ftz=false" in text
    assert 'small.cu(1): error: identifier "undeclared" is undefined' in text


@pytest.mark.parametrize("capturing", [False, True])
def test_what_the_gpu_cannot_load_is_told_from(
    capturing: bool, csrc: Path, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = OSError("CUDA_ERROR_INVALID_IMAGE")
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(error=problem))
    gpu["capturing"] = capturing
    with pytest.raises(RuntimeError, match=r"small\.cu cannot be loaded on cuda:1") as caught:
        nvrtc.CupyDriver(1).launch("small.cu", "one", 1, ())
    assert caught.value.__cause__ is problem
    assert ("call prepare() before that" in str(caught.value)) == capturing


def test_one_driver_a_gpu_and_none_elsewhere(cupy: FakeCupy) -> None:
    driver = nvrtc.driver_for(torch.device("cuda", 1))
    assert driver is nvrtc.driver_for("cuda:1") is nvrtc.driver_for("cuda")
    assert driver is not nvrtc.driver_for("cuda:0")
    assert nvrtc.driver_for("cpu") is None
    assert nvrtc.driver_for("meta") is None
    assert cupy.entered == [1, 0]


def test_a_missing_cupy_is_said_once_with_the_cure(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    with caplog.at_level(logging.WARNING, "ddl.kernels"):
        assert [nvrtc.driver_for(f"cuda:{index}") for index in (0, 1, 0)] == [None] * 3
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("ddl.kernels", "WARNING")
    assert "torch's operations take their place" in record.message
    assert "pip install 'ddl[cuda12]' brings it" in record.message


@pytest.mark.parametrize("broken", ["driver", "rocm"])
def test_a_gpu_that_cupy_cannot_use_is_said_once(
    broken: str,
    cupy: FakeCupy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(index: int) -> None:
        raise OSError("cudaErrorInsufficientDriver")

    if broken == "driver":
        cupy.cuda.Device = fail
    else:
        monkeypatch.setattr(torch.version, "cuda", None)
    with caplog.at_level(logging.WARNING, "ddl.kernels"):
        assert nvrtc.driver_for("cuda:0") is None
        assert nvrtc.driver_for("cuda:0") is None
    (record,) = caplog.records
    reasons = {"driver": "cudaErrorInsufficientDriver", "rocm": "not built for CUDA"}
    assert reasons[broken] in record.message


def test_the_digest_changes_with_every_source_header_and_option(
    csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {sources.digest()}
    for name in ("small.cu", "common.cuh"):
        (csrc / name).write_text((csrc / name).read_text() + "// changed\n")
        seen.add(sources.digest())
    (csrc / "new.cuh").write_text("")
    seen.add(sources.digest())
    monkeypatch.setattr(sources, "OPTIONS", (*sources.OPTIONS, "-lineinfo"))
    seen.add(sources.digest())
    assert len(seen) == 5
    (csrc / "notes.txt").write_text("not a source")
    assert sources.digest() in seen


def test_code_is_kept_until_an_included_file_changes(
    csrc: Path, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    real = compiler.Compiler.compile

    def count(self: compiler.Compiler, name: str, target: str) -> compiler.Compiled:
        compiled.append((name, target))
        return real(self, name, target)

    monkeypatch.setattr(compiler.Compiler, "compile", count)
    code = binaries.code_for("small.cu", (9, 0))
    assert binaries.code_for("small.cu", (9, 0)) == code
    assert compiled == [("small.cu", "sm_90")]
    binaries.code_for("small.cu", (8, 0))
    assert compiled[1:] == [("small.cu", "sm_80")]
    (csrc / "common.cuh").write_text("constexpr float kOne = 1.5f;\n")
    assert binaries.code_for("small.cu", (9, 0)) != code
    assert len(compiled) == 3


def test_a_damaged_file_in_the_cache_is_compiled_again(
    csrc: Path, gpu: dict[str, Any], tmp_path: Path
) -> None:
    code = binaries.code_for("small.cu", (9, 0))
    (kept,) = (tmp_path / "cache").rglob("small.bin")
    for damaged in (b"", kept.read_bytes()[:-1], b"x" + kept.read_bytes()[1:]):
        kept.write_bytes(damaged)
        assert binaries.code_for("small.cu", (9, 0)) == code
    assert len(list(kept.parent.iterdir())) == 1


def test_without_a_place_to_keep_code_it_still_compiles(
    csrc: Path, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiler.kernels_in(binaries.code_for("small.cu", (9, 0))) == ["one"]


def test_a_device_newer_than_the_compiler_gets_ptx() -> None:
    targets = ["sm_80", "compute_80", "sm_90", "compute_90"]
    assert compiler.choose(targets, (9, 0)) == "sm_90"
    assert compiler.choose(targets, (8, 6)) == "compute_80"
    assert compiler.choose(targets, (12, 1)) == "compute_90"
    assert compiler.choose(targets, (7, 5)) is None
    assert compiler.choose(["sm_80"], (8, 6)) is None
    code = compiler.compiler().compile("scatter.cu", "compute_90").code
    assert "give_back" in compiler.kernels_in(code)
    with pytest.raises(RuntimeError, match=r"got a device of compute capability 3\.5"):
        compiler.compiler().target((3, 5))


def test_denormals_are_kept_and_nothing_is_contracted() -> None:
    """What CuPy's own way of compiling would not do: it adds -ftz=true."""
    text = 'extern "C" __global__ void f(float *x) { x[0] = x[1] * x[2] + x[3]; }'
    ptx = compiler.compiler().compile_text("f.cu", text, "compute_90").code.decode()
    assert "mul" in ptx
    assert "fma" not in ptx
    assert "ftz" not in ptx
    for name in sources.names(".cu"):
        assert b".ftz" not in compiler.compiler().compile(name, "compute_90").code


def test_without_nvrtc_the_reason_and_the_cure_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_candidates", lambda: iter(["/nowhere/libnvrtc.so.13"]))
    with pytest.raises(
        RuntimeError, match=r"NVRTC was not found; .* pip install nvidia-cuda-nvrtc"
    ):
        compiler.compiler.__wrapped__()


def test_what_was_built_ahead_is_loaded_and_nothing_is_compiled(
    csrc: Path, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    output = tmp_path / "built"
    prebuild.main(["--arch", "sm_90", "compute_80", "--output", str(output)])
    assert capsys.readouterr().out.count(": 1 sources") == 2
    monkeypatch.setenv(prebuild.VARIABLE, str(output))

    def refuse() -> None:
        raise AssertionError("compiles")

    for module in (binaries, nvrtc):
        monkeypatch.setattr(module, "compiler", refuse)
    driver = nvrtc.CupyDriver(1)
    driver.launch("small.cu", "one", 1, (on_gpu(1.0),))
    ((_, code),) = cupy.loaded
    assert code == (output / "sm_90" / "small.bin").read_bytes()
    # Another device gets the PTX.
    ptx = binaries.code_for("small.cu", (12, 0))
    assert ptx == (output / "compute_80" / "small.bin").read_bytes()


def test_what_was_built_of_other_sources_is_refused(
    csrc: Path, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "built"
    prebuild.build("sm_90", output)
    monkeypatch.setenv(prebuild.VARIABLE, str(output))
    driver = nvrtc.CupyDriver(1)
    (csrc / "common.cuh").write_text("constexpr float kOne = 2;\n")
    cure = r"build it with python -m ddl\.kernels\.prebuild --arch sm_90 --output .*built"
    with pytest.raises(RuntimeError, match=f"was built from other sources or options: .*{cure}"):
        driver.launch("small.cu", "one", 1, (on_gpu(1.0),))
    with pytest.raises(RuntimeError, match=r"holds nothing for sm_75, got builds for sm_90; "):
        binaries.code_for("small.cu", (7, 5))
    monkeypatch.setenv(prebuild.VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match=r"holds nothing for sm_90, got builds for nothing; "):
        binaries.code_for("small.cu", (9, 0))
    assert not cupy.launches


def test_an_unfinished_build_is_none(csrc: Path, tmp_path: Path) -> None:
    prebuild.build("sm_90", tmp_path)
    (csrc / "small.cu").write_text("wrong")
    with pytest.raises(RuntimeError, match=r"small\.cu does not compile"):
        prebuild.build("sm_90", tmp_path)
    with pytest.raises(RuntimeError, match="holds nothing for sm_90"):
        prebuild.load(tmp_path, "small.cu", (9, 0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arch", "hopper"], "--arch must be like sm_90 or compute_90, got 'hopper'"),
        (["--arch", "sm_1"], "error: small.cu does not compile for sm_1"),
    ],
)
def test_prebuild_refuses_in_one_line(
    flags: list[str], message: str, csrc: Path, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as caught:
        prebuild.main([*flags, "--output", str(tmp_path / "built")])
    assert message in capsys.readouterr().err + str(caught.value.code)


@pytest.mark.skipif(sys.platform != "linux", reason="CuPy is installed for the tests on Linux only")
def test_the_real_cupy_has_what_the_driver_and_nccl_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy
    import cupy.cuda.nccl

    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pointer in (0, 4711):
            stream = cupy.cuda.Stream.from_external(nvrtc._Pointer(pointer))
            assert stream.ptr == pointer
            assert hasattr(stream, "__enter__")
            del stream  # leaves torch's stream alone: to destroy this one would fail
            gc.collect()
            assert not failed
    assert "grid, block, args" in cupy.RawKernel.__call__.__doc__
    # Loading wants a GPU; the constructor takes the path.
    assert hasattr(cupy.RawModule(path=str(tmp_path / "x.bin")), "get_function")
    assert cupy.cuda.Device(1).id == 1
    assert cupy.cuda.nccl.available
    assert len(cupy.cuda.nccl.get_unique_id()) == 128
    names = ("send", "recv", "allReduce", "broadcast", "abort", "destroy", "check_async_error")
    for name in names:
        assert hasattr(cupy.cuda.nccl.NcclCommunicator, name)
    assert "(int ndev, bytes commId, int rank" in cupy.cuda.nccl.NcclCommunicator.__doc__
    assert "size_t count, int datatype, int peer, intptr_t stream" in (
        cupy.cuda.nccl.NcclCommunicator.send.__doc__
    )
