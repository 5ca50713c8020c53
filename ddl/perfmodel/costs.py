"""What each collective costs, by the alpha-beta model (Shi et al., arXiv 1901.04359, Section III).

1. A *round*, in which ranks send each other messages of b bytes at the same time, takes
   alpha + beta * b seconds. Links are full duplex: sending and receiving do not add up.
2. A collective takes as long as its longest *path*, a sequence of rounds of which each needs the
   one before. So its cost is a number of rounds and of bytes on the path.
3. What ranks *send* is another figure: in a tree most ranks wait most of the time.
4. *Host work* can be added. Its unit is what a rank does with one message: encode it, decode it,
   and merge it into what it holds, which takes delta seconds and gamma per entry merged.

Formulas hold for any number of ranks P. Where P is no power of two, `core` is the largest below it,
and P - core ranks fold their vectors into others' first and get the result at the end.

Left out, because they are small: headers (8 to 16 bytes a message), the bits that tell ranks the
fate of their entries (1/8 byte an entry), and the word by which a child in a tree says that a long
message has come, so that the next copy has the link to itself. Counts are taken as equal on all
ranks, and no two ranks as having an index in common, which is the worst case for whoever adds up
before sending on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

PLAIN_ENTRY_BYTES = 8.0
VALUE_BYTES = 4.0
# Dense tensors of up to so many bytes are gathered whole, in fewer rounds.
SMALL_BYTES = 4096


@dataclass(frozen=True)
class Cost:
    """What one collective costs.

    Host work counts messages and entries in the unit above. The factors in the functions below are
    those of the engine's CPU time on ranks that are threads, P = 2..16, k = 100 and 20,000; they
    are good to a third.

    Attributes:
        rounds: on the longest path.
        path_bytes: on the longest path.
        sent_bytes: what a rank sends, mean over ranks.
        busiest_bytes: what the rank that sends most sends.
        host_messages: messages handled on the longest path.
        host_entries: entries handled on the longest path.
    """

    rounds: int = 0
    path_bytes: float = 0.0
    sent_bytes: float = 0.0
    busiest_bytes: float = 0.0
    host_messages: float = 0.0
    host_entries: float = 0.0

    def seconds(self, alpha: float, beta: float, gamma: float = 0.0, delta: float = 0.0) -> float:
        """The time it takes.

        Args:
            alpha: seconds a round takes, however short its messages.
            beta: seconds per byte.
            gamma: seconds of host work per entry.
            delta: seconds of host work per message.
        """
        network = self.rounds * alpha + self.path_bytes * beta
        return network + self.host_messages * delta + self.host_entries * gamma


def dense_ring(P: int, numel: int, value_bytes: float = VALUE_BYTES) -> Cost:
    """All-reduce around a ring: 2 (P-1) rounds, 2 (P-1)/P of the tensor.

    Args:
        P: number of ranks.
        numel: elements of the tensor.
        value_bytes: bytes an element.
    """
    rounds = 2 * (P - 1)
    passed = rounds / P * numel
    sent = passed * value_bytes
    return Cost(rounds, sent, sent, sent, host_messages=0.2 * rounds, host_entries=0.15 * passed)


def dense_gather(P: int, numel: int, value_bytes: float = VALUE_BYTES) -> Cost:
    """All-reduce by gathering everything everywhere: fewest rounds, most bytes."""
    rounds = _ceil_log2(P)
    sent = (P - 1) * numel * value_bytes
    return Cost(rounds, sent, sent, sent, host_messages=0.4 * rounds)


def dense(P: int, numel: int, value_bytes: float = VALUE_BYTES) -> Cost:
    """The engine's dense all-reduce: the ring, or the gathering of small tensors."""
    small = numel * value_bytes <= SMALL_BYTES
    return (dense_gather if small else dense_ring)(P, numel, value_bytes)


def aligned(P: int, k: int) -> Cost:
    """Dense all-reduce of k values whose indices all ranks know, and of a flag: random-k."""
    return dense(P, k + 1)


def all_gather(
    P: int, k: float, entry_bytes: float = PLAIN_ENTRY_BYTES, winners: float | None = None
) -> Cost:
    """Sparse all-gather (Bruck), then the sum of P vectors, pairwise on each rank.

    Args:
        P: number of ranks.
        k: entries of each rank.
        entry_bytes: bytes an entry.
        winners: not used, since the result keeps all.
    """
    rounds = _ceil_log2(P)
    sent = (P - 1) * k * entry_bytes
    return Cost(rounds, sent, sent, sent, host_messages=P, host_entries=1.3 * rounds * P * k)


def tree(
    P: int, k: float, entry_bytes: float = PLAIN_ENTRY_BYTES, winners: float | None = None
) -> Cost:
    """GTopKAllReduce up a binomial tree to rank 0, and down again.

    Args:
        P: number of ranks.
        k: entries of each rank.
        entry_bytes: bytes an entry.
        winners: entries that merges keep, where that is another number.
    """
    levels = _ceil_log2(P)
    # The child of rank 0 at distance 2^level speaks for as many ranks, as far as there are.
    held = [_held(k, winners, min(2**level, P - 2**level)) for level in range(levels)]
    result = _held(k, winners, P)
    # How many ranks send up at each level, all of them together P - 1.
    senders = [(P - 1 + 2**level) // 2 ** (level + 1) for level in range(levels)]
    up = sum(count * entries for count, entries in zip(senders, held, strict=True))
    return Cost(
        rounds=2 * levels,
        path_bytes=(sum(held) + levels * result) * entry_bytes,
        sent_bytes=(up + (P - 1) * result) / P * entry_bytes,
        busiest_bytes=levels * result * entry_bytes,  # rank 0, to each of its children
        host_messages=2.5 * levels,
        host_entries=2 * (sum(held) + levels * result),
    )


def butterfly(
    P: int, k: float, entry_bytes: float = PLAIN_ENTRY_BYTES, winners: float | None = None
) -> Cost:
    """GTopKAllReduce by exchanges at distance 1, 2, 4, .... Arguments as `tree`."""
    core, rounds = _core(P), _floor_log2(P)
    extras = P - core
    folded = int(extras > 0)
    # In round i groups of 2^i ranks exchange, some of them with as many folded ones.
    small = [_held(k, winners, 2**bit) for bit in range(rounds)]
    large = [_held(k, winners, 2**bit + min(2**bit, extras)) for bit in range(rounds)]
    held = [max(pair) for pair in zip(small, large, strict=True)]
    fold, result = folded * k, _held(k, winners, P)
    return Cost(
        rounds=rounds + 2 * folded,
        path_bytes=(fold + sum(held) + folded * result) * entry_bytes,
        sent_bytes=(core * sum(small) + extras * (k + result)) / P * entry_bytes,
        # A partner also sends the result back.
        busiest_bytes=(sum(held) + folded * result) * entry_bytes,
        host_messages=2 * (rounds + folded),
        host_entries=4 * sum(held) + 2 * (fold + folded * result),
    )


def exact(
    P: int, k: float, entry_bytes: float = PLAIN_ENTRY_BYTES, winners: float | None = None
) -> Cost:
    """Sparse reduce-scatter by recursive halving, then a gathering of the largest of all sums.

    A power of two sends (log2(P)/2 + (P-1)/P) k entries in 2 log2(P) rounds, if one gathering is
    enough, as in about 19 steps of 20.

    Args:
        P: number of ranks.
        k: entries of each rank.
        entry_bytes: bytes an entry.
        winners: entries of the result, where that is another number.
    """
    winners = _held(k, winners, P) if P > 1 else k
    core, rounds = _core(P), _floor_log2(P)
    extras = P - core
    folded = int(extras > 0)
    # A partner holds 2 k entries before the first round. As extras fold into the first ranks, and
    # these exchange among themselves first, what they have too much spreads to 2, 4, 8... ranks.
    held = [k * (1 + min(1.0, extras / 2**bit)) for bit in range(rounds)]
    scattered = sum(held) / 2
    gathered = (core - 1) / core * winners
    fold, unfold = folded * k, folded * winners
    mean = (core * gathered + extras * (k + winners)) / P + rounds * k / 2
    return Cost(
        rounds=2 * (rounds + folded),
        path_bytes=(fold + scattered + gathered + unfold) * entry_bytes,
        sent_bytes=mean * entry_bytes,
        busiest_bytes=(scattered + gathered + unfold) * entry_bytes,
        host_messages=5 * rounds + 3 * (P > 1) + 2 * folded,
        host_entries=3 * sum(held) + 5 * (k + winners) * (P > 1) + 2 * (fold + unfold),
    )


SPARSE: Mapping[str, Callable[[int, float, float, float | None], Cost]] = MappingProxyType(
    {"all-gather": all_gather, "exact": exact, "butterfly": butterfly, "tree": tree}
)
"""By the engine's names: functions of P, k, the bytes an entry, and the number of winners."""


def compact_entry_bytes(density: float) -> float:
    """Bytes an entry of the compact wire, for entries spread evenly at a density.

    A value and a gap of 16 bits each; a gap of 65,535 or more takes 32 bits besides.
    """
    return 4.0 + 4.0 * (1.0 - density) ** 65534


def _held(k: float, winners: float | None, ranks: int) -> float:
    """Entries of the merged vectors of so many ranks."""
    if winners is None or ranks == 1:
        return k
    return min(winners, k * ranks)


def _ceil_log2(P: int) -> int:
    return (P - 1).bit_length()


def _floor_log2(P: int) -> int:
    return P.bit_length() - 1


def _core(P: int) -> int:
    """The largest power of two that is at most P."""
    return 1 << _floor_log2(P)
