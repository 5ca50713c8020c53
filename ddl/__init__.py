"""ddl: data-parallel synchronous SGD with exact gradient sparsification, for slow networks."""

from ddl import diagnostics
from ddl.checkpoint import load_checkpoint, save_checkpoint
from ddl.compressors import COMPRESSORS
from ddl.ddp.hook import SparseHookState, sparse_hook
from ddl.density import DensityWarmup
from ddl.errors import (
    CommunicationError,
    DDLError,
    DeadlineError,
    DisagreementError,
    GradientError,
    NoCheckpointError,
)
from ddl.optimizer import DistributedOptimizer
from ddl.state import (
    allreduce_mean,
    barrier,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    gather_object,
    parameters_digest,
)
from ddl.world import communicator, init, local_rank, local_size, rank, shutdown, size

__version__ = "0.1.0"

__all__ = [
    "COMPRESSORS",
    "CommunicationError",
    "DDLError",
    "DeadlineError",
    "DensityWarmup",
    "DisagreementError",
    "DistributedOptimizer",
    "GradientError",
    "NoCheckpointError",
    "SparseHookState",
    "allreduce_mean",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "communicator",
    "diagnostics",
    "gather_object",
    "init",
    "load_checkpoint",
    "local_rank",
    "local_size",
    "parameters_digest",
    "rank",
    "save_checkpoint",
    "shutdown",
    "size",
    "sparse_hook",
]
