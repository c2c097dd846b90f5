"""Handle fault injection: ``POST /v1/actions`` with the action ``inject``.

Enters: the request. Leaves: a ``FaultInjected``, which ``ActionHandler`` hands to the loop; agents and workers get it in
the next directive. A job that was not started for chaos refuses, unless the request says ``sure``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from craft.control.http.middleware import refusal
from craft.protocol.errors import MalformedMessage
from craft.protocol.events import FaultInjected
from craft.protocol.values.injections import BY_LIGHTHOUSE, KINDS, OF_A_WORKER

if TYPE_CHECKING:
    from craft.control.lighthouse import Lighthouse

MAX_SECONDS = 86_400.0
MAX_DELAY_MS = 600_000.0
SECONDS = 5.0
DELAY_MS = 100.0
_ANSWER_S = 0.05
"""Delay before the lighthouse kills itself: the requester gets the answer."""


class InjectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fault in a request."""

    kind: str | None = None
    """What is to happen; only with ``inject``."""
    worker_id: str | None = None
    host: str | None = None
    """The target: exactly one of the two, with ``drain``, and with an ``inject`` that hits a worker or an agent."""
    sure: bool | None = None
    """Whether to inject into a job that was not started for chaos, or kill a lighthouse that is not restarted."""
    seconds: float | None = None
    """How long ``slow`` lasts; 5 by default."""
    delay_ms: float | None = None
    """How much longer each microbatch takes under ``slow``; 100 by default."""


class InjectionHandler:
    """Checks fault requests against the job state."""

    def __init__(self, lighthouse: Lighthouse) -> None:
        self._lighthouse = lighthouse

    def check(self, wanted: InjectionRequest) -> FaultInjected | web.Response:
        """Return the event for the request, or the refusal; raise MalformedMessage if it is invalid."""
        kind = _kind(wanted)
        if not (self._lighthouse.settings.chaos or wanted.sure):
            return refusal(
                409,
                "this job was not started for chaos (craft run --chaos, or craft lighthouse --chaos): add"
                ' "sure": true to inject faults all the same',
                field="sure",
            )
        if self._lighthouse.loop.state.stopping is not None:
            return refusal(409, "the job is over", field="kind")
        if kind == "kill-lighthouse":
            return self._of_lighthouse(wanted)
        return self._of_agent(wanted) if kind == "kill-agent" else self._of_worker(wanted, kind)

    def _of_lighthouse(self, wanted: InjectionRequest) -> FaultInjected | web.Response:
        if not (self._lighthouse.settings.kept or wanted.sure):
            return refusal(409, 'this lighthouse is not restarted (it has no --keep): add "sure": true', field="sure")
        return FaultInjected(injection_id=_new_id(), fault="kill-lighthouse")

    def _of_agent(self, wanted: InjectionRequest) -> FaultInjected | web.Response:
        session = self._lighthouse.sessions.by_host.get(wanted.host or "")
        if session is None or session.closed:
            return refusal(404, f"there is no host {wanted.host!r} with an agent that is connected", field="host")
        return FaultInjected(injection_id=_new_id(), fault="kill-agent", host=wanted.host, agent_pid=session.pid or 0)

    def _of_worker(self, wanted: InjectionRequest, kind: str) -> FaultInjected | web.Response:
        report_events, worker_id = self._lighthouse.loop.report_events, wanted.worker_id or ""
        known = report_events.index.view(worker_id) is not None or worker_id in report_events.seen
        if not known or report_events.index.gone(worker_id):
            return refusal(404, f"there is no living worker {worker_id!r}", field="worker_id")
        if kind not in ("kill", "stop") and not report_events.index.takes_part(worker_id):
            return refusal(409, f"worker {worker_id} does not take part now: {kind} needs a member", field="worker_id")
        slow = kind == "slow"
        return FaultInjected(
            injection_id=_new_id(),
            fault=kind,
            worker_id=worker_id,
            seconds=_number(wanted.seconds, SECONDS, MAX_SECONDS, "seconds") if slow else 0.0,
            delay_ms=_number(wanted.delay_ms, DELAY_MS, MAX_DELAY_MS, "delay_ms") if slow else 0.0,
        )

    def kill_lighthouse(self) -> None:
        """Send SIGKILL to this process once its answer is out."""
        asyncio.get_running_loop().call_later(_ANSWER_S, os.kill, os.getpid(), signal.SIGKILL)


def _kind(wanted: InjectionRequest) -> str:
    """Return the kind, if the request is valid regardless of the job state."""
    if wanted.kind not in KINDS:
        given = "none" if wanted.kind is None else repr(wanted.kind[:40])
        raise MalformedMessage(f"kind must be one of {', '.join(KINDS)}, not {given}", "kind")
    if wanted.kind in OF_A_WORKER:
        needed, not_needed = "worker_id", "host"
    else:
        needed, not_needed = "host", "worker_id"
    if wanted.kind not in BY_LIGHTHOUSE or wanted.kind == "drain":
        if not getattr(wanted, needed):
            raise MalformedMessage(f"{wanted.kind} needs a {needed}", needed)
    elif wanted.host is not None:
        raise MalformedMessage(f"{wanted.kind} takes no host", "host")
    if getattr(wanted, not_needed) is not None:
        raise MalformedMessage(f"{wanted.kind} takes no {not_needed}", not_needed)
    for field in ("seconds", "delay_ms"):
        if wanted.kind != "slow" and getattr(wanted, field) is not None:
            raise MalformedMessage(f"{wanted.kind} takes no {field}", field)
    return wanted.kind


def _number(given: float | None, default: float, limit: float, field: str) -> float:
    value = default if given is None else given
    if not 0 < value <= limit:
        raise MalformedMessage(f"{field} must be above 0 and at most {limit:g}", field)
    return value


def _new_id() -> str:
    return secrets.token_hex(8)
