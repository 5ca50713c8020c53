"""One load on one rank: read, check, then change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ddl.checkpoint import files, residuals
from ddl.checkpoint.contents import Objects, class_of, set_random_states, shapes_of
from ddl.checkpoint.files import JOB, Manifest, shard
from ddl.comm import Communicator
from ddl.errors import DDLError
from ddl.optimizer import DistributedOptimizer

SAME_OBJECTS = "give load_checkpoint the same objects as save_checkpoint"


class Loading:
    """Each part in its turn, and a word among all ranks between them.

    Attributes:
        job: what all ranks have in common.
        unchanged: as many ranks own the same pieces of residuals as before.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        comm: Communicator,
        objects: Objects,
        ranges: Mapping[str, list[list[residuals.Range]]],
    ) -> None:
        """`ranges`: for each distributed optimizer, what each rank owns."""
        self._folder, self._manifest, self._objects, self._ranges = (
            folder,
            manifest,
            objects,
            ranges,
        )
        self._rank, self._P, self._P_before = comm.rank, comm.size, manifest.P
        self._shards: dict[int, dict[str, Any]] = {}
        self.job: dict[str, Any] = {}
        self.unchanged = False
        self._inherited = {
            name: residuals.inherited(everyones, comm.rank, manifest.P)
            for name, everyones in ranges.items()
        }

    def read_common(self) -> None:
        """Read what all have in common, and check that it fits the objects."""
        self.job = files.read(self._folder, JOB, self._manifest)
        where = self._folder / JOB
        for kind, named in self._objects.kinds.items():
            saved = self.job[kind]
            if saved.keys() != named.keys():
                raise DDLError(
                    f"{where} has {kind} {_list(saved)}, expected {_list(named)}; {SAME_OBJECTS}"
                )
            for name, value in named.items():
                what = f"{where}: {kind}[{name!r}]"
                if kind != "models" and saved[name]["class"] != class_of(value):
                    raise DDLError(
                        f"{what} is a {saved[name]['class']}, expected a {class_of(value)}; "
                        f"{SAME_OBJECTS}"
                    )
        if self.job["hooks"].keys() != self._objects.hooks.keys():
            raise DDLError(
                f"{where} has hooks {_list(self.job['hooks'])}, expected "
                f"{_list(self._objects.hooks)}; {SAME_OBJECTS}"
            )
        for name, model in self._objects.models.items():
            what = f"{where}: model {name!r}"
            _check_tensors(what, self.job["models"][name]["state"], model.state_dict())
        for name, optimizer in self._objects.optimizers.items():
            got, expected = (
                [len(group["params"]) for group in state["param_groups"]]
                for state in (self.job["optimizers"][name]["state"], optimizer.state_dict())
            )
            if got != expected:
                raise DDLError(
                    f"{where}: optimizer {name!r} has groups of {got} parameters, expected "
                    f"{expected}; {SAME_OBJECTS}"
                )
        for name, optimizer in self._objects.distributed.items():
            saved, now = self.job["aggregation"].get(name), shapes_of(optimizer)
            for parameter, shape in saved["parameters"].items() if saved else ():
                if now.get(parameter) != shape:
                    here = now[parameter] if parameter in now else "none, or a frozen one"
                    raise DDLError(
                        f"{where}: optimizer {name!r} owes for parameter {parameter!r} of shape "
                        f"{shape}, this one has {here}; wrap, name and unfreeze the same parameters"
                    )

    def is_own(self) -> bool:
        """Whether this rank owns the pieces that its shard holds."""
        if self._P != self._P_before:
            return False
        saved = self._shard(self._rank)["residual"]
        return all(
            residuals.same_pieces(optimizer.reducer, saved.get(name, {}))
            for name, optimizer in self._objects.distributed.items()
        )

    def read_shards(self) -> None:
        """Read what this rank is going to need."""
        needed = {self._rank % self._P_before}
        if not self.unchanged:
            needed.update(*(old for buckets in self._inherited.values() for old in buckets))
        if self._objects.hooks:
            needed.update(self._predecessors)
        for old_rank in sorted(needed):
            self._shard(old_rank)
        for name, state in self._objects.hooks.items():
            try:
                state.check_residuals(self._owed_by_hook(name))
            except ValueError as error:
                raise DDLError(f"{self._folder}: hook {name!r}: {error}") from error

    @property
    def _predecessors(self) -> range:
        """The old ranks whose debts this rank takes over, where every rank owes for everything."""
        return range(self._rank, self._P_before, self._P)

    def _owed_by_hook(self, name: str) -> dict[str, Tensor]:
        """What this rank takes over; see `residuals` on why the sum is multiplied."""
        owed: dict[str, Tensor] = {}
        for old_rank in self._predecessors:
            for parameter, residual in self._shards[old_rank]["hooks"][name].items():
                if self._P != self._P_before:
                    residual = residual * (self._P / self._P_before)
                owed[parameter] = owed[parameter] + residual if parameter in owed else residual
        return owed

    def apply(self) -> None:
        """Change the objects."""
        objects, job = self._objects, self.job
        mine = self._shards[self._rank % self._P_before]
        for name, model in objects.models.items():
            state = job["models"][name]["state"]
            state.update(mine["buffers"][name])
            model.load_state_dict(state)
        for kind in ("optimizers", "schedulers", "scalers"):  # schedulers may look at optimizers
            for name, value in objects.kinds[kind].items():
                state = job[kind][name]["state"]
                if state or kind != "scalers":  # a scaler that was switched off has none
                    value.load_state_dict(state)
        for name, optimizer in objects.distributed.items():
            if name in job["aggregation"]:
                self._resume(name, optimizer)
        for name, state in objects.hooks.items():
            saved = job["hooks"][name]
            state.restore(self._owed_by_hook(name), saved["step"], saved["skipped_steps"])
            state.density = saved["density"]
        if self._rank < self._P_before:
            set_random_states(mine["random"])

    def _resume(self, name: str, optimizer: DistributedOptimizer) -> None:
        reducer, saved = optimizer.reducer, self.job["aggregation"][name]
        for kind in residuals.KINDS:
            if self.unchanged:
                residuals.give_back(reducer, kind, self._shards[self._rank][kind][name])
            else:
                pieces = {old: shard[kind][name] for old, shard in self._shards.items()}
                scale = self._P / self._P_before
                residuals.take_over(reducer, kind, pieces, self._inherited[name], scale)
        reducer.history = saved["history"]
        for bucket, aggregator in reducer.owing:
            if aggregator.draws is not None:
                drawn = [saved["draws"].get(member.name, 0) for member in bucket.members]
                aggregator.draws.drawn = max(drawn)
        optimizer.skipped_steps = saved["skipped_steps"]
        if saved["epoch"] is not None:
            optimizer.set_epoch(saved["epoch"])

    def notes(self) -> list[str]:
        """What is not as it was."""
        P, P_before, notes = self._P, self._P_before, []
        if P != P_before:
            notes.append(
                f"{P_before} ranks wrote it, {P} go on: what old rank i owed is owed by the i mod "
                f"n-th of the n ranks that now own it, times {P}/{P_before}, so that the average "
                "still owed is the same; buffers are those of old rank i mod "
                f"{P_before}, random states those of old rank i where there was one"
            )
        elif not self.unchanged:
            notes.append(
                "other pieces of the residuals belong to each rank than before: what is owed was "
                "handed over, and the run does not go on to the bit"
            )
        for name in self._objects.optimizers:
            saved, optimizer = (
                self.job["aggregation"].get(name),
                self._objects.distributed.get(name),
            )
            if saved and optimizer is None:
                notes.append(f"optimizer {name!r} is not distributed; what was owed is dropped")
            if not saved or optimizer is None:
                continue
            now = {**optimizer.compressor.settings, "density": optimizer.density}
            before = {**saved["settings"], "density": saved["density"]}
            changes = [f"{k} {now[k]}, was {before.get(k)}" for k in now if now[k] != before.get(k)]
            if changes:
                notes.append(f"optimizer {name!r} has {'; '.join(changes)}")
            mine = self._shards[self._rank % P_before]
            moving = residuals.pieces_of(optimizer.reducer, "velocity")
            if bool(moving) != bool(mine["velocity"][name]):
                had = "starts without the" if moving else "drops the"
                notes.append(f"optimizer {name!r} {had} velocity of momentum correction")
            owning = [
                any(end > begin for begin, end in b) for b in zip(*self._ranges[name], strict=True)
            ]
            owed = mine["residual"][name]
            dropped = [
                member.name
                for (bucket, _), owns in zip(optimizer.reducer.owing, owning, strict=True)
                for member in bucket.members
                if not owns and member.name in owed
            ]
            if dropped:
                notes.append(
                    f"{len(dropped)} parameters of optimizer {name!r} are now sent whole, such as "
                    f"{dropped[0]!r}; what was owed of them is dropped"
                )
        return notes

    def _shard(self, old_rank: int) -> dict[str, Any]:
        if old_rank not in self._shards:
            self._shards[old_rank] = files.read(self._folder, shard(old_rank), self._manifest)
        return self._shards[old_rank]


def _check_tensors(what: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse the state of another model."""
    for name in [*now, *saved]:
        got, expected = (
            "nothing" if name not in state else _describe(state[name]) for state in (saved, now)
        )
        if got != expected:
            raise DDLError(f"{what} has {got} for {name!r}, expected {expected}; {SAME_OBJECTS}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _list(named: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, named)) or "none"
