"""What a checkpoint is made of: what all ranks have in common, and what each has to itself."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddl.checkpoint import residuals
from ddl.checkpoint.files import plain
from ddl.ddp.hook import SparseHookState
from ddl.optimizer import DistributedOptimizer


@dataclass(frozen=True)
class Objects:
    """What is saved and restored, by name."""

    models: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    schedulers: Mapping[str, Any]
    scalers: Mapping[str, Any]
    hooks: Mapping[str, SparseHookState]

    @classmethod
    def of(cls, model: Any, optimizer: Any, scheduler: Any, scaler: Any, hook: Any) -> Objects:
        """One object of a kind goes by the kind's name."""
        hooks = {} if hook is None else hook if isinstance(hook, Mapping) else {"hook": hook}
        for name, state in hooks.items():
            if not isinstance(state, SparseHookState):
                raise ValueError(
                    f"hook {name!r} is a {type(state).__name__}, expected a ddl.SparseHookState, "
                    "or several by name"
                )
        kinds = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        named = []
        for kind, given in kinds.items():
            of_kind = (
                {} if given is None else given if isinstance(given, Mapping) else {kind: given}
            )
            for name, value in of_kind.items():
                if not hasattr(value, "state_dict"):
                    raise ValueError(
                        f"{kind} {name!r} is a {type(value).__name__}, expected an object with a "
                        "state_dict(), or several by name"
                    )
            named.append({str(name): value for name, value in of_kind.items()})
        models, optimizers, schedulers, scalers = named
        return cls(models, optimizers, schedulers, scalers, hooks)

    @property
    def distributed(self) -> dict[str, DistributedOptimizer]:
        """The optimizers that owe something."""
        return {n: o for n, o in self.optimizers.items() if isinstance(o, DistributedOptimizer)}

    @property
    def kinds(self) -> dict[str, Mapping[str, Any]]:
        """By the names that files use."""
        return {
            "models": self.models,
            "optimizers": self.optimizers,
            "schedulers": self.schedulers,
            "scalers": self.scalers,
        }


def common(objects: Objects, extra: Any) -> dict[str, Any]:
    """What all ranks have in common."""
    job: dict[str, Any] = {"extra": plain(extra, "extra")}
    for kind, named in objects.kinds.items():
        job[kind] = {
            name: {
                "class": class_of(value),
                "state": plain(value.state_dict(), f"{kind}[{name!r}]"),
            }
            for name, value in named.items()
        }
    job["aggregation"] = {
        name: {
            "settings": dict(optimizer.compressor.settings),
            "density": optimizer.density,
            "epoch": optimizer.epoch,
            "skipped_steps": optimizer.skipped_steps,
            "history": list(optimizer.reducer.history),
            "draws": {
                member.name: aggregator.draws.drawn
                for bucket, aggregator in optimizer.reducer.owing
                if aggregator.draws is not None
                for member in bucket.members
            },
            "parameters": shapes_of(optimizer),
        }
        for name, optimizer in objects.distributed.items()
    }
    job["hooks"] = {
        name: {
            "settings": dict(state.compressor.settings),
            "density": state.density,
            "step": state.step,
            "skipped_steps": state.skipped_steps,
        }
        for name, state in objects.hooks.items()
    }
    return job


def own(objects: Objects, rank: int) -> dict[str, Any]:
    """What this rank alone has."""
    return {
        "rank": rank,
        **{
            kind: {
                name: plain(residuals.pieces_of(optimizer.reducer, kind), kind)
                for name, optimizer in objects.distributed.items()
            }
            for kind in residuals.KINDS
        },
        "hooks": {name: state.residuals() for name, state in objects.hooks.items()},
        "buffers": {
            name: plain(_buffers(m), f"models[{name!r}]") for name, m in objects.models.items()
        },
        "random": random_states(),
    }


def class_of(value: Any) -> str:
    """By which an object of another kind is told."""
    return value.kind if isinstance(value, DistributedOptimizer) else type(value).__name__


def shapes_of(optimizer: DistributedOptimizer) -> dict[str, list[int]]:
    """Of the parameters that are aggregated."""
    return {
        member.name: list(member.parameter.shape)
        for bucket, _ in optimizer.reducer.owing
        for member in bucket.members
    }


def _buffers(model: Any) -> dict[str, Any]:
    """What a model's state holds besides parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def random_states() -> dict[str, Any]:
    """Of all generators that a training script is likely to use."""
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda else None,  # of this rank's device
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Go on from `random_states`."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
