"""Measured beside predicted, and what was the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import collective_report
from cluster_network import ClusterError, Traffic

from ddl.links import Line, Links
from ddl.perfmodel import costs
from ddl.perfmodel.costs import Cost
from ddl.wires import PLAIN

# A packet's headers are 66 bytes of 1514, acknowledgements and the launcher's messages come on top.
MOST_OVERHEAD = 1.12
# Some of a sample's last bytes leave after it.
LEAST_SHARE = 0.99
SMALL_BYTES = 65_536  # of a rank and call: not checked more closely than that
# The share of the time that remains over links without a limit: up to one of these the links are
# what limits, beyond the other the cores.
LINKS_SHARE, CORES_SHARE = 1 / 4, 1 / 2

COLUMNS = (
    ("algorithm", "algorithm", "<20"),
    ("wire", "wire", "<12"),
    ("P", "P", ">3"),
    ("median_ms", "measured ms", ">11.2f"),
    ("predicted_ms", "predicted ms", ">12.2f"),
    ("ratio", "ratio", ">6.2f"),
    ("predicted_with_host_ms", "with host ms", ">12.2f"),
    ("ratio_with_host", "ratio", ">6.2f"),
    ("unlimited_ms", "unlimited ms", ">12.2f"),
    ("idle", "idle", ">5.2f"),
    ("cpu_ms", "cpu ms", ">8.2f"),
    ("bytes_per_rank", "bytes/rank", ">11.0f"),
    ("link_ratio", "on link", ">7.3f"),
    ("limit", "limit", "<6"),
)


def check_traffic(rows: list[dict[str, Any]], passed: Sequence[Traffic]) -> None:
    """Compare what the engine counted with what the interfaces did; adds `link_ratio`.

    Args:
        rows: of bench_collectives, with the interfaces' counts around each sample.
        passed: what each host's interface counted from outside, in the whole run.

    Raises:
        ClusterError: bytes did not cross the links, or more did than the engine says.
    """
    sent, received = (sum(getattr(one, way) for one in passed) for way in ("sent", "received"))
    counted = sum(row["bytes_per_rank"] * row["P"] * row["repeats"] for row in rows)
    if sent < counted or received < counted:
        raise ClusterError(
            f"the links carried {sent:,} bytes, the ranks sent {counted:,.0f}: messages took "
            "another way; is MPI's shared memory switched off?"
        )
    for row in rows:
        row["link_ratio"] = row["link_bytes_mean"] / max(1.0, row["bytes_per_rank"])
        if not row["bytes_counted"] or row["bytes_per_rank"] < SMALL_BYTES:
            continue
        if not LEAST_SHARE <= row["link_ratio"] <= MOST_OVERHEAD:
            raise ClusterError(
                f"{row['algorithm']}, {row['wire']}: a rank sent {row['bytes_per_rank']:,.0f} "
                f"bytes, its interface {row['link_bytes_mean']:,.0f}; expected 1 to "
                f"{MOST_OVERHEAD} times as many"
            )


def cost_of(row: dict[str, Any]) -> Cost | None:
    """What the alpha-beta model says of a row; None where it does not apply."""
    P, k, name = row["P"], row["k"], row["chosen"] or row["algorithm"]
    levels = (P - 1).bit_length()
    if row["algorithm"].startswith("step:"):
        return None  # selection is no message
    if name in costs.SPARSE:
        entry_bytes = costs.PLAIN_ENTRY_BYTES
        if row["wire"] != "plain":
            entry_bytes = costs.compact_entry_bytes(row["density"])
        return costs.SPARSE[name](P, k, entry_bytes)
    if name == "dense":
        return costs.dense(P, row["numel"])
    if name == "mpi-dense":  # recursive halving, then doubling: a ring's bytes in fewer rounds
        return replace(costs.dense(P, row["numel"]), rounds=2 * levels)
    if name == "mpi-all-gather":
        return costs.all_gather(P, k)
    if name == "published-tree":  # 16 bytes an entry, and a barrier after each round up
        return Cost(rounds=2 * levels + levels**2, path_bytes=2 * levels * 16 * k)
    return None


def predict(rows: list[dict[str, Any]], measured: dict[str, Any]) -> None:
    """Add to each row what is predicted and what was the limit.

    Args:
        rows: of bench_collectives.
        measured: by cluster_links.py.
    """
    for row in rows:
        row["kind"] = "collective"
        # MPI's own collectives wait without a back-off.
        by = "ping_pong" if row["algorithm"].startswith("mpi-") else "ring"
        host = measured["host"][row["wire"] or PLAIN.name]
        links = Links(Line(**measured[by]), host=Line(**host))
        cost = cost_of(row)
        if cost is not None:
            row["predicted_ms"] = 1e3 * Links(links.between).seconds(cost)
            row["predicted_with_host_ms"] = 1e3 * links.seconds(cost)
            row["ratio"] = row["median_ms"] / row["predicted_ms"]
            row["ratio_with_host"] = row["median_ms"] / row["predicted_with_host_ms"]
        row["limit"] = _limit(row)


def _limit(row: dict[str, Any]) -> str:
    if row["algorithm"].startswith("mpi-"):
        return "spins"
    share = row["unlimited_ms"] / row["median_ms"]
    return "links" if share <= LINKS_SHARE else "both" if share <= CORES_SHARE else "cores"


def links_line(measured: dict[str, Any]) -> str:
    """What a message costs, in words."""
    parts = [
        f"{name.replace('_', '-')} {measured[name]['alpha'] * 1e6:.0f} us + "
        f"{8e-9 / max(measured[name]['beta'], 1e-15):.3f} Gb/s"
        for name in ("ping_pong", "ring", "engine")
    ]
    host = measured["host"][PLAIN.name]
    parts.append(f"host {host['alpha'] * 1e6:.0f} us + {host['beta'] * 1e9:.1f} ns an entry")
    return ", ".join(parts)


def table(rows: list[dict[str, Any]]) -> str:
    """Every collective, measured beside predicted."""
    lines = [collective_report.line(row, COLUMNS) for row in rows]
    return "\n".join([collective_report.header(COLUMNS), *lines])


def ddp_table(ddp: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Torch DDP's aggregation, and how many times longer it takes than the engine's."""
    lines = []
    ours = [row for row in rows if row["wire"] is not None]
    for one in ddp:
        lines.append(
            f"DDP {one['hook']}: {one['median_ms']:.1f} ms, {one['link_bytes'] / 1e6:.2f} MB a rank"
        )
        lines += [
            f"    {one['median_ms'] / row['median_ms']:6.1f} x {row['algorithm']}, {row['wire']}"
            for row in ours
        ]
    return "\n".join(lines)
