"""Attach a process of another launcher as a worker: a request and an answer on a Unix socket, one JSON line each."""

from __future__ import annotations

import msgspec


class Adopt(msgspec.Struct, frozen=True, kw_only=True):
    """A process asks the agent of its host to adopt it."""

    pid: int
    local_rank: int


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's answer."""

    environment: dict[str, str] = {}
    """The settings of its worker; empty if it is rejected."""
    reason: str = ""
    """Why it is rejected: the job is over."""
    exit_code: int = 0
    """The exit code that it ends with if it is rejected."""
