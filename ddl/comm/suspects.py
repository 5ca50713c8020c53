"""Whom a rank waits for in the end, in words.

Ranks wait for one another in chains: where rank 2 is stalled, rank 3 waits for it, and rank 1 for
rank 3. Whoever's deadline comes first has to name rank 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

GONE = -1  # what a rank that has ended waits for

REMEDY = "with unequal numbers of batches train within optimizer.join()"


def suspicion(rank: int, peer: int, waits_for: Callable[[int], int | None]) -> str:
    """Say who holds up a rank, and what to do.

    Args:
        rank: who waits.
        peer: for whom.
        waits_for: whom another rank waits for: a rank, GONE, or None if it says nothing.
    """
    chain = [rank, peer]
    while True:
        link = waits_for(chain[-1])
        if link is None or link == GONE or link in chain:
            break
        chain.append(link)
    steps = [f"rank {a} waits for rank {b}" for a, b in itertools.pairwise(chain[1:])]
    end = chain[-1]
    if link == GONE:
        steps.append(f"rank {end} has left: its script has ended")
    elif link is None:
        steps.append(f"rank {end} waits for nobody: it is stalled, dead, or at something else")
    else:
        steps.append(f"rank {end} waits for rank {link} in turn: they are out of step")
    return f"{', '.join(steps)}; {REMEDY}"
