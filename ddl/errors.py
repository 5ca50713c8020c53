"""What can go wrong, as exceptions of one family. Bad arguments raise ValueError instead."""

from __future__ import annotations


class DDLError(RuntimeError):
    """Base of every error that ddl raises for reasons other than a bad argument."""


class CommunicationError(DDLError):
    """A message could not be sent or received, or a peer is gone."""


class DeadlineError(CommunicationError):
    """A wait outlasted its deadline: a peer is stalled, dead, or running another program."""


class DisagreementError(DDLError):
    """Ranks were given different models or settings."""


class NoCheckpointError(DDLError, FileNotFoundError):
    """There is no checkpoint where one is to be loaded from: a run that may be the first."""


class GradientError(DDLError):
    """A parameter received no gradient, or more gradients than the optimizer was told to expect."""
