"""Checkpoints: all that a killed run needs to go on as if nothing had happened.

1. *Save.* Each rank writes what it alone has: what it owes, its buffers (batch norm's statistics
   differ by rank) and its random states. Rank 0 adds what all have in common: parameters, states of
   optimizers, schedulers and scalers, and where training stands. `files.py` brings them to the
   disk, all or nothing.
2. *Load.* Every rank reads and checks what it needs. Only when all have found everything in order
   the objects are changed, so a checkpoint that is refused leaves no trace.

On as many ranks as before the run goes on to the bit. On another number what is owed is handed over
as `residuals.py` says, and rank j gets the buffers of old rank j mod P and, if there was a rank j,
its random states.
"""

from ddl.checkpoint.ranks import Restored, load_checkpoint, save_checkpoint

__all__ = ["Restored", "load_checkpoint", "save_checkpoint"]
