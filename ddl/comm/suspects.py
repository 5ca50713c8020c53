"""Whom a rank waits for in the end, in words.

Ranks wait for one another in chains: where rank 2 is stalled, rank 3 waits for it, and rank 1 for
rank 3. Whoever's deadline comes first has to name rank 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

GONE = -1  # the rank that a rank waits for which has ended

REMEDY = "with unequal numbers of batches train within optimizer.join()"


class Waiting(NamedTuple):
    """What a rank says of its wait."""

    rank: int  # that it waits for, or GONE
    doing: str  # what it waits in, such as "step 3, bucket 0"; "" if that is not known


def suspicion(rank: int, peer: int, waits_for: Callable[[int], Waiting | None]) -> str:
    """Say who holds up a rank, and what to do.

    Args:
        rank: who waits.
        peer: for whom.
        waits_for: what another rank says of its wait, None if nothing.
    """
    seen = {rank}
    story: list[str] = []
    in_step = True
    while True:
        said = waits_for(peer)
        seen.add(peer)
        if said is None:
            story.append(f"rank {peer} waits for nobody: it is stalled, dead, or at something else")
            break
        if said.rank == GONE:
            story.append(f"rank {peer} has left: its script has ended")
            break
        doing = f" ({said.doing})" if said.doing else ""
        in_step &= not said.doing.startswith("ddl.")  # one of its functions, outside of any step
        story.append(f"rank {peer}{doing} waits for rank {said.rank}")
        if said.rank in seen:
            story[-1] += " in turn: they are out of step"
            break
        peer = said.rank
    remedy = f"; {REMEDY}" if in_step else ""
    return f"{', '.join(story)}{remedy}"
