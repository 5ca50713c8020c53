"""Diagnostics: what sparsification does to each layer of a model while it trains.

`Diagnostics(optimizer, every=50, directory=...)` watches, `plot(directory)` draws.
"""

from ddl.diagnostics.plots import plot
from ddl.diagnostics.watch import Diagnostics

__all__ = ["Diagnostics", "plot"]
