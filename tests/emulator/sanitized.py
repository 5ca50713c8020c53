"""Run Python under the sanitizers of g++, which EmulatedDriver(sanitize=True) needs.

The sanitizers must be loaded before anything else, so a child process is started with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from emulator.build import compiler

TESTS = Path(__file__).resolve().parent.parent
FAILED = 86  # exit status of a process that a sanitizer ended


def preloaded() -> str:
    """What LD_PRELOAD must hold: the sanitizer, and the C++ library whose throws it watches.

    Raises:
        RuntimeError: g++ or its sanitizers are not installed.
    """
    found = compiler()
    if found is None:
        raise RuntimeError("g++ was not found; install it, its sanitizers are needed")
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [found, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path):
            raise RuntimeError(f"{name} of {found} was not found; install the sanitizers of g++")
        paths.append(str(Path(path).resolve()))
    return " ".join(paths)


def run(arguments: Sequence[str], timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` under the sanitizers, in the folder of the tests.

    For tests `arguments` is ("-m", "pytest", selection, ...). The exit status is FAILED where a
    sanitizer found something; what it found is in stderr.
    """
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded(),
        # Python leaks by design; memory of ours is what counts.
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FAILED}:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={FAILED}",
        "PYTHONUNBUFFERED": "1",  # an abort loses what is still in a buffer
        "PYTHONPATH": os.pathsep.join(
            [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        ),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=TESTS,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def is_running() -> bool:
    """Whether this process was started with the sanitizers."""
    return "libasan" in os.environ.get("LD_PRELOAD", "")
