"""Uneven data: a rank that has run out goes on taking part, with nothing to contribute.

Before each step the ranks tell each other, in one small message round, what they are about to do.

1. *Lead.* A rank that still has batches says "step" (or "discard", where `zero_grad` gives up
   gradients under way), and with it what its next update depends on besides the gradient: density
   and learning rates.
2. *Follow.* A rank that has left the block does what the others say, with a gradient of zero.
   What it owes goes on being paid back. It makes the same update from the same average.
3. *Meet.* In the round in which nobody says anything, all have run out. A rank that differs by then
   (the others have clipped their averages, say) gets the state of one that came last.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ddl.collectives import messages
from ddl.errors import CommunicationError
from ddl.state import broadcast_optimizer_state

logger = logging.getLogger(__name__)


class UpdateSettings(NamedTuple):
    """What the next update of an optimizer depends on, besides its state and the gradient."""

    density: float
    loss_scale: float  # of the gradient
    groups: list[dict[str, Any]]  # of the parameters: learning rates and the like

    @classmethod
    def of(cls, optimizer: Any) -> UpdateSettings:
        """Those of an optimizer at present."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        return cls(optimizer.reducer.density, optimizer.reducer.loss_scale, groups)

    def give(self, optimizer: Any) -> None:
        """Make them those of another rank's optimizer."""
        optimizer.reducer.density = self.density
        for group, settings in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(settings)


class Word(NamedTuple):
    """What a rank says before a step."""

    verb: str  # "step" or "discard"
    optimizer: int  # its place in the block
    step: int
    buckets: int  # that are under way, to be given up
    settings: UpdateSettings

    @property
    def act(self) -> tuple[str, int, int]:
        """What the ranks must do alike."""
        return self.verb, self.optimizer, self.step


class Join:
    """The block in which ranks may take different numbers of steps, some of them none.

        with optimizer.join():
            for inputs, labels in loader:
                ...
                optimizer.step()

    A rank that leaves the block stays in it until all have run out: in each step of the others it
    contributes a gradient of zero and what it owes, and makes the same update. Averages are over
    all ranks, P, as everywhere: dividing by fewer would change what is owed already. Afterwards
    parameters and optimizer state are the same on every rank, to the bit.

    What a rank that has run out does not do is everything else that the script does in a step: it
    runs no model (its batch-norm statistics stay), clips nothing (its parameters are set right at
    the end of the block) and steps no learning-rate scheduler: it gets the others' learning rates,
    but its scheduler lags behind. So a scheduler that steps with each batch is to be set right:

        with optimizer.join() as block:
            ...
        scheduler.load_state_dict(ddl.broadcast_object(scheduler.state_dict(), root=block.last))

    Within the block nothing else may be collective (`ddl.allreduce_mean`, checkpoints, closures,
    parameters added or unfrozen), since who has run out takes no part: average losses after the
    block. Gradients of a last, short accumulation window that no step has applied go into the next
    step of the others, or stay for the next one.

    Attributes:
        last: after the block, a rank that ran out last; the same on every rank.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        """`optimizers`: those that step within the block, in the same order on every rank."""
        self._optimizers = list(optimizers)  # DistributedOptimizers, whose module lies above
        self._following = False
        self.last = 0

    def __enter__(self) -> Join:
        """Tell the optimizers."""
        for optimizer in self._optimizers:
            if optimizer.join_block is not None:
                raise ValueError(
                    "the optimizer is within a join() already, expected one block at a time; give "
                    "several optimizers to one: with generator.join(discriminator)"
                )
        for optimizer in self._optimizers:
            optimizer.join_block = self
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Follow the other ranks until all have run out, unless an error ends this one."""
        try:
            if kind is None:
                self._following = True
                self._follow()
        finally:
            self._following = False
            for optimizer in self._optimizers:
                optimizer.join_block = None

    def lead(self, optimizer: Any, verb: str) -> None:
        """Say what comes, "step" or "discard", before it. Collective; on who follows, nothing."""
        if self._following:
            return
        reducer = optimizer.reducer
        place = [other is optimizer for other in self._optimizers].index(True)
        settings = UpdateSettings.of(optimizer)
        self._round(Word(verb, place, reducer.step, reducer.under_way, settings))

    def _round(self, word: Word | None) -> Word | None:
        """What the ranks that lead say; None if there is none. Collective."""
        reducer = self._optimizers[0].reducer
        reducer.control.doing = f"step {reducer.step}, join()"
        try:
            said = messages.gather_objects(reducer.control, word)
        except CommunicationError as error:
            raise type(error)(
                f"step {reducer.step}, within join(), rank {reducer.control.rank} of "
                f"{reducer.control.size}: {error}; every rank must enter join(), and within it "
                "must call nothing collective besides its optimizers"
            ) from error
        finally:
            reducer.control.doing = ""
        leaders = [(rank, word) for rank, word in enumerate(said) if word is not None]
        if not leaders:
            return None
        self.last, first = leaders[0]
        for rank, other in leaders:
            if other.act != first.act:
                raise CommunicationError(
                    f"within join(), rank {rank} is at {_text(other)}, rank {self.last} at "
                    f"{_text(first)}; all ranks that have batches must call the same in the same "
                    "order"
                )
        return first

    def _follow(self) -> None:
        while (word := self._round(None)) is not None:
            optimizer = self._optimizers[word.optimizer]
            word.settings.give(optimizer)
            if word.verb == "step":
                scale = word.settings.loss_scale
                optimizer.reducer.stand_in(loss_scale=scale)
                if optimizer.synchronize() and scale != 1.0:
                    _unscale(optimizer, scale)
                optimizer.step()
            else:
                optimizer.reducer.stand_in(word.buckets, word.settings.loss_scale)
                optimizer.zero_grad()
        for optimizer in self._optimizers:
            self._meet(optimizer)

    def _meet(self, optimizer: Any) -> None:
        """Bring every rank to the state of one that ran out last. Collective."""
        control = optimizer.reducer.control
        parameters = [
            member.parameter for bucket, _ in optimizer.reducer.owing for member in bucket.members
        ]
        scaler = optimizer.scaler
        mine = (
            optimizer.reducer.under_way,
            UpdateSettings.of(optimizer),
            None if scaler is None else scaler.state_dict(),
            _digest(parameters),
            _digest(optimizer.state_dict()["state"]),
        )
        told = messages.gather_objects(control, mine)
        _, settings, scaling, *expected = told[self.last]
        # What the last ones have under way, and may give up after the block, all give up.
        optimizer.reducer.stand_in(max(count for count, *_ in told), settings.loss_scale)
        settings.give(optimizer)
        if scaler is not None and scaling:  # a scaler that is switched off has no state
            scaler.load_state_dict(scaling)
        different = [rank for rank, (_, _, _, *digests) in enumerate(told) if digests != expected]
        if not different:
            return
        logger.log(
            logging.INFO if control.rank == self.last else logging.DEBUG,
            "join(): ranks %s get the parameters and the optimizer's state of rank %d",
            different,
            self.last,
        )
        for parameter in parameters:
            messages.broadcast_(control, parameter, self.last)
        broadcast_optimizer_state(optimizer, self.last, comm=control)


def _unscale(optimizer: Any, scale: float) -> None:
    """Divide the averages, as the scalers of the other ranks do."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / scale)


def _text(word: Word) -> str:
    return f"{word.verb} {word.step} of optimizer {word.optimizer}"


def _digest(value: Any) -> bytes:
    """A hash of tensors and plain values, nested in any way."""
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(messages.bytes_of(value).numpy().data)
        elif isinstance(value, dict):
            for key in sorted(value, key=repr):
                digest.update(repr(key).encode())
                take(value[key])
        elif isinstance(value, (list, tuple)):
            for entry in value:
                take(entry)
        else:
            digest.update(repr(value).encode())

    take(value)
    return digest.digest()
