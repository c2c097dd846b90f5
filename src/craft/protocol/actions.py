"""What is to be done, in the imperative. Policies return these; the lighthouse carries them out."""

from __future__ import annotations

import msgspec


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action"):
    """The root of all actions. ``reason`` is a sentence for the journal."""

    reason: str


class Reconfigure(Action, frozen=True, kw_only=True, tag=True):
    """Make a new generation at once; its members abort the group they are in."""

    members: tuple[str, ...]


class Propose(Action, frozen=True, kw_only=True, tag=True):
    """Prepare a generation that all enter together at a step boundary, when every member is ready for it."""

    members: tuple[str, ...]


class Fence(Action, frozen=True, kw_only=True, tag=True):
    """End a worker, so that it can never act under an old generation."""

    worker_id: str


class Watch(Action, frozen=True, kw_only=True, tag=True):
    """Look at ``generation`` again after a while: if it is still broken then, GenerationStuck follows."""

    generation: int


class WindDown(Action, frozen=True, kw_only=True, tag=True):
    """Let every worker leave its loop at the same step boundary, with nothing lost."""


class Stop(Action, frozen=True, kw_only=True, tag=True):
    """End the job with this exit code."""

    exit_code: int
    traceback: str | None = None


AnyAction = Reconfigure | Propose | Fence | Watch | WindDown | Stop
