"""Every error CRAFT raises, in one tree.

CraftError
├── ConfigError          what the user asked for cannot be done; exit code 2
│   ├── Refused          the script is fine; how it was started, or what it found, is not
│   │   ├── UnsafeScript the script's loop would silently give a wrong result
│   │   └── NewcomerDiffers  a worker that joined has a different state: it alone ends
│   ├── CallsDiffer      workers do not make the same calls between the steps
│   └── ScriptLeft       the script ended in the middle of its training loop
├── Unreachable          a lighthouse or an agent does not answer
├── Unauthorized         the bearer token is missing or wrong
├── MalformedMessage     bytes from a network that are not a valid message
├── GroupError           the group of a generation is unusable
│   ├── GroupAborted     this worker aborted it, because of a newer generation
│   ├── GroupBroken      a peer's connection ended
│   └── GroupTimeout     nothing came within the limit
├── SnapshotError        a copy of the training state cannot be fetched
│   ├── SnapshotMissing  its donor does not have it (any more)
│   ├── SnapshotCorrupt  a checksum or the authentication failed
│   └── SnapshotAborted  this worker aborted the transfer itself
├── Fenced               the job goes on without this worker; it must end
├── LeftBehind           this worker can no longer catch up with the others; it must end
├── StateLost            no remaining worker has the training state
├── BitsDiffer           two workers computed different bits where they must be equal
├── InjectedError        the exception of an injected fault
└── ProtocolViolation    a guarantee of the protocol does not hold: a bug in CRAFT
"""

from __future__ import annotations


class CraftError(Exception):
    """The root of the tree."""


class ConfigError(CraftError):
    """The user's settings, script or data cannot be used as they are."""


class Refused(ConfigError):
    """The script is fine; how it was started, or what it finds, is not."""


class UnsafeScript(Refused):
    """The script's loop would silently give a wrong result. The message says what to change."""


class NewcomerDiffers(Refused):
    """This worker has just joined and its state differs from the others'. It ends, and they train on."""


class CallsDiffer(ConfigError):
    """Some workers wait in a call between the steps that others never make. All members find this at the same time."""


class ScriptLeft(ConfigError):
    """The script ended without an error in the middle of its training loop, so its work is incomplete."""


class Unreachable(CraftError):
    """``address`` does not answer."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class Unauthorized(CraftError):
    """The other side does not accept our token."""


class MalformedMessage(CraftError):
    """What arrived is not a valid message; ``field`` names the invalid part."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class GroupError(CraftError):
    """The group of ``generation`` is unusable."""

    def __init__(self, message: str, generation: int = -1) -> None:
        super().__init__(message)
        self.generation = generation


class GroupAborted(GroupError):
    """This worker itself aborted the group."""


class GroupBroken(GroupError):
    """A peer's connection of the group ended; ``peer`` is its rank, -1 if unknown."""

    def __init__(self, message: str, generation: int = -1, peer: int = -1) -> None:
        super().__init__(message, generation)
        self.peer = peer


class GroupTimeout(GroupError):
    """The group did not open, or an exchange did not end, in time; ``missed``: the workers that caused it, if known."""

    def __init__(self, message: str, generation: int = -1, missed: tuple[str, ...] = ()) -> None:
        super().__init__(message, generation)
        self.missed = missed


class SnapshotError(CraftError):
    """A copy of the training state, or data kept with it, cannot be fetched from ``address``."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class SnapshotMissing(SnapshotError):
    """The donor does not have it (any more)."""


class SnapshotCorrupt(SnapshotError):
    """The data does not match what a holder of the job's key sent."""


class SnapshotAborted(SnapshotError):
    """This worker itself aborted a transfer that it no longer needs."""


class Fenced(CraftError):
    """The job goes on without this worker."""


class LeftBehind(CraftError):
    """The others went back to a checkpoint or on to another loop while this worker joined, or what it needs is lost."""


class StateLost(CraftError):
    """All workers that held the training state are gone."""


class BitsDiffer(CraftError):
    """Workers hold different bits where they must be equal."""


class InjectedError(CraftError):
    """A fault that a test or ``craft chaos`` injected."""


class ProtocolViolation(CraftError):
    """A guarantee of the protocol is broken; if the job went on, its history would split."""
