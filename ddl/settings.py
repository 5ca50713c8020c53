"""Settings read from the environment; an argument in code wins over them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Settings:
    """Defaults of a process; `from_environment` reads the `DDL_*` variables."""

    log_level: str = "WARNING"
    """DDL_LOG_LEVEL: level of the `ddl` logger."""
    stall_check_seconds: float = 60.0
    """DDL_STALL_CHECK_TIME_SECONDS: after this long a wait is reported in the log."""
    stall_shutdown_seconds: float = 600.0
    """DDL_STALL_SHUTDOWN_TIME_SECONDS: after this long a wait ends in an error."""
    bucket_bytes: int = 25 * 2**20
    """DDL_FUSION_THRESHOLD: gradient bytes a bucket; large saves latency, small overlaps more."""
    nccl: bool = True
    """DDL_NCCL: 0 stages messages between GPUs through host memory even where NCCL would do."""

    timeline: str | None = None
    """DDL_TIMELINE: file for a timeline of the job, see `ddl.metrics.timeline`."""
    timeline_steps: tuple[int, int] = (0, 100)
    """DDL_TIMELINE_STEPS: FIRST:END, the steps of this run that it shows, END left out."""
    links: str | None = None
    """DDL_LINKS: what messages cost, so that it is not measured: alpha,beta in seconds and seconds
    per byte, and once more within nodes."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables.

        Raises:
            ValueError: a variable does not hold what it should; names it.
        """
        level = environ.get("DDL_LOG_LEVEL", cls.log_level).upper()
        if level not in LOG_LEVELS:
            raise ValueError(
                f"DDL_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, got {level!r}; "
                f"unset it for {cls.log_level}"
            )
        return cls(
            log_level=level,
            stall_check_seconds=_above_zero(
                environ, "DDL_STALL_CHECK_TIME_SECONDS", cls.stall_check_seconds
            ),
            stall_shutdown_seconds=_above_zero(
                environ, "DDL_STALL_SHUTDOWN_TIME_SECONDS", cls.stall_shutdown_seconds
            ),
            bucket_bytes=max(
                1, int(_above_zero(environ, "DDL_FUSION_THRESHOLD", cls.bucket_bytes))
            ),
            timeline=environ.get("DDL_TIMELINE") or None,
            timeline_steps=_window(environ, "DDL_TIMELINE_STEPS", cls.timeline_steps),
            links=environ.get("DDL_LINKS"),
            nccl=_switch(environ, "DDL_NCCL", cls.nccl),
        )


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(name, str(int(default)))
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}; unset it for {int(default)}")
    return text == "1"


def _window(environ: Mapping[str, str], name: str, default: tuple[int, int]) -> tuple[int, int]:
    text = environ.get(name)
    if text is None:
        return default
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ValueError(
            f"{name} must be FIRST:END with FIRST below END, such as 10:20, got {text!r}; unset it "
            f"for {default[0]}:{default[1]}"
        )
    return int(first), int(end)


def _above_zero(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a number above 0, got {text!r}; unset it for {default}")
    return value
