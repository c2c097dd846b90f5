"""Handle ``POST /v1/actions``: a request becomes an event; policies decide."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from aiohttp import web

from craft.control.core.loop import Loop
from craft.control.http.injections import InjectionHandler, InjectionRequest
from craft.control.http.middleware import answer, refusal
from craft.decide.job.observe import drains, preempts
from craft.decide.techniques.technique import Chosen
from craft.protocol.actions import AnyAction
from craft.protocol.errors import MalformedMessage
from craft.protocol.events import (
    AbortRequested,
    CheckpointRequested,
    DrainRequested,
    Event,
    PreemptRequested,
    StopRequested,
)

ACTIONS = ["stop", "drain", "abort", "preempt", "checkpoint", "inject"]
MAX_REASON_CHARS = 2000
MAX_TAG_CHARS = 64


class ActionRequest(InjectionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/actions``."""

    action: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ACTIONS})]
    """``stop``, ``drain``, ``abort``, ``preempt``, ``checkpoint`` or ``inject``."""
    reason: str = "requested"
    deadline_s: float | None = None
    """After this long, workers still there are treated as lost (``drain``) or ended (``preempt``)."""
    tag: str | None = None
    """The checkpoint is kept under this name; only with ``checkpoint``."""


_EVENTS: dict[str, type[Event]] = {
    "stop": StopRequested,
    "drain": DrainRequested,
    "abort": AbortRequested,
    "preempt": PreemptRequested,
    "checkpoint": CheckpointRequested,
}
"""The event of each action; the technique that answers it may be switched off."""


_OF_JOB = {
    "stop": "'stop' ends the whole job: it takes no worker_id and no host",
    "abort": "'abort' is for all workers: report one that hangs to /v1/failures",
    "preempt": "'preempt' is for the whole job: it takes no worker_id and no host",
    "checkpoint": "'checkpoint' is for the whole job: it takes no worker_id and no host",
}
"""Actions of the whole job, and what to say if one names a target."""


class ActionHandler:
    """Checks a request and hands it to the loop."""

    def __init__(self, loop: Loop, injections: InjectionHandler, techniques: Chosen) -> None:
        self._loop = loop
        self._injections = injections
        self._techniques = techniques

    def take(self, wanted: ActionRequest) -> web.Response:
        check_reason(wanted.reason)
        if wanted.deadline_s is not None:
            if wanted.action not in ("drain", "preempt"):
                raise MalformedMessage("deadline_s belongs to 'drain' and 'preempt'", "deadline_s")
            if not 0 <= wanted.deadline_s <= 1e6:
                raise MalformedMessage("deadline_s is a number of seconds, at least 0", "deadline_s")
        if wanted.tag is not None and wanted.action != "checkpoint":
            raise MalformedMessage("tag belongs to 'checkpoint'", "tag")
        if wanted.action == "inject":
            return self._inject(wanted)
        for field in ("kind", "sure", "seconds", "delay_ms"):
            if getattr(wanted, field) is not None:
                raise MalformedMessage(f"{field} belongs to 'inject'", field)
        if wanted.action in _EVENTS and not self._techniques.answer(_EVENTS[wanted.action]):
            return refusal(
                409,
                f"no technique that is on in this job answers {wanted.action!r}: craft techniques --dir RUN lists them",
                field="action",
            )
        if wanted.action in _OF_JOB and (wanted.worker_id is not None or wanted.host is not None):
            raise MalformedMessage(_OF_JOB[wanted.action], "worker_id")
        if wanted.action == "stop":
            return self._stop(wanted)
        if wanted.action == "drain":
            return self._drain(wanted)
        if wanted.action == "abort":
            return self._abort(wanted)
        if wanted.action in ("preempt", "checkpoint"):
            return self._saving(wanted)
        raise MalformedMessage(
            f"unknown action {wanted.action[:40]!r}: there are 'stop', 'drain', 'abort', 'preempt', 'checkpoint' and 'inject'",
            "action",
        )

    def _inject(self, wanted: ActionRequest) -> web.Response:
        event = self._injections.check(wanted)
        if isinstance(event, web.Response):
            return event
        self._loop.handle(event)
        actions: tuple[AnyAction, ...] = ()
        if event.fault == "drain":
            actions = self._loop.handle(DrainRequested(worker_id=event.worker_id, reason=wanted.reason))
        elif event.fault == "kill-lighthouse":
            self._injections.kill_lighthouse()
        return outcome(event, actions, already=False)

    def _stop(self, wanted: ActionRequest) -> web.Response:
        already = self._loop.state.stopping is not None or self._loop.state.ending
        event = StopRequested(reason=wanted.reason)
        return outcome(event, () if already else self._loop.handle(event), already)

    def _abort(self, wanted: ActionRequest) -> web.Response:
        event = AbortRequested(reason=wanted.reason)
        ending = self._loop.state.stopping is not None
        return outcome(event, () if ending else self._loop.handle(event), already=ending)

    def _saving(self, wanted: ActionRequest) -> web.Response:
        """Handle actions that need checkpoints."""
        if wanted.tag is not None and not (0 < len(wanted.tag) <= MAX_TAG_CHARS and wanted.tag.isprintable()):
            raise MalformedMessage(f"a tag is 1 to {MAX_TAG_CHARS} printable characters, such as 'best'", "tag")
        if not self._loop.report_events.checkpoints:
            return refusal(
                409,
                "no worker takes checkpoints (yet): start the job with --checkpoints URL, or have its script call"
                " job.checkpoints(); 'stop' and 'drain' need none",
                field="action",
            )
        return self._preempt(wanted) if wanted.action == "preempt" else self._checkpoint(wanted)

    def _preempt(self, wanted: ActionRequest) -> web.Response:
        deadline = None if wanted.deadline_s is None else time.time() + wanted.deadline_s
        event = PreemptRequested(reason=wanted.reason, deadline=deadline)
        already = not preempts(self._loop.state, deadline)
        return outcome(event, () if already else self._loop.handle(event), already)

    def _checkpoint(self, wanted: ActionRequest) -> web.Response:
        if self._loop.state.stopping is not None or self._loop.state.ending:
            return refusal(409, "the job is ending: it takes no more checkpoints for others", field="action")
        event = CheckpointRequested(reason=wanted.reason, tag=wanted.tag)
        return outcome(event, self._loop.handle(event), already=False)

    def _drain(self, wanted: ActionRequest) -> web.Response:
        if (wanted.worker_id is None) == (wanted.host is None):
            raise MalformedMessage("give exactly one of worker_id and host", "worker_id")
        views = self._loop.state.workers
        if all(wanted.worker_id != view.member.worker_id and wanted.host != view.member.host for view in views):
            return self._refused_drain(wanted)
        event = DrainRequested(
            worker_id=wanted.worker_id, host=wanted.host, reason=wanted.reason, deadline_s=wanted.deadline_s
        )
        already = not drains(self._loop.state, event, time.time())
        return outcome(event, () if already else self._loop.handle(event), already)

    def _refused_drain(self, wanted: ActionRequest) -> web.Response:
        """Return the refusal of a drain of workers that are unknown or starting."""
        report_events = self._loop.report_events
        if wanted.worker_id is not None:
            who, field, starting = f"worker {wanted.worker_id!r}", "worker_id", wanted.worker_id in report_events.seen
        else:
            who, field, starting = f"host {wanted.host!r}", "host", bool(report_events.starting(wanted.host or ""))
        if not starting:
            return refusal(404, f"there is no {who}", field=field)
        message = (
            f"{who} is starting: a worker that has not joined cannot leave. Ask again then, or 'craft fail' the worker"
        )
        return refusal(409, message, field=field)


def check_reason(reason: str) -> None:
    if len(reason) > MAX_REASON_CHARS:
        raise MalformedMessage(f"reason has {len(reason)} characters, the limit is {MAX_REASON_CHARS}", "reason")


def outcome(event: msgspec.Struct | dict[str, str], actions: tuple[AnyAction, ...], already: bool) -> web.Response:
    """Return the answer to a request: what came of it."""
    return answer({"event": event, "actions": actions, "already": already})
