"""The emulator finds accesses that memory does not allow, and arguments that do not fit.

Its kernels are in tests/emulator/samples.
"""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from emulator import build, sanitized
from emulator.emulated import EmulatorError
from emulator_samples import ALL, SAMPLES, SEEDS, driver, needs_emulator, unsigned

pytestmark = needs_emulator


def test_atomics_of_every_type_add_up() -> None:
    n = 3 * 256
    for seed in SEEDS:
        out = torch.full((12,), 100, dtype=torch.int32)
        unsigneds = torch.zeros(3, dtype=torch.int32)
        wides, floats = torch.zeros(3, dtype=torch.int64), torch.zeros(1)
        doubles = torch.zeros(1, dtype=torch.float64)
        arguments = (out, unsigneds, wides, floats, doubles)
        driver(seed, races=False).launch("memory.cu", "atomics", 3, arguments)
        total = n * (n - 1) // 2
        xor = 100
        for i in range(n):
            xor ^= i
        assert out[:7].tolist() == [100 + total, 100 - total, n - 1, 1 - n, 1023 & -1, 0, xor]
        assert unsigneds.tolist() == [total, n - 1, n]
        assert wides.tolist() == [total << 32, (n - 1) << 32, 3 * n]
        assert floats.item() == n and doubles.item() == n / 2


def test_arithmetic_rounds_as_on_the_device() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, generator=generator), torch.randn(256, generator=generator)
    x[:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    out, bits = torch.zeros(4 * 256), torch.zeros(5 * 256, dtype=torch.int32)
    driver().launch("memory.cu", "arithmetic", 1, (x, y, out, bits))
    product = x * y + x
    fused = (x.double() * y.double() + x.double()).float()
    expected = torch.cat([product, fused, x.abs(), torch.fmax(x, y)])
    assert torch.allclose(out, expected, rtol=0, atol=0, equal_nan=True)
    words = [int(word) & ALL for word in x.view(torch.int32)]
    assert bits.reshape(5, 256).tolist()[0] == [word.bit_count() for word in words]
    assert bits.reshape(5, 256).tolist()[1] == [32 - word.bit_length() for word in words]
    assert bits.reshape(5, 256).tolist()[2] == [(word & -word).bit_length() for word in words]
    assert unsigned(bits[768:1024]) == [int(f"{word:032b}"[::-1], 2) for word in words]
    assert bits[1024:].bool().tolist() == x.isfinite().tolist()


COPIES = {
    "copy": (torch.float32, np.int64),
    "copy_halves": (torch.bfloat16, np.int32),
    "copy_bytes": (torch.uint8, np.int32),
}


@pytest.mark.parametrize("kernel", COPIES)
@pytest.mark.parametrize("checked", [True, False])
def test_an_access_beyond_an_argument_is_found(kernel: str, checked: bool) -> None:
    """Also where it stays inside the storage, of which the argument is a view."""
    dtype, scalar = COPIES[kernel]
    storage, source = torch.zeros(300, dtype=dtype), torch.ones(300, dtype=dtype)
    view, size = storage[3:53], storage.element_size()
    options = {"weak_memory": checked, "races": checked}
    driver(**options).launch("memory.cu", kernel, 1, (view, source, scalar(50)))
    assert storage.sum() == 50 and (view == 1).all()
    beyond = f"at byte {50 * size} of argument 1 .out., which has {50 * size} bytes"
    message = f"out of bounds: writes {size} bytes {beyond}"
    if not checked:
        message = "out of bounds: memory behind argument 1 .out. was overwritten"
    with pytest.raises(EmulatorError, match=message):
        driver(**options).launch("memory.cu", kernel, 1, (view, source, scalar(51)))
    assert storage.sum() == 50
    if checked:
        with pytest.raises(EmulatorError, match=r"out of bounds: reads .* of argument 2 .in.,"):
            driver().launch("memory.cu", kernel, 1, (storage, source[:50], scalar(51)))


def test_arguments_may_overlap() -> None:
    storage = torch.arange(300.0)
    one, other = storage[:200], storage[100:]
    driver().launch("memory.cu", "copy", 1, (one, other, np.int64(100)))
    assert torch.equal(storage[:100], torch.arange(100.0, 200.0))
    with pytest.raises(EmulatorError, match="race: "):
        driver().launch("memory.cu", "copy", 1, (one, other, np.int64(101)))


@pytest.mark.parametrize("offset", [1, -1, 30])
def test_an_access_beyond_shared_memory_is_found(offset: int) -> None:
    out = torch.zeros(256, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=r"undefined: index -?\d+ out of the bounds"):
        driver().launch("memory.cu", "beyond_shared", 1, (out, np.int32(offset)))
    message = "undefined: access to an object that is too small|of shared variable room"
    with pytest.raises(EmulatorError, match=message):
        driver().launch("pointers.cu", "beyond_pointer", 1, (out, np.int32(offset)))
    arguments = (out, np.int32(offset))
    with pytest.raises(EmulatorError, match="out of bounds: "):
        driver().launch("memory.cu", "beyond_dynamic", 1, arguments, shared_bytes=1024)


def test_null_and_constant_pointers_are_respected() -> None:
    a = torch.zeros(256)
    with pytest.raises(EmulatorError, match=r"writes 4 bytes at a null pointer \+ \d+"):
        driver().launch("memory.cu", "copy", 1, (None, a, np.int64(256)))
    for checked in (True, False):
        options = {"weak_memory": checked, "races": checked}
        with pytest.raises(EmulatorError, match=r"argument 1 .in., a pointer to const"):
            driver(**options).launch("memory.cu", "write_through_const", 1, (a,))
    driver().launch("memory.cu", "constant_loads", 1, (a, torch.zeros(256), np.int32(0)))
    with pytest.raises(EmulatorError, match=r"__ldg reads .* which the same kernel writes"):
        driver().launch("memory.cu", "constant_loads", 1, (a, torch.zeros(256), np.int32(1)))


def test_misaligned_vectors_are_found() -> None:
    storage, source = torch.zeros(64), torch.ones(64)
    aligned = storage[-storage.data_ptr() // 4 % 4 :]
    driver().launch("memory.cu", "copy_vectors", 1, (aligned, source, np.int32(10)))
    assert storage.sum() == 40
    with pytest.raises(EmulatorError, match=r"misaligned access, .* a multiple of 16"):
        driver().launch("memory.cu", "copy_vectors", 1, (aligned[1:], source, np.int32(1)))


def test_undefined_arithmetic_is_found() -> None:
    out = torch.zeros(256, dtype=torch.int32)
    driver().launch("memory.cu", "shift_too_far", 1, (out, np.int32(30)))
    assert (out == 2**30).all()
    with pytest.raises(EmulatorError, match=r"undefined: shift out of range \(memory.cu:\d+\)"):
        driver().launch("memory.cu", "shift_too_far", 1, (out, np.int32(32)))


# Arguments.


def test_scalars_of_every_type_arrive() -> None:
    pairs = torch.tensor([0, 0, 0x40200000, 7], dtype=torch.int32)  # {0, 0}, {2.5, 7}
    out = torch.zeros(8, dtype=torch.float64)
    scalars = (
        np.float32(1.5),
        np.float64(0.1),
        np.int32(-3),
        np.uint32(2**32 - 1),
        np.int64(-(2**40)),
        np.uint64(2**63),
        np.bool_(True),
    )
    driver().launch("memory.cu", "all_kinds", 1, (*scalars, pairs, out))
    assert out.tolist() == [1.5, 0.1, -3, 2**32 - 1, -(2**40), 2**63, 1, 9.5]
    driver().launch("memory.cu", "all_kinds", 1, (*scalars, None, out))
    assert out[7] == -1


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({0: np.float64(0)}, r"argument 1 \(f\): got numpy.float64, expected .* point of 4 bytes"),
        ({2: np.uint32(0)}, r"argument 3 \(i\): got numpy.uint32, expected .*signed of 4 bytes"),
        ({4: np.int32(0)}, r"argument 5 \(l\): got numpy.int32, expected .*signed of 8 bytes"),
        ({6: np.int8(0)}, r"argument 7 \(b\): got numpy.int8, expected .*bool of 1 byte"),
        ({2: 5}, r"argument 3 \(i\): got int, expected a numpy scalar"),
        ({2: torch.zeros(1)}, r"argument 3 \(i\): got Tensor"),
        ({7: np.int64(0)}, r"argument 8 \(pairs\): got int64, expected a tensor or None"),
        ({8: torch.zeros(8)}, r"argument 9 \(out\): got torch.float32 of 4 bytes, .* 8 bytes"),
        ({8: torch.zeros(8).long()}, r"argument 9 \(out\): got torch.int64, expected floating"),
        ({8: torch.zeros(2, 8, dtype=torch.float64).T}, r"argument 9 \(out\): .* not contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[int, Any], complaint: str) -> None:
    arguments: list[Any] = [np.float32(0), np.float64(0), np.int32(0), np.uint32(0), np.int64(0)]
    arguments += [np.uint64(0), np.bool_(False), None, torch.zeros(8, dtype=torch.float64)]
    for place, value in changed.items():
        arguments[place] = value
    with pytest.raises(EmulatorError, match=f"memory.cu, kernel all_kinds: {complaint}"):
        driver().launch("memory.cu", "all_kinds", 1, arguments)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(EmulatorError, match="got 1 arguments, expected 3: out, in, count"):
        driver().launch("memory.cu", "copy", 1, (torch.zeros(3),))
    with pytest.raises(EmulatorError, match=r"kernel cpoy: not found; memory.cu has copy, "):
        driver().launch("memory.cu", "cpoy", 1, ())
    with pytest.raises(FileNotFoundError, match=r"no CUDA source 'memroy.cu'"):
        driver().launch("memroy.cu", "copy", 1, ())
    with pytest.raises(build.CompilationError, match=r"memory.cu does not compile"):
        driver(overrides={"memory.cu": "unsinn"}).launch("memory.cu", "copy", 1, ())
    with pytest.raises(ValueError, match="guard=False needs weak_memory=False"):
        driver(guard=False)


def test_launches_are_remembered_and_differ() -> None:
    orders = set()
    for seed in (1, 2):
        same = driver(seed, weak_memory=False, races=False)
        for _ in range(10):
            values = torch.arange(256, dtype=torch.int32)
            same.launch("blocks.cu", "reverse_without_barrier", 1, (values,))
            orders.add(tuple(values.tolist()))
        assert same.launches == [("blocks.cu", "reverse_without_barrier", 1)] * 10
    assert len(orders) > 5


def test_without_guards_the_tensors_themselves_are_used() -> None:
    out, source = torch.zeros(300), torch.ones(300)
    unguarded = driver(weak_memory=False, races=False, guard=False)
    unguarded.launch("memory.cu", "copy", 2, (out[3:53], source, np.int64(51)))
    assert out.sum() == 51  # one too many, unnoticed


def test_stacks_change_by_ucontext_too() -> None:
    """What processors without an own change of stacks use."""
    values, out = torch.arange(256).int(), torch.zeros(256, dtype=torch.int32)
    portable = driver(flags=("-DEMULATOR_UCONTEXT",))
    portable.launch("blocks.cu", "scan", 1, (values, out))
    assert torch.equal(out, values.cumsum(0).int())
    with pytest.raises(EmulatorError, match="deadlock"):
        portable.launch("blocks.cu", "barrier_for_some", 2, (values, np.int32(1)))


def test_processes_may_build_the_same_at_once() -> None:
    code = (
        "import sys, torch, numpy as np\n"
        "from emulator.emulated import EmulatedDriver\n"
        "driver = EmulatedDriver(source_directory=sys.argv[1],\n"
        "                        overrides={'new.cuh': sys.argv[2]})\n"
        "a, b = torch.zeros(9), torch.ones(9)\n"
        "driver.launch('memory.cu', 'copy', 1, (a, b, np.int64(9)))\n"
        "assert a.sum() == 9\n"
    )
    mark = f"// {np.random.default_rng().integers(2**62)}"  # nobody has compiled it yet
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(SAMPLES), mark], cwd=sanitized.TESTS)
        for _ in range(3)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]


# The sanitizers, in a process of their own.

_UNDER_SANITIZERS = """
import sys, torch, numpy as np
from emulator.emulated import EmulatedDriver, EmulatorError
driver = EmulatedDriver(sanitize=True, source_directory=sys.argv[1])
a, b, i = torch.zeros(100), torch.ones(100), torch.zeros(256, dtype=torch.int32)
driver.launch("memory.cu", "copy", 1, (a, b, np.int64(100)))
driver.launch("blocks.cu", "scan", 1, (torch.ones(256, dtype=torch.int32), i))
assert a.sum() == 100 and i.tolist() == list(range(1, 257))
for _ in range(3):  # leaves stacks behind that nobody returns to
    try:
        driver.launch("blocks.cu", "barrier_for_some", 2, (i, np.int32(1)))
    except EmulatorError:
        print("deadlock found")
off = a[1 - a.data_ptr() // 4 % 4 :] if sys.argv[2] == "misaligned" else a
cases = {
    "nothing": ("copy", (a, b, np.int64(100))),
    "read": ("copy", (a, b[:50], np.int64(51))),
    "write": ("copy", (a[20:50], b, np.int64(31))),
    "misaligned": ("copy_vectors", (off, b, np.int32(1))),
    "shift": ("shift_too_far", (i, np.int32(32))),
    "shared": ("beyond_shared", (i, np.int32(1))),
}
driver.launch("memory.cu", cases[sys.argv[2]][0], 1, cases[sys.argv[2]][1])
"""


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        ("nothing", ""),
        ("read", "AddressSanitizer: use-after-poison"),
        ("write", "AddressSanitizer: use-after-poison"),
        ("misaligned", "store to misaligned address"),
        ("shift", "shift exponent 32 is too large"),
        ("shared", "index 256 out of bounds"),
    ],
)
def test_the_sanitizers_find(case: str, complaint: str) -> None:
    result = sanitized.run(["-c", _UNDER_SANITIZERS, str(SAMPLES), case])
    assert result.returncode == (sanitized.FAILED if complaint else 0), result.stderr
    assert complaint in result.stderr
    assert result.stdout.count("deadlock found") == 3


def test_sanitizing_needs_its_own_process() -> None:
    with pytest.raises(RuntimeError, match=r"start it with emulator.sanitized.run"):
        driver(sanitize=True).launch("memory.cu", "copy", 1, ())
