"""What the ranks of one optimizer settle before they aggregate.

1. *Settings.* All ranks were given the same model and settings.
2. *Ways.* How gradients travel: from device to device, if every rank can; else through the host, in
   two levels where nodes hold several ranks and it pays, else in one. Links are measured only where
   something depends on them: the two levels, or a collective that is to be chosen.

From then on it makes the aggregator of each bucket.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from ddl.aggregation.aggregator import PLAIN_FEEDBACK, Aggregator, DenseAggregator
from ddl.aggregation.device_aggregator import DevicePath, device_path
from ddl.aggregation.feedback import Feedback
from ddl.aggregation.hierarchy import make_aggregator
from ddl.collectives import messages
from ddl.comm import Communicator
from ddl.compressors import Compressor
from ddl.errors import DisagreementError
from ddl.links import Links, measure_links
from ddl.metrics.timeline import TimelineConfig
from ddl.nodes import Teams, find_nodes, two_levels
from ddl.reduction.buckets import Bucket, NamedParameter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReducerConfig:
    """Settings that every rank must share."""

    bucket_bytes: int
    """Gradient bytes a bucket: large saves latency, small overlaps more."""
    dense_below: int
    """Parameters with fewer elements stay dense: costs bytes, spares them the delay."""
    backward_passes_per_step: int
    """Backward passes whose gradients add up before they are aggregated."""
    unused_parameters: str
    """"error", or "zero": what a parameter without gradient means."""
    density_warmup: tuple[float, ...]
    """Densities of the first epochs; only compared here."""
    seed: int
    """Of random choices that ranks must make alike."""
    hierarchical: bool | None = None
    """Whether to aggregate in two levels; None: where it pays."""
    timeline: TimelineConfig | None = None
    """What is recorded, by all ranks or none."""
    plan_buckets: bool = False
    """Whether buckets are planned anew from the first steps; see `planning`."""
    links: str | None = None
    """What messages cost, see `Links.parse`; None: to be measured, where it matters."""
    feedback: Feedback = PLAIN_FEEDBACK
    """What becomes of gradients that are not applied at once."""
    optimizer: Mapping[str, object] = field(default_factory=dict)
    """What the wrapped optimizer and the scaler do; only compared here."""
    local_clip_norm: float | None = None
    """See `clip_`; costs the overlap: the norm is known only with the last gradient."""

    @property
    def settings(self) -> dict[str, object]:
        """All of them, by the names of the user's arguments."""
        settings = {each.name: getattr(self, each.name) for each in fields(self)}
        feedback: Feedback = settings.pop("feedback")
        optimizer: Mapping[str, object] = settings.pop("optimizer")
        return {
            **settings,
            **optimizer,
            "momentum_correction": feedback.momentum,
            "error_feedback": feedback.errors,
        }


class Agreement:
    """How the gradients of one optimizer travel from one rank."""

    def __init__(
        self,
        comm: Communicator,
        control: Communicator,
        compressor: Compressor,
        config: ReducerConfig,
    ) -> None:
        """Nothing settled yet.

        Args:
            comm: the ranks; for the worker thread, once buckets are launched.
            control: the same ranks, for the caller's thread.
            compressor: how buckets are aggregated.
            config: see there.

        Raises:
            ValueError: the links of the config are not understood.
        """
        self._comm = comm
        self._control = control
        self._compressor = compressor
        self._config = config
        self._given = None if config.links is None else _given_links(config.links)
        self._settled = False
        self._path: DevicePath | None = None
        self._teams: Teams | None = None

    def reach(self, members: Sequence[NamedParameter], density: float) -> None:
        """Settle how the gradients of these parameters travel. Collective.

        Args:
            members: in the order of the forward pass.
            density: fraction of entries to keep.

        Raises:
            DisagreementError: ranks differ in their parameters or settings.
            ValueError: two levels are wanted, and which ranks share a node is not known.
            CommunicationError: not every rank takes part.
        """
        devices = [member.parameter.device for member in members]
        plain = self._config.feedback.is_plain
        path = device_path(self._comm, self._compressor, devices, plain_feedback=plain)
        layout = [(m.name, tuple(m.parameter.shape), str(m.parameter.dtype)) for m in members]
        mine = {
            **self._compressor.settings,
            "density": density,
            **self._config.settings,
            "number of parameters": len(layout),
            "names and shapes of parameters": hashlib.sha256(repr(layout).encode()).hexdigest()[:8],
        }
        told = messages.gather_objects(self._control, (mine, path is not None))
        expected, _ = told[0]
        for rank, (theirs, _) in enumerate(told):
            for what, value in expected.items():
                if theirs.get(what) != value:
                    raise DisagreementError(
                        f"{what}: rank {rank} has {theirs.get(what)}, expected {value} as on rank "
                        "0; give every rank the same model and settings"
                    )
        self._path = path if all(able for _, able in told) else None
        if self._path is not None:
            self._path.connect()
        if not self._settled:  # the first time; later the worker thread may be using `comm`
            self._settled = True
            self._settle_levels()

    def _settle_levels(self) -> None:
        chooser, wanted = self._compressor.chooser, self._config.hierarchical
        if self._path is not None and wanted:
            logger.warning("hierarchical=True has no effect: gradients go from device to device")
        if self._path is not None or self._compressor.is_dense or self._comm.size == 1:
            return
        if self._config.feedback.momentum:  # a node's ranks have but one velocity to share
            wanted = False
        if wanted is False and chooser is None:
            return
        nodes = find_nodes(self._control)

        @functools.cache
        def links() -> Links:
            return self._given or measure_links(self._control, nodes, self._compressor.wire)

        if two_levels(wanted, nodes, links):
            self._teams = Teams(self._comm, nodes or ())
        if chooser is not None:
            chooser.links = links()
        logger.log(
            logging.INFO if self._comm.rank == 0 else logging.DEBUG,
            "aggregating in %s: %d ranks on %s nodes%s",
            "one level" if self._teams is None else f"two levels, {self._teams.shards} shards",
            self._comm.size,
            "unknown" if nodes is None else len(set(nodes)),
            f"; {links()}" if links.cache_info().currsize else "",
        )

    def make_aggregator(self, bucket: Bucket) -> Aggregator:
        """The aggregator of a bucket of the parameters that were settled last."""
        whole = self._compressor.is_dense or bucket.dense
        numel, device = bucket.flat.numel(), bucket.flat.device
        seed = stable_hash(self._config.seed, bucket.index)
        feedback = self._config.feedback
        if self._path is not None:
            return self._path.aggregator(numel, seed, whole=whole)
        if whole:
            return DenseAggregator(self._comm, numel, feedback.momentum)
        return make_aggregator(
            self._comm, self._teams, numel, device, self._compressor, seed, feedback
        )

    def waiting(self) -> str:
        """For whom the worker thread waits, for messages."""
        teams = () if self._teams is None else (self._teams.within, self._teams.across)
        said = (comm.waiting() for comm in (self._comm, *teams))
        return next((text for text in said if text is not None), "for other ranks")

    def cancel(self) -> None:
        """End a wait of the worker thread; see `Communicator.cancel`."""
        self._comm.cancel()
        if self._teams is not None:
            self._teams.cancel()

    def close(self) -> None:
        """Free the communicators. Collective."""
        if self._teams is not None:
            self._teams.close()
        self._comm.close()
        self._control.close()


def _given_links(text: str) -> Links:
    try:
        return Links.parse(text)
    except ValueError as error:
        raise ValueError(f"DDL_LINKS: {error}") from error


def stable_hash(*numbers: int) -> int:
    """A 64-bit number that depends on all of `numbers`, the same in every process."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
