"""What bench_training prints of a model, and the JSON object it writes."""

from __future__ import annotations

from typing import Any

from training_clock import Spread, spread
from training_loop import Measured

NAMES = {
    "t_io": "read a batch",
    "t_h2d": "copy to the device",
    "t_f": "forward",
    "t_b": "backward",
    "t_s": "select (background)",
    "t_c": "communicate (background)",
    "exposed": "exposed of both",
    "t_u": "update",
    "iteration": "the iteration",
}


def measured_as_dict(measured: Measured | None) -> dict[str, Any] | None:
    """For JSON; seconds, and samples a second."""
    if measured is None:
        return None
    return {
        **{name: part._asdict() for name, part in measured.parts.items()},
        "per_worker": measured.per_worker._asdict(),
        "total": measured.total._asdict(),
    }


def efficiency(reference: Measured | None, real: Measured) -> float | None:
    """Time of an iteration of the reference over that with communication; 1 is perfect."""
    return None if reference is None else reference.iteration / real.iteration


def by_turns(silent: Measured, real: Measured) -> Spread:
    """Efficiency of each group of iterations against the silent group before it."""
    pairs = zip(silent.rates, real.rates, strict=True)
    return spread([communicating / without for without, communicating in pairs])


def rates(unit: str, P: int, real: Measured) -> str:
    """Throughput, in Horovod's words."""
    per_worker, total = real.per_worker, real.total
    lines = [
        f"Iter #{number}: {one:.1f} {unit.lower()}/sec per worker"
        for number, one in enumerate(real.rates)
    ]
    lines += [
        f"{unit}/sec per worker: {per_worker.mean:.1f} +- {per_worker.margin:.1f}",
        f"Total {unit.lower()}/sec on {P} worker(s): {total.mean:.1f} +- {total.margin:.1f}",
    ]
    return "\n".join(lines)


def table(real: Measured, silent: Measured, alone: Measured | None) -> str:
    """Parts of an iteration in milliseconds: median and quartiles; then those to compare with."""
    lines = [f"{'':34} {'ms':>9} {'25 %':>9} {'75 %':>9} {'silent':>9} {'alone':>9}"]
    for name, title in NAMES.items():
        median, low, high = real.parts[name]
        cells = [f"{1e3 * seconds:9.2f}" for seconds in (median, low, high)]
        for other in (silent, alone):
            shown = other is not None and name in other.parts and name != "exposed"
            cells.append(
                f"{1e3 * other.parts[name].median:9.2f}" if other and shown else " " * 8 + "-"
            )
        lines.append(f"{name:<9} {title:<24} {' '.join(cells)}")
    return "\n".join(lines)


def verdict(real: Measured, silent: Measured, alone: Measured | None, predicted: Any) -> str:
    """Efficiencies, and predictions beside what was measured."""
    crowd, single = efficiency(silent, real), efficiency(alone, real)
    turns = by_turns(silent, real)
    text = (
        f"efficiency: {crowd:.1%} of the same ranks that do not communicate (silent; turn by turn "
        f"{turns.low:.1%} to {turns.high:.1%})"
    )
    if single is not None:
        text += f", {single:.1%} of one that trains alone"
    forecasts = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in predicted.items())
    return f"{text}\npredicted: {forecasts}; measured {1e3 * real.iteration:.2f} ms"


def cores_note(local_size: int, cores: int, on_cpu: bool) -> str | None:
    """What to think of efficiency on such a machine; None where nothing is to be said."""
    if not on_cpu or local_size == 1:
        return None
    share = "share" if local_size > cores else "divide"
    return (
        f"the {local_size} ranks of this host {share} its {cores} core(s) and its memory's "
        "bandwidth: efficiency against a worker that has them alone says little; compare with "
        "silent, which is as crowded"
    )
