"""The native library is used where it fits, and nothing but speed is lost where it does not."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_cases import LOOPS

from ddl.kernels import native

LIBRARY = native.find(Path(native.__file__).parent)
built = pytest.mark.skipif(LIBRARY is None, reason="no native library was built")

SELECT = """
import sys, torch
from ddl import kernels
kernels.warm_up()
s = kernels.accumulate_topk(torch.arange(1.0, 1001.0), torch.zeros(1000), 3)
print("numba" in sys.modules, s.indices.tolist())
"""


def selected(**environment: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", SELECT],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return answer.stdout.strip()


@built
def test_with_the_library_numba_is_not_even_imported() -> None:
    assert selected(DDL_NATIVE="1") == "False [997, 998, 999]"


def test_the_environment_can_force_numba() -> None:
    assert selected(DDL_NATIVE="0") == "True [997, 998, 999]"


def test_without_a_library_there_is_none(tmp_path: Path) -> None:
    assert native.load(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_broken_library_is_refused_with_a_warning(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "_native.so").write_bytes(content)
    with caplog.at_level(logging.WARNING, "ddl.kernels"):
        assert native.load(tmp_path) is None
    assert "native kernels cannot be used" in caplog.text
    assert "\n" not in caplog.messages[0]


@built
def test_a_library_of_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    with caplog.at_level(logging.WARNING, "ddl.kernels"):
        assert native.load() is None
    assert f"has version {native.VERSION - 1}, expected {native.VERSION}" in caplog.text


def test_another_library_is_refused() -> None:
    path = Path(np.random.bit_generator.__file__)
    with pytest.raises(OSError, match="is not ddl's native library"):
        native.open_library(path)


@built
def test_the_table_is_that_of_the_header() -> None:
    header = Path(native.__file__).parent.resolve().parent / "csrc" / "cpu" / "loops.h"
    if not header.is_file():
        pytest.skip("the sources are not beside the package")
    text = header.read_text()
    assert f"kVersion = {native.VERSION};" in text
    table = text[text.index("struct Loops {") : text.index("extern const Loops portable")]
    names = [piece.split(")")[0] for piece in table.split("(*")[1:]]
    assert names == list(native._TABLE)


def patterns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    n = 20_000
    normal = np.abs(rng.standard_normal(n)).astype(np.float32).view(np.int32)
    rising = np.arange(n, dtype=np.int32)
    # The sampled places see other keys than all the rest.
    spread = np.full(n, 1000, np.int32)
    spread[np.arange(512) * n // 512] = 5
    return {
        "normal": normal,
        "rising": rising,
        "falling": rising[::-1].copy(),
        "equal": np.full(n, 7, np.int32),
        "zeros": np.zeros(n, np.int32),
        "two values": rng.integers(0, 2, n).astype(np.int32),
        "misleading sample": spread,
        "misleading sample, many": np.where(spread == 5, spread, rising),
        "all bits": rng.integers(0, 2**31, n).astype(np.int32),
        "signs": normal | np.where(rng.random(n) < 0.5, np.int32(-(2**31)), np.int32(0)),
        "few": normal[:100],
        "one": normal[:1],
    }


PATTERNS = patterns()


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_kth_largest_key_is_exact(pattern: str, loops: str) -> None:
    keys = PATTERNS[pattern]
    before = keys.copy()
    n = keys.shape[0]
    ordered = np.sort(keys & 0x7FFFFFFF)[::-1]
    for start in (0, min(3, n - 1)):
        rest = np.sort(keys[start:] & 0x7FFFFFFF)[::-1] if start else ordered
        for k in {1, 2, n // 100, n // 3, n // 2, n - start - 1, n - start} & set(
            range(1, n - start + 1)
        ):
            expected = rest[k - 1]
            ties = k - int((rest > expected).sum())
            assert LOOPS[loops].kth_largest(keys, start, n - start, k) == (expected, ties)
    assert np.array_equal(keys, before)
