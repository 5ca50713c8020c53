"""From records of diagnostics to a verdict on Theorem 1 of Shi et al., arXiv 1911.08772.

A record is a layer, or a whole bucket, in a sampled step. Where nothing of it was picked, or all,
the theorem says 1 <= 1 or 0 <= 0; such records are counted and not judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]
SLACK = 1e-9  # of contractions, which are quotients of float64 norms
MOST_EXCEPTIONS = 20

MEDIANS: dict[str, Callable[[Record], float | None]] = {
    "contraction": lambda record: record["contraction"],
    "bound_topk": lambda record: record["bound_topk"],
    "bound_random": lambda record: record["bound_random"],
    "kurtosis_gradient": lambda record: record["gradient"]["kurtosis"],
    "kurtosis_accumulated": lambda record: record["accumulated"]["kurtosis"],
    "dip": lambda record: record["dip"],
    "density": lambda record: record["density"],
    "gaussian_ratio": lambda record: (
        record["gaussian_count"] / record["picked"] if record["picked"] else None
    ),
    "age": lambda record: (record["age"] or {}).get("median"),
    "overlap": lambda record: record["overlap"],
}


def summarise(records: list[Record]) -> dict[str, Any]:
    """Judge whole buckets, from which entries are selected, and layers, apart from each other.

    Returns:
        For JSON, under `buckets` and `layers`: `held`, see `held`; `exceptions`, see `exceptions`;
        `each`, for one bucket or layer after the other `name`, `numel`, `held` again, and the
        median over its samples of each of MEDIANS, null where no sample has a value.
    """
    parts = {
        "buckets": [record for record in records if record["layer"] is None],
        "layers": [record for record in records if record["layer"] is not None],
    }
    return {
        part: {
            "held": held(members),
            "exceptions": exceptions(members),
            "each": [_describe(name, group) for name, group in _by_name(members).items()],
        }
        for part, members in parts.items()
    }


def name_of(record: Record) -> str:
    """The layer's name; a bucket has its number."""
    return record["layer"] or f"bucket {record['bucket']}"


def is_judged(record: Record) -> bool:
    """Whether the theorem says something of it."""
    return 0 < record["picked"] < record["numel"]


def is_within(record: Record, bound: str) -> bool:
    """Whether what was left is at or below `bound_topk` or `bound_random`, to rounding."""
    return record["contraction"] <= record[bound] + SLACK


def held(records: list[Record]) -> dict[str, Any]:
    """How often the bounds hold.

    Returns:
        `samples`; `judged` of them; of these the shares `within_topk` and `within_random`, and
        `bell_shaped` in number, of which again the shares `bell_within_topk` and
        `bell_within_random`. A share of none is null.
    """
    judged = [record for record in records if is_judged(record)]
    bells = [record for record in judged if record["bell_shaped"]]
    return {
        "samples": len(records),
        "judged": len(judged),
        "within_topk": _share(is_within(record, "bound_topk") for record in judged),
        "within_random": _share(is_within(record, "bound_random") for record in judged),
        "bell_shaped": len(bells),
        "bell_within_topk": _share(is_within(record, "bound_topk") for record in bells),
        "bell_within_random": _share(is_within(record, "bound_random") for record in bells),
    }


def exceptions(records: list[Record]) -> list[dict[str, Any]]:
    """What left more than `bound_topk`, the worst first, MOST_EXCEPTIONS at most."""
    found = [r for r in records if is_judged(r) and not is_within(r, "bound_topk")]
    found.sort(key=lambda record: record["bound_topk"] - record["contraction"])
    kept = ("step", "numel", "picked", "contraction", "bound_topk", "dip", "bell_shaped")
    return [
        {
            "name": name_of(record),
            **{key: record[key] for key in kept},
            "kurtosis": record["accumulated"]["kurtosis"],
        }
        for record in found[:MOST_EXCEPTIONS]
    ]


def _describe(name: str, records: list[Record]) -> dict[str, Any]:
    return {
        "name": name,
        "numel": records[0]["numel"],
        "held": held(records),
        **{key: _median(map(value_of, records)) for key, value_of in MEDIANS.items()},
    }


def _by_name(records: list[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(name_of(record), []).append(record)
    return groups


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _share(verdicts: Iterable[bool]) -> float | None:
    verdicts = list(verdicts)
    return sum(verdicts) / len(verdicts) if verdicts else None
