"""Every error CRAFT raises, in one tree.

CraftError
├── ConfigError          what the user asked for cannot be done; exit code 2
│   ├── Refused          not by this script's fault, but by how it was started, or by what it found
│   │   ├── UnsafeScript the script's loop would give a wrong result, unseen
│   │   └── NewcomerDiffers  a worker that joined has another state than the others: it alone ends
│   ├── CallsDiffer      workers do not make the same calls between the steps
│   └── ScriptLeft       the script ended in the middle of its training loop
├── Unreachable          a lighthouse or an agent does not answer
├── Unauthorized         the bearer token is missing or wrong
├── MalformedMessage     bytes from a network that are not a message of ours
├── GroupError           the group of a generation cannot be used any more
│   ├── GroupAborted     this worker aborted it, because a newer generation is there
│   ├── GroupBroken      a peer's connection ended
│   └── GroupTimeout     nothing came within the limit
├── SnapshotError        a copy of the training state cannot be had
│   ├── SnapshotMissing  its donor does not have it, or does not have it any more
│   ├── SnapshotCorrupt  a checksum or the authentication failed
│   └── SnapshotAborted  this worker gave up the transfer itself
├── Fenced               the job goes on without this worker; it must end
├── LeftBehind           what this worker needs to catch up with the others is gone; it must end
├── StateLost            nobody who is left has the training state
├── BitsDiffer           two workers computed different bits where they must be equal
├── InjectedError        what a fault raises that somebody wanted to see
└── ProtocolViolation    a promise of the protocol does not hold: a bug in CRAFT
"""

from __future__ import annotations


class CraftError(Exception):
    """The root of the tree."""


class ConfigError(CraftError):
    """The user's settings, script or data cannot be used as they are."""


class Refused(ConfigError):
    """The script is fine; what it was started with, or what it finds there, is not."""


class UnsafeScript(Refused):
    """The script's loop would give a wrong result without a sign of it. The message has what to change."""


class NewcomerDiffers(Refused):
    """This worker has just joined and has another state than the others. It ends, and they train on."""


class CallsDiffer(ConfigError):
    """Some workers wait in a call between the steps that others never make. Every member finds so at the same time."""


class ScriptLeft(ConfigError):
    """The script ended in the middle of its training loop, though without an error: what it did is not what was asked."""


class Unreachable(CraftError):
    """``address`` does not answer."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class Unauthorized(CraftError):
    """The other side does not accept our token."""


class MalformedMessage(CraftError):
    """What arrived is not a message; ``field`` says where it stops being one."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class GroupError(CraftError):
    """The group of ``generation`` is of no use any more."""

    def __init__(self, message: str, generation: int = -1) -> None:
        super().__init__(message)
        self.generation = generation


class GroupAborted(GroupError):
    """This worker itself ended the group."""


class GroupBroken(GroupError):
    """A connection of the group ended from the other side; ``peer`` is its rank, -1 if unknown."""

    def __init__(self, message: str, generation: int = -1, peer: int = -1) -> None:
        super().__init__(message, generation)
        self.peer = peer


class GroupTimeout(GroupError):
    """The group did not open, or an exchange did not end, within its limit; ``missed``: because of these workers, if known."""

    def __init__(self, message: str, generation: int = -1, missed: tuple[str, ...] = ()) -> None:
        super().__init__(message, generation)
        self.missed = missed


class SnapshotError(CraftError):
    """A copy of the training state, or something kept beside it, cannot be had from ``address``."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class SnapshotMissing(SnapshotError):
    """The donor does not have it, or does not have it any more."""


class SnapshotCorrupt(SnapshotError):
    """What arrived is not what an owner of the job's key sent."""


class SnapshotAborted(SnapshotError):
    """This worker itself ended the transfer: it is of no use any more."""


class Fenced(CraftError):
    """The job goes on without this worker."""


class LeftBehind(CraftError):
    """The others went back to a checkpoint while this worker joined, or those who knew what it needs to catch up are lost."""


class StateLost(CraftError):
    """All workers that held the training state are gone."""


class BitsDiffer(CraftError):
    """Workers that must hold the same bits do not."""


class InjectedError(CraftError):
    """A fault that a test, or ``craft chaos``, wanted."""


class ProtocolViolation(CraftError):
    """A promise of the protocol is broken; carry on and the history would split."""
