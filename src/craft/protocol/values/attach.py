"""How a process that somebody else started becomes a worker: one request and one answer on a Unix socket, a line of JSON each."""

from __future__ import annotations

import msgspec


class Adopt(msgspec.Struct, frozen=True, kw_only=True):
    """A process asks the agent of its host to take it on."""

    pid: int
    local_rank: int


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """What it is told."""

    environment: dict[str, str] = {}
    """The settings of the worker that it is from now on; empty if it is none."""
    reason: str = ""
    """Why it is none: the job is over."""
    exit_code: int = 0
    """How it is to end then."""
