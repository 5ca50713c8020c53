"""The same aggregation for torch's DistributedDataParallel (DDP), as its communication hook.

    model = DistributedDataParallel(model)
    state = ddl.SparseHookState(model, "gtopk", density=0.001)
    model.register_comm_hook(state, ddl.sparse_hook)

DDP keeps its own hooks on parameters and its own buckets. It calls `sparse_hook` for one complete
bucket after the other, in an order that is the same on every rank.

1. *Launch.* The bucket goes to the worker thread, and the hook returns a future. Only the very
   first bucket waits: the ranks settle first that they were given the same model and settings.
2. *Cut.* DDP makes its buckets anew after the first step. What is owed is known by the name of the
   parameter: a new bucket takes over what older ones owe for its parameters.
3. *Begin.* Select, collect, repay, as `ddl.aggregation.aggregator` says.
4. *End.* With the last bucket of a step it is known whether all gradients of all ranks were finite.
   If so they become averages; if not, all of them become NaN, on every rank, for a GradScaler or
   the script to skip the step, and what was finite is owed (of parameters that are aggregated
   whole: dropped). Only then the futures of the step are complete; DDP waits for all of them
   anyway.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddl.aggregation.aggregator import Aggregator, Outcome
from ddl.comm import Communicator
from ddl.comm.base import LARGEST_LABEL
from ddl.comm.nccl import WorkerStreams
from ddl.compressors import Compressor, make_compressor
from ddl.ddp.buckets import Cut, Launch, Place, UnmovedBucket, in_short, places_of
from ddl.density import check_density
from ddl.errors import DDLError
from ddl.reduction.agreement import Agreement, ReducerConfig, stable_hash
from ddl.reduction.buckets import NamedParameter
from ddl.reduction.worker import Worker
from ddl.settings import Settings
from ddl.world import init

logger = logging.getLogger(__name__)

FORMAT = 1  # of a pickled state

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def sparse_hook(state: SparseHookState, bucket):
    """Aggregate a bucket in the background: `model.register_comm_hook(state, ddl.sparse_hook)`.

    Args:
        state: this model's.
        bucket: torch.distributed.GradBucket, given by DDP. Once the future is complete its buffer
            holds the average over ranks, or NaN if a gradient of any rank was not finite.

    Returns:
        torch.futures.Future of the bucket's buffer. Where it fails, `backward()` raises a
        RuntimeError with the message of `state.failure`, which has step, bucket and rank.

    Raises:
        DisagreementError: with the first bucket: ranks were given different models or settings.
        ValueError: the bucket has a parameter that `state` does not know or that cannot be handled.
        GradientError: a sparse gradient.
        DDLError: an earlier step has failed, or a backward pass ended halfway.
    """
    # Without annotations, since DDP compares them with the types and refuses their names.
    return state.launch(bucket)


@dataclass(frozen=True)
class _Choices:
    """What the user has chosen for good; the density can change."""

    compressor: str
    collective: str | None
    wire: str | None
    winners_per_pick: float | None
    dense_below: int
    seed: int


class SparseHookState:
    """What `sparse_hook` keeps for one model: settings, and what this rank owes by parameter name.

    It can be pickled between two steps, one file a rank, for each rank owes something else; after
    unpickling call `attach`. A run that goes on from it is bit-identical where DDP makes the same
    buckets as before, for all compressors but randomk, which draws other entries. DDP starts with
    buckets that it replaces after the first step, and the largest entries are those of a bucket.

    With `torch.amp.GradScaler` residuals are in scaled units: a change of scale distorts them once.

    A rank sends nothing for a parameter whose gradient is zero as a whole on it, such as one that a
    forward pass did not use; what it owes for it waits. So nothing is lost where DDP
    (find_unused_parameters=True) ignores the averages of parameters that no rank has used.

    Attributes:
        step: aggregations so far, one for each backward pass outside of `no_sync()`.
        skipped_steps: those whose gradients are NaN because one of any rank was not finite.
        failure: why the last step failed; None if it did not.
        outcomes: what the last step did, bucket by bucket; parameters below `dense_below` apart.
    """

    def __init__(
        self,
        model_or_named_parameters: nn.Module | NamedParameters,
        compressor: str = "gtopk",
        density: float = 0.001,
        *,
        collective: str | None = None,
        wire: str | None = None,
        global_density: float | None = None,
        dense_below: int = 0,
        seed: int = 0,
        comm: Communicator | None = None,
    ) -> None:
        """Owe nothing yet. Not collective: ranks meet at the first bucket.

        Args:
            model_or_named_parameters: the model, within DDP or not, or its `named_parameters()`.
            compressor: one of `ddl.COMPRESSORS`.
            density: fraction of the entries of each bucket to keep, in (0, 1].
            collective: see `ddl.DistributedOptimizer`.
            wire: see there; default "plain" for compressors that have a choice.
            global_density: see there.
            dense_below: parameters with fewer elements (biases, norms) are aggregated whole.
            seed: of random-k's draws; the same on every rank.
            comm: the ranks of DDP's process group; default those of `ddl.init()`, which is called
                if the program has not.

        Raises:
            ValueError: an argument out of range.
        """
        check_density(density)
        if global_density is not None:
            check_density(global_density, "global_density")
        if isinstance(dense_below, bool) or not isinstance(dense_below, int) or dense_below < 0:
            raise ValueError(
                f"dense_below must be a number of elements, 0 or more, got {dense_below!r}"
            )
        ratio = None if global_density is None else global_density / density
        self._configure(_Choices(compressor, collective, wire, ratio, dense_below, seed), density)
        self.attach(model_or_named_parameters, comm)

    def _configure(self, choices: _Choices, density: float) -> None:
        self._choices = choices
        self._compressor: Compressor = make_compressor(
            choices.compressor, choices.collective, choices.wire, choices.winners_per_pick
        )
        self._density = density
        self.step = 0
        self.skipped_steps = 0
        self.failure: DDLError | None = None
        self.outcomes: tuple[Outcome, ...] = ()
        self._owed: dict[str, Tensor] = {}  # by parameters that no cut has taken over yet
        self._cuts: dict[tuple[Place, ...], Cut] = {}
        self._members: list[NamedParameter] = []
        self._names: dict[int, str] = {}  # by id of the parameter, which `_members` keeps alive
        self._ranks: int | None = None
        self._given_comm: Communicator | None = None
        self._room: _Room | None = None
        self._spoilt = False  # what was picked in a step that failed is owed nowhere
        self._next = 0  # index of the bucket that is due
        self._launches = 0
        self._begun: list[Launch] = []  # of the step under way; the worker thread's

    def attach(
        self,
        model_or_named_parameters: nn.Module | NamedParameters,
        comm: Communicator | None = None,
    ) -> None:
        """Say whose parameters these are; needed after unpickling. Before the first bucket.

        Args:
            model_or_named_parameters: as for the constructor.
            comm: as for the constructor.

        Raises:
            ValueError: not a model or its parameters; a residual that fits no parameter.
            DDLError: the first bucket has come.
        """
        if self._room is not None:
            raise DDLError(
                "the state serves a model already, expected a new or unpickled one; make a state "
                "for each model"
            )
        model = model_or_named_parameters
        self._ranks = None
        if isinstance(model, DistributedDataParallel):
            self._ranks = model.process_group.size()
            model = model.module
        pairs = model.named_parameters() if isinstance(model, nn.Module) else model
        try:
            members = [NamedParameter(str(name), parameter) for name, parameter in pairs]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                "expected a model or pairs of name and parameter, got something else; pass the "
                "model, or model.named_parameters()"
            ) from error
        shapes = {member.name: member.parameter.shape for member in members}
        for name, owed in self._owed.items():
            if shapes.get(name) != owed.shape:
                raise ValueError(
                    f"the state owes for a parameter {name!r} of shape {tuple(owed.shape)}, the "
                    f"model has {'none' if name not in shapes else tuple(shapes[name])}; attach "
                    "the model that the state was saved for"
                )
        self._members = members
        self._names = {id(member.parameter): member.name for member in members}
        self._given_comm = comm

    @property
    def density(self) -> float:
        """Fraction of the entries of each bucket to keep; set it between steps, on every rank."""
        return self._density

    @density.setter
    def density(self, density: float) -> None:
        self._density = check_density(density)

    def residuals(self) -> dict[str, Tensor]:
        """What this rank owes, float32 on the CPU by parameter name; copies. Between two steps.

        Raises:
            DDLError: within a step, or after one that failed.
        """
        if self._next or self._spoilt:
            raise DDLError(
                "a backward pass is under way or has failed, expected to be asked between two "
                "steps; load an earlier checkpoint"
            )
        owed = dict(self._owed)
        for cut in self._cuts.values():
            owed.update(cut.owed())
        return {name: residual.cpu() for name, residual in owed.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Settings, counts and residuals, as numbers, texts and tensors."""
        return {
            "format": FORMAT,
            "choices": asdict(self._choices),
            "density": self._density,
            "step": self.step,
            "skipped_steps": self.skipped_steps,
            "residuals": self.residuals(),
        }

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        """Restore all but the model and the ranks; see `attach`."""
        if saved.get("format") != FORMAT:
            raise ValueError(
                f"the pickled SparseHookState has format {saved.get('format')}, expected {FORMAT}; "
                "load it with the version of ddl that saved it"
            )
        self._configure(_Choices(**saved["choices"]), saved["density"])
        self.step, self.skipped_steps = saved["step"], saved["skipped_steps"]
        self._owed = dict(saved["residuals"])

    def close(self) -> None:
        """End the background thread and free the communicators. Collective."""
        if self._room is not None:
            self._room.worker.close()
            self._room.agreement.close()
            self.failure = DDLError("the state of sparse_hook is closed; make another DDP model")

    # 1. Launch.

    def launch(self, bucket: Any) -> Any:
        """See `sparse_hook`."""
        index, last = bucket.index(), bucket.is_last()
        if self.failure is not None and index == 0:
            raise self.failure
        if index != self._next and self.failure is None:
            raise DDLError(
                f"bucket {index} came in step {self.step}, expected bucket {self._next}: an "
                "earlier backward pass ended halfway; start again from a checkpoint"
            )
        room = self._meet()
        flat = bucket.buffer()
        places = places_of(bucket, self._names)
        where = (
            f"step {self.step}, bucket {index} ({in_short(places)}), density {self._density:g}, "
            f"rank {room.comm.rank} of {room.comm.size}"
        )
        launch = Launch(flat, last, self._label(places))
        stream, density = room.streams[flat.device], self._density
        marks = stream.mark_caller({})

        def task() -> None:
            room.comm.label = launch.label
            try:
                with stream.current():
                    stream.follow(marks.values())
                    launch.cut = self._cut(room, index, places, flat)
                    launch.outcomes = launch.cut.begin(flat, density)
                    self._begun.append(launch)
                    stream.synchronize()
                if last:
                    self._end(room)
            except DDLError as error:
                raise type(error)(f"{where}: {error}") from error
            except Exception as error:
                raise DDLError(f"{where}: {type(error).__name__}: {error}") from error

        self._next = 0 if last else index + 1
        self._launches += 1
        room.worker.submit(task).add_done_callback(lambda done: self._settle(launch, done))
        return launch.result

    def _meet(self) -> _Room:
        """The other ranks, with whom the settings are agreed the first time. Collective."""
        if self._room is not None:
            return self._room
        if not self._members:
            raise DDLError(
                "the state of sparse_hook has no model, expected state.attach(model) after "
                "unpickling it"
            )
        comm = self._given_comm or init()
        if self._ranks not in (None, comm.size):
            raise ValueError(
                f"DDP's process group has {self._ranks} ranks, ddl {comm.size}; pass "
                "SparseHookState a comm= of the same ranks, made by ddl.communicator().split()"
            )
        settings = Settings.from_environment()
        choices = self._choices
        config = ReducerConfig(
            bucket_bytes=0,  # DDP's, which sees to it that ranks have the same buckets
            dense_below=choices.dense_below,
            backward_passes_per_step=1,
            unused_parameters="zero",
            density_warmup=(),
            seed=choices.seed,
            # In two levels a rank owes for a part of a bucket, and for another after a new cut.
            hierarchical=False,
            links=settings.links,
        )
        own, control = comm.duplicate(), comm.duplicate()
        agreement = Agreement(own, control, self._compressor, config)
        try:
            trainable = [m for m in self._members if m.parameter.requires_grad]
            agreement.reach(trainable, self._density)
        except DDLError as error:
            self.failure = error
            raise
        worker = Worker(f"ddl-hook-{comm.rank}", agreement.cancel)
        self._room = _Room(own, agreement, worker, WorkerStreams(own))
        return self._room

    def _label(self, places: Sequence[Place]) -> int:
        """What ranks must have in common, so that one that is out of step is found out."""
        salt = zlib.crc32(repr((self._density, [place.name for place in places])).encode())
        return (self._launches + salt) % (LARGEST_LABEL + 1)

    # 2. Cut.

    def _cut(self, room: _Room, index: int, places: tuple[Place, ...], flat: Tensor) -> Cut:
        """The aggregators of a bucket, which owe what is owed for its parameters."""
        found = self._cuts.get(places)
        if found is None:
            names = {place.name for place in places}
            for other in list(self._cuts):
                if any(place.name in names for place in other):
                    self._owed.update(self._cuts.pop(other).owed())
            # Another number for each cut, for random-k to draw anew, and the same on all ranks.
            number = stable_hash(self.step, index)

            def make(like: Tensor, dense: bool) -> Aggregator:
                return room.agreement.make_aggregator(UnmovedBucket(number, like, dense))

            dense_below = (
                flat.numel() + 1 if self._compressor.is_dense else self._choices.dense_below
            )
            found = self._cuts[places] = Cut(places, flat, dense_below, make)
            found.take_over(self._owed)
        return found

    # 4. End.

    def _end(self, room: _Room) -> None:
        """The gradients of the step become averages, or NaN."""
        finite = all(outcome.finite for launch in self._begun for outcome in launch.outcomes)
        for launch in self._begun:
            stream = room.streams[launch.flat.device]
            with stream.current():
                launch.end(finite)
                stream.synchronize()  # what comes next runs on DDP's streams
        if not finite:
            self.skipped_steps += 1
            logger.log(
                logging.WARNING if room.comm.rank == 0 else logging.DEBUG,
                "step %d: a gradient was not finite; all gradients are NaN on every rank, for the "
                "step to be skipped (%d so far)",
                self.step,
                self.skipped_steps,
            )
        self.outcomes = tuple(o for launch in self._begun for o in launch.outcomes)
        self.step += 1

    def _settle(self, launch: Launch, done: Future[None]) -> None:
        """Complete the futures of the step, once it has ended or failed."""
        failure = done.exception()
        if failure is None and not launch.last:
            return
        if isinstance(failure, DDLError):
            self.failure, self._spoilt = failure, True
        begun, self._begun = self._begun, []
        for each in begun if launch in begun else [*begun, launch]:
            each.complete(failure)


class _Room(NamedTuple):
    """What the worker thread works with."""

    comm: Communicator
    agreement: Agreement
    worker: Worker
    streams: WorkerStreams
