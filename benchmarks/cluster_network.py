"""Hosts in network namespaces, each with a link of a chosen rate to one switch.

1. The *switch* is a namespace with a bridge, 10.77.0.1; programs are launched from there.
2. A *host* is a namespace with one interface, eth0, 10.77.0.2 and up, joined to the bridge.
3. Token buckets on both ends of each link limit what it carries, in both directions. After a pause
   a link may carry a bucket's content at once; so a bucket is small, a millisecond's worth. It
   cannot be smaller than a packet, and TCP makes packets of 64 KB, which a small bucket would have
   to cut up into Ethernet frames at three times the CPU time; so TCP is told to make smaller ones.
4. TCP's congestion control is cubic, the usual one, whatever this machine's own is.
5. The bridge does not show its packets to the firewall, which would cost a fifth of a byte's CPU
   time.

The machine's own namespace gets no interface and no address, so nothing can clash with it. All is
gone when the namespaces are, and `Network` removes them however its block ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"  # within a host
MOST_HOSTS = 64
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PREFIX = "ddl-bench-"
BRIDGE_TO_FIREWALL = "/proc/sys/net/bridge/bridge-nf-call-iptables"
PATIENCE_SECONDS = 5.0
BURST_SECONDS, LEAST_BURST_BYTES = 1e-3, 32_768
LARGEST_PACKET = 65_536
NETWORK = "10.77.0.0/24"


class ClusterError(Exception):
    """A cluster cannot be had here; the message is one line with the remedy."""


def rate_of(text: str) -> float:
    """Bits per second of a rate as tc writes it, such as 1gbit.

    Raises:
        ValueError: not a number and a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.lower())
    if match and float(match[1]) > 0:
        return float(match[1]) * UNITS[match[2]]
    raise ValueError(f"a rate is a number above 0 and one of {', '.join(UNITS)}, got {text!r}")


def check_machine() -> None:
    """Whether this machine and user can make namespaces and links.

    Raises:
        ClusterError: not root, or no iproute2.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise ClusterError("an emulated cluster needs root, for network namespaces; use sudo")
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            raise ClusterError(
                f"an emulated cluster needs {tool!r}, which was not found; install iproute2 and "
                "util-linux (apt-get install iproute2 util-linux)"
            )


def command(*words: str) -> str:
    """Run a program and return what it prints.

    Raises:
        ClusterError: it fails.
    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        first_line = (done.stderr.strip() or f"status {done.returncode}").splitlines()[0]
        raise ClusterError(f"{' '.join(words)}: {first_line}")
    return done.stdout


@dataclass(frozen=True)
class Traffic:
    """Bytes that a host's interface has sent and received, as the kernel counts them."""

    sent: int
    received: int

    def __sub__(self, before: Traffic) -> Traffic:
        """The bytes since then."""
        return Traffic(self.sent - before.sent, self.received - before.received)


class Network:
    """Hosts and links, within a `with` block."""

    def __init__(self, hosts: int, rate: str) -> None:
        """Nothing is made yet.

        Args:
            hosts: how many, at most `MOST_HOSTS`.
            rate: of each link and direction, as tc writes it: 1gbit.
        """
        self.rate = rate
        self.burst_bytes = max(LEAST_BURST_BYTES, round(rate_of(rate) / 8 * BURST_SECONDS))
        self.switch = f"{PREFIX}{os.getpid()}-switch"
        self.hosts = [f"{PREFIX}{os.getpid()}-{host}" for host in range(hosts)]

    @property
    def addresses(self) -> list[str]:
        """Of the hosts, in order."""
        return [address(host) for host in range(len(self.hosts))]

    def __enter__(self) -> Network:
        """Make everything, or nothing."""
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End what still runs on the hosts, and remove them."""
        self.remove()

    def unlimit(self) -> None:
        """Let links carry what they can."""
        for namespace, interface in self._ends():
            command("tc", "-n", namespace, "qdisc", "delete", "dev", interface, "root")

    def limit(self) -> None:
        """Limit what each end of each link sends; what would wait longer than 0.1 s is dropped."""
        for namespace, interface in self._ends():
            command(
                *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root"),
                *("tbf", "rate", self.rate, "burst", str(self.burst_bytes), "latency", "100ms"),
            )

    def _ends(self) -> list[tuple[str, str]]:
        """Namespace and interface of both ends of every link."""
        hosts = [(name, INTERFACE) for name in self.hosts]
        return [*hosts, *((self.switch, f"port{host}") for host in range(len(self.hosts)))]

    def within(self, namespace: str, *words: str) -> list[str]:
        """The command line that runs a program in a namespace."""
        return ["ip", "netns", "exec", namespace, *words]

    def traffic(self, host: str) -> Traffic:
        """What has gone through a host's interface so far."""
        shown = command("ip", "-n", host, "-s", "-j", "link", "show", INTERFACE)
        counters = json.loads(shown)[0]["stats64"]
        return Traffic(counters["tx"]["bytes"], counters["rx"]["bytes"])

    def remove(self) -> None:
        """End every process on the hosts, then remove them. May be called again.

        A second Ctrl-C must not leave half of it behind, so it waits until this is done.
        """
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            mine = set(namespaces()) & {self.switch, *self.hosts}
            _end_processes(sorted(mine))
            for namespace in sorted(mine):
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)

    def _build(self) -> None:
        self._make_namespace(self.switch)
        inside_switch = ("ip", "-n", self.switch)
        command(*inside_switch, "link", "add", "switch", "type", "bridge")
        silence = f"echo 0 > {BRIDGE_TO_FIREWALL}"  # where it fails, it costs time only
        subprocess.run(self.within(self.switch, "sh", "-c", silence), capture_output=True)
        command(*inside_switch, "address", "add", f"{switch_address()}/24", "dev", "switch")
        command(*inside_switch, "link", "set", "switch", "up")
        for host, name in enumerate(self.hosts):
            port = f"port{host}"
            self._make_namespace(name)
            command(
                *(*inside_switch, "link", "add", port, "type", "veth"),
                *("peer", "name", INTERFACE, "netns", name),
            )
            command(*inside_switch, "link", "set", port, "master", "switch", "up")
            command("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
            command("ip", "-n", name, "link", "set", INTERFACE, "up")
            self._set_congestion_control(name, host)
        for namespace, interface in self._ends():
            packet = str(min(LARGEST_PACKET, self.burst_bytes // 2))
            words = ["ip", "-n", namespace, "link", "set", interface, "gso_max_size", packet]
            subprocess.run(words, capture_output=True)  # where it fails, it costs time only
        self.limit()

    def _set_congestion_control(self, name: str, host: int) -> None:
        """Use TCP as clusters do. This machine's may be BBR, which falls behind short messages."""
        route = ("ip", "-n", name, "route", "replace", NETWORK, "dev", INTERFACE)
        for algorithm in ("cubic", "reno"):
            words = [*route, "src", address(host), "congctl", algorithm]
            if subprocess.run(words, capture_output=True).returncode == 0:
                return

    def _make_namespace(self, name: str) -> None:
        command("ip", "netns", "add", name)
        command("ip", "-n", name, "link", "set", "lo", "up")


def address(host: int) -> str:
    """Of a host, 0 and up."""
    return f"10.77.0.{host + 2}"


def switch_address() -> str:
    """Of the namespace that programs are launched from."""
    return "10.77.0.1"


def switch_interface() -> str:
    """Of the namespace that programs are launched from."""
    return "switch"


def namespaces() -> list[str]:
    """The names of all network namespaces of this machine."""
    return [line.split()[0] for line in command("ip", "netns", "list").splitlines() if line]


def sweep() -> None:
    """Remove the namespaces of benchmarks that were killed before they could."""
    mine = [name for name in namespaces() if name.startswith(PREFIX)]
    stale = [name for name in mine if not Path(f"/proc/{name.split('-')[2]}").exists()]
    _end_processes(stale)
    for name in stale:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _end_processes(names: Sequence[str]) -> None:
    """Ask every process in these namespaces to end, then make it."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + PATIENCE_SECONDS
        alive = _processes(names)
        for process in alive:
            _send(process, sent)
        while alive and time.monotonic() < deadline:
            time.sleep(0.05)
            alive = _processes(names)
        if not alive:
            return


def _processes(names: Sequence[str]) -> list[int]:
    found = []
    for name in names:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        found += [int(word) for word in listed.stdout.split()]
    return [process for process in found if Path(f"/proc/{process}").exists()]


def _send(process: int, what: signal.Signals) -> None:
    try:
        os.kill(process, what)
    except ProcessLookupError:
        pass  # ended by itself meanwhile
