# sudo python benchmarks/bench_cluster.py --hosts 4 8 16 --rate 1gbit
"""Time the collectives over links of a chosen rate: an emulated cluster on this machine.

Every host is a network namespace with one rate-limited link to a switch, and runs one process.
Needs root and iproute2; leaves nothing behind, after a failure or Ctrl-C either. For each number of
hosts:

1. *Links*: what a message costs (cluster_links.py), by which times are predicted: by alpha and beta
   alone, and with what handling messages costs the host.
2. *Collectives* (bench_collectives.py), then the same once more over links without a limit. What a
   collective takes there is the hosts' work and waiting, since all hosts share this machine's
   cores. Up to a quarter of the time over limited links it says that the links are the limit, and
   from half on that the cores are: a row marked `cores` says little about a real cluster, whose
   hosts have cores of their own. MPI's own collectives are marked `spins`: they wait on the cores
   that their messages' way through the kernel needs.
3. The interfaces' counters must agree with what the engine says it sent.
4. torch DDP's own aggregation over the same links (cluster_ddp.py): plain, in fp16, by PowerSGD.

    sudo python benchmarks/bench_cluster.py --hosts 8 --algorithms exact all-gather --ddp none
    sudo python benchmarks/bench_cluster.py --quick
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

import bench_arguments
import cluster_report
from cluster_launch import find_mpiexec, run_mpi, run_processes
from cluster_network import (
    INTERFACE,
    MOST_HOSTS,
    ClusterError,
    Network,
    check_machine,
    rate_of,
    sweep,
)
from collective_contenders import ALGORITHMS, DEFAULT

from ddl import flags
from ddl.wires import WIRES

HERE = Path(__file__).resolve().parent
HOOKS = ("plain", "fp16", "powersgd")
JOB_SECONDS = 1800.0
RESNET50 = 25_557_032
QUICK = {"numel": 1_000_000, "repeats": 3, "hosts": [2]}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = flags.Parser(
        prog="bench_cluster.py",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    hosts = flags.number(
        int, lambda value: 2 <= value <= MOST_HOSTS, f"a whole number from 2 to {MOST_HOSTS}"
    )
    parser.add_argument("--hosts", nargs="+", type=hosts, default=[8], help="how many")
    parser.add_argument("--rate", type=rate, default="1gbit", help="of every link")
    parser.add_argument(
        "--numel", type=bench_arguments.numel, default=RESNET50, help="entries of the gradient"
    )
    parser.add_argument(
        "--density", type=flags.density, default=0.001, help="fraction of entries kept"
    )
    parser.add_argument(
        "--correlation", type=bench_arguments.correlation, default=0.0, help="of ranks' gradients"
    )
    parser.add_argument(
        "--algorithms", nargs="+", default=list(DEFAULT), choices=list(ALGORITHMS), help="to time"
    )
    parser.add_argument(
        "--wire", nargs="+", default=["plain"], choices=list(WIRES), help="messages' formats"
    )
    parser.add_argument(
        "--ddp", nargs="+", default=list(HOOKS), choices=[*HOOKS, "none"], help="torch's hooks"
    )
    parser.add_argument(
        "--late",
        type=flags.not_negative,
        default=0.0,
        metavar="SECONDS",
        help="also measure what ranks use of a core while the last one is so late",
    )
    parser.add_argument("--repeats", type=flags.positive_int, default=7, help="samples of a row")
    parser.add_argument(
        "--json", type=flags.output_file, help="write one JSON object a row to this file"
    )
    parser.add_argument("--quick", action="store_true", help=f"try it out: {QUICK}")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    options.hooks = [hook for hook in HOOKS if hook in options.ddp]
    return options


def rate(text: str) -> str:
    try:
        rate_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def measure_links(network: Network, folder: Path) -> dict[str, Any]:
    """Alpha, beta and gamma on this very set-up."""
    file = folder / "links.jsonl"
    run_mpi(network, HERE / "cluster_links.py", ["--json", str(file)], JOB_SECONDS)
    return _rows(file)[0]


def measure_collectives(
    network: Network, options: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """Run bench_collectives over limited links, then without a limit, and check what crossed."""
    file = folder / "collectives.jsonl"
    flags = [
        *("--numel", str(options.numel), "--density", str(options.density)),
        *("--correlation", str(options.correlation), "--interface", INTERFACE),
        *("--algorithms", *options.algorithms, "--wire", *options.wire, "--json", str(file)),
    ]
    program = HERE / "bench_collectives.py"
    before = [network.traffic(host) for host in network.hosts]
    limited = [*flags, "--repeats", str(options.repeats), "--late", str(options.late)]
    run_mpi(network, program, limited, JOB_SECONDS)
    after = [network.traffic(host) for host in network.hosts]
    passed = [new - old for old, new in zip(before, after, strict=True)]
    rows = _rows(file)
    cluster_report.check_traffic(rows, passed)
    print("the same over links without a limit:")
    network.unlimit()
    run_mpi(network, program, [*flags, "--repeats", "3"], JOB_SECONDS)
    network.limit()
    for row, free in zip(rows, _rows(file), strict=True):
        row["unlimited_ms"] = free["median_ms"]
    return rows


def measure_ddp(
    network: Network, options: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """Run torch DDP with each hook over the same links."""
    shapes, file = folder / "shapes.json", folder / "ddp.jsonl"
    shapes.write_text(json.dumps(resnet50_shapes(options.numel)))
    flags = ["--shapes", str(shapes), "--json", str(file), "--hooks", *options.hooks]
    flags += ["--repeats", str(options.repeats), "--interface", INTERFACE]
    run_processes(network, HERE / "cluster_ddp.py", flags, JOB_SECONDS)
    return _rows(file)


def resnet50_shapes(numel: int) -> list[list[int]]:
    """ResNet-50's parameters; of another `numel` only as many as fit, and a rest."""
    import torch
    from torchvision.models import resnet50

    with torch.device("meta"):
        shapes = [list(parameter.shape) for parameter in resnet50().parameters()]
    taken: list[list[int]] = []
    left = numel
    for shape in shapes:
        size = torch.Size(shape).numel()
        if size <= left:
            taken.append(shape)
            left -= size
    return [*taken, [left]] if left else taken


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(options: argparse.Namespace, file: TextIO | None) -> None:
    """Measure with every number of hosts, and remove it all again."""
    for hosts in options.hosts:
        with (
            tempfile.TemporaryDirectory(prefix="ddl-bench-") as name,
            Network(hosts, options.rate) as network,
        ):
            about = {"rate": options.rate, "burst_bytes": network.burst_bytes, "hosts": hosts}
            folder = Path(name)
            print(f"{hosts} hosts, links of {options.rate} each", flush=True)
            links = measure_links(network, folder)
            print(cluster_report.links_line(links), flush=True)
            rows = measure_collectives(network, options, folder)
            cluster_report.predict(rows, links)
            ddp = measure_ddp(network, options, folder) if options.hooks else []
        print(cluster_report.table(rows))
        if ddp:
            print(cluster_report.ddp_table(ddp, rows), flush=True)
        for row in [links, *rows, *ddp]:
            if file:
                print(json.dumps(about | row), file=file, flush=True)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        check_machine()
        find_mpiexec()
        sweep()
        if options.json:
            with options.json.open("w") as file:
                run(options, file)
        else:
            run(options, None)
    except ClusterError as error:
        print(f"bench_cluster.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("bench_cluster.py: interrupted; the cluster is removed", file=sys.stderr)
        sys.exit(130)


def end(number: int, frame: Any) -> None:
    """End as after an error, so that the cluster is removed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
