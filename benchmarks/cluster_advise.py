# sudo python benchmarks/cluster_advise.py --hosts 4 --rate 1gbit --model resnet18 --verify
"""Run `python -m ddl.advise` over links of a chosen rate: on an emulated cluster on this machine.

Every host is a network namespace with one rate-limited link to a switch, and runs one worker; see
bench_cluster.py. All hosts share this machine's cores, so computing is slower than on a cluster:
the advice is for this machine with these links. What is predicted and what is measured are alike in
that, so `--verify` shows how good predictions are. Flags besides those below are those of
`python -m ddl.advise`.

    sudo python benchmarks/cluster_advise.py --hosts 4 --rate 100mbit --model resnet18 \
        --image-size 64 --batch-size 4 --verify
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import bench_arguments
from bench_cluster import end, rate
from cluster_launch import find_mpiexec, run_mpi
from cluster_network import MOST_HOSTS, ClusterError, Network, check_machine, sweep

from ddl import flags
from ddl.advise import __main__ as advise
from ddl.advise import arguments as advise_arguments

HERE = Path(__file__).resolve()
JOB_SECONDS = 3600.0


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = flags.Parser(
        prog="cluster_advise.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog="all other flags: python -m ddl.advise --help",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    hosts = flags.number(
        int, lambda value: 2 <= value <= MOST_HOSTS, f"a whole number from 2 to {MOST_HOSTS}"
    )
    parser.add_argument("--hosts", type=hosts, default=4, help="how many, one worker on each")
    parser.add_argument("--rate", type=rate, default="1gbit", help="of every link")
    options, rest = parser.parse_known_args(arguments)
    asked = advise_arguments.parse(rest)  # says what is wrong before anything is built
    if asked.offline or asked.network is not None:
        parser.error("--offline and --network measure no links, and here are some; leave them out")
    return options, rest


def main(arguments: list[str] | None = None) -> None:
    if bench_arguments.is_mpi_job():  # on one of the hosts
        sys.path.insert(0, str(HERE.parent.parent))  # for --model MODULE:FUNCTION
        advise.main(arguments)
        return
    options, rest = parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        check_machine()
        find_mpiexec()
        sweep()
        with Network(options.hosts, options.rate) as network:
            print(f"{options.hosts} hosts, links of {options.rate} each", flush=True)
            run_mpi(network, HERE, rest, JOB_SECONDS)
    except ClusterError as error:
        print(f"cluster_advise.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("cluster_advise.py: interrupted; the cluster is removed", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
