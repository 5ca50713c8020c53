"""The table for people, the object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddl.advise.advice import Advice, Measured
from ddl.advise.predictions import Prediction
from ddl.advise.situation import Situation

COLUMNS = (
    ("compressor", 16),
    ("collective", 11),
    ("step", 8),
    ("compute", 8),
    ("select", 8),
    ("comm.", 8),
    ("exposed", 8),
    ("update", 8),
    ("images/s", 9),
    ("scaling", 8),
    ("MB sent", 8),
)
VERIFIED = (("measured", 9), ("spread", 7), ("error", 6))
MS = 1e3


def table(situation: Situation, predictions: Sequence[Prediction], measured: Measured) -> str:
    """Lines of text; times in milliseconds."""
    profile = situation.profile
    columns = (*COLUMNS, *VERIFIED) if measured else COLUMNS
    lines = [
        f"{situation.model}: {profile.numel / 1e6:.4g} M parameters in {len(situation.plan)} "
        f"buckets; batches of {profile.batch} on each of {situation.P} workers; density "
        f"{situation.density:g}",
        f"links: {situation.links}",
        f"without aggregation: read {MS * profile.t_io:.4g} ms, forward {MS * profile.t_f:.4g} ms, "
        f"backward {MS * profile.t_b:.4g} ms, update {MS * profile.t_u:.4g} ms",
        "predicted, in ms; exposed: what selection and communication add to computing:",
        _row([name for name, _ in columns], columns),
    ]
    for p in predictions:
        cells = [
            p.candidate.compressor,
            p.candidate.collective,
            *(
                _number(MS * seconds)
                for seconds in (
                    p.seconds,
                    p.compute,
                    p.selection,
                    p.communication,
                    p.exposed,
                    p.update,
                )
            ),
            _number(p.images_per_second),
            f"{p.efficiency:.0%}",
            _number(p.bytes_sent / 1e6),
        ]
        if p.candidate in measured:
            seconds, spread = measured[p.candidate]
            error = p.seconds / seconds - 1
            cells += [_number(MS * seconds), f"{spread:.0%}", f"{error:+.0%}"]
        lines.append(_row(cells, columns))
    return "\n".join(lines)


def _row(cells: Sequence[str], columns: Sequence[tuple[str, int]]) -> str:
    """Names to the left, numbers to the right."""
    padded = (
        cell.ljust(width) if place < 2 else cell.rjust(width)
        for place, (cell, (_, width)) in enumerate(zip(cells, columns, strict=True))
    )
    return " ".join(padded).rstrip()


def _number(value: float) -> str:
    """Four digits at most, never an exponent."""
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def busy_line(own_share: float | None) -> str:
    """A warning where other programs took a tenth of the cores, or more."""
    if own_share is None or own_share > 0.9:
        return ""
    return (
        f"These ranks got {own_share:.0%} of the cores they could use: other programs disturbed "
        "the measurement; repeat it before you rely on what follows."
    )


def hiding_line(situation: Situation, predictions: Sequence[Prediction], advice: Advice) -> str:
    """At which density communication just hides; of the advised compressor, else the fastest."""
    sparse = [p for p in predictions if not p.candidate.is_dense and p.candidate.is_advisable]
    if not sparse or advice.best.P == 1:
        return ""
    shown = min(sparse, key=lambda p: (p is not advice.best, p.seconds))
    label, density = shown.candidate.label, shown.hiding_density
    if density is None:
        return f"{label} cannot hide behind the backward pass at any density."
    if len(situation.plan) == 1:
        return (
            f"{label} cannot hide behind the backward pass: a single bucket is complete only when "
            "that ends; smaller --bucket-bytes make more."
        )
    if density >= 1:
        return f"{label} takes no longer than the backward pass at any density."
    return f"{label} just hides behind the backward pass at density {density:.2g}."


def as_object(
    situation: Situation, predictions: Sequence[Prediction], advice: Advice, measured: Measured
) -> dict[str, Any]:
    """For JSON: plain numbers, seconds and bytes."""
    profile, links = situation.profile, situation.links
    within = links.within
    answer: dict[str, Any] = {
        "model": situation.model,
        "workers": situation.P,
        "batch_size": profile.batch,
        "density": situation.density,
        "links": {
            "alpha_seconds": links.between.alpha,
            "beta_seconds_per_byte": links.between.beta,
            "within_nodes": within
            and {"alpha_seconds": within.alpha, "beta_seconds_per_byte": within.beta},
            "host_seconds_per_message": links.host.alpha,
            "host_seconds_per_entry": links.host.beta,
        },
        "layers": [
            {"name": layer.name, "numel": layer.numel, "backward_seconds": layer.t_b}
            for layer in profile.layers
        ],
        "alone": {
            "read_seconds": profile.t_io,
            "forward_seconds": profile.t_f,
            "backward_seconds": profile.t_b,
            "update_seconds": profile.t_u,
        },
        "buckets": situation.numels,
        "predictions": {p.candidate.label: _prediction(p, situation) for p in predictions},
        "recommendation": {
            "candidate": advice.best.candidate.label,
            "by_prediction": advice.by_prediction.candidate.label,
            **advice.best.candidate.arguments,
            "sentence": advice.sentence,
        },
    }
    for candidate, (seconds, spread) in measured.items():
        row = answer["predictions"][candidate.label]
        row["measured_seconds"], row["measured_spread"] = seconds, spread
        row["error"] = row["seconds"] / seconds - 1
    return answer


def _prediction(p: Prediction, situation: Situation) -> dict[str, Any]:
    sharing = situation.aggregations[p.candidate].sharing
    return {
        "compressor": p.candidate.compressor,
        "collective": p.candidate.collective,
        "seconds": p.seconds,
        "compute_seconds": p.compute,
        "selection_seconds": p.selection,
        "communication_seconds": p.communication,
        "exposed_seconds": p.exposed,
        "update_seconds": p.update,
        "images_per_second": p.images_per_second,
        "efficiency": p.efficiency,
        "bytes_sent": p.bytes_sent,
        "hiding_density": p.hiding_density,
        "speed_beside": {"backward": sharing.compute, "aggregation": sharing.worker},
    }
