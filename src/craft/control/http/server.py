"""The lighthouse's HTTP interface. Handlers check requests, hand them to the loop, and answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from craft.control.agents.inspection import Busy, Unanswered
from craft.control.http.actions import ActionHandler, ActionRequest, check_reason, outcome
from craft.control.http.alert_formats import STRUCTURED, of_alertmanager, of_cloud_event, of_hook
from craft.control.http.alerts import AlertIntake
from craft.control.http.injections import InjectionHandler
from craft.control.http.metrics import CONTENT_TYPE, render
from craft.control.http.middleware import answer, authentication, errors, read_body, refusal
from craft.control.http.openapi import description
from craft.control.lighthouse import Lighthouse
from craft.protocol.errors import MalformedMessage
from craft.protocol.events import PreemptRequested
from craft.protocol.messages import FailureReport
from craft.wire.codec import MAX_MESSAGE_BYTES, decode_as


def make_app(
    lighthouse: Lighthouse, token: str, admit: Callable[[asyncio.BaseTransport | None], None] = lambda _: None
) -> web.Application:
    """Return the application that serves ``lighthouse``; ``admit`` gets authenticated connections."""
    app = web.Application(client_max_size=MAX_MESSAGE_BYTES, middlewares=[errors, authentication(token, admit)])
    handlers = Handlers(lighthouse)
    app.router.add_get("/healthz", handlers.healthz)
    app.router.add_get("/openapi.json", handlers.openapi)
    app.router.add_get("/v1/status", handlers.status)
    app.router.add_get("/v1/events", handlers.events, allow_head=False)
    app.router.add_get("/metrics", handlers.metrics)
    app.router.add_post("/v1/failures", handlers.failures)
    app.router.add_post("/v1/actions", handlers.actions)
    app.router.add_post("/v1/alerts", handlers.alerts)
    app.router.add_post("/v1/cloudevents", handlers.cloud_events)
    app.router.add_post("/v1/hooks/{name}", handlers.hooks)
    app.router.add_get("/v1/workers/{worker_id}/debug", handlers.debug)
    app.router.add_get("/v1/agent", handlers.agent, allow_head=False)
    return app


class Handlers:
    """One method per route."""

    def __init__(self, lighthouse: Lighthouse) -> None:
        self._lighthouse = lighthouse
        self._loop = lighthouse.loop
        self._actions = ActionHandler(self._loop, InjectionHandler(lighthouse), lighthouse.settings.techniques)
        preempts = lighthouse.settings.techniques.answer(PreemptRequested)
        self._alerts = AlertIntake(self._loop, lighthouse.alerts, lighthouse.settings.alerts, preempts=preempts)

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        return answer({"ok": True})

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return answer(description())

    async def status(self, request: web.Request) -> web.StreamResponse:
        return answer(self._lighthouse.status())

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        text = render(self._lighthouse.status(), self._lighthouse.lines, self._loop.reports)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def agent(self, request: web.Request) -> web.StreamResponse:
        return await self._lighthouse.sessions.run(request)

    async def debug(self, request: web.Request) -> web.StreamResponse:
        worker_id = request.match_info["worker_id"]
        host = self._lighthouse.host_of(worker_id)
        if host is None:
            return refusal(404, f"there is no worker {worker_id[:200]!r}", field="worker_id")
        index = self._loop.report_events.index
        if index.gone(worker_id) and not index.may_run(worker_id):
            message = (
                f"worker {worker_id} does not run any more: its files are in workers/{worker_id} of its run directory"
            )
            return refusal(409, message, field="worker_id")
        try:
            return answer(await self._lighthouse.sessions.inspections.look(worker_id, host))
        except Unanswered as error:
            return refusal(424, str(error), field="worker_id")
        except Busy:
            response = refusal(429, "too many workers are being looked at: ask again in a moment")
            response.headers["Retry-After"] = "1"
            return response

    async def events(self, request: web.Request) -> web.StreamResponse:
        follow = request.query.get("follow", "1")
        if follow not in ("0", "1"):
            raise MalformedMessage("follow must be 0 or 1", "follow")
        last = request.headers.get("Last-Event-ID", "0")
        if not (last.isascii() and last.isdigit() and len(last) < 16):
            raise MalformedMessage("Last-Event-ID must be a number", "Last-Event-ID")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        async for event in self._lighthouse.event_stream.stream(after=int(last), follow=follow == "1"):
            await response.write(event)
        return response

    async def failures(self, request: web.Request) -> web.StreamResponse:
        report = decode_as(await read_body(request), FailureReport)
        check_reason(report.reason)
        if report.worker_id is not None and report.host is None:
            return self._fail_worker(report.worker_id, report.reason)
        if report.host is not None and report.worker_id is None:
            return self._fail_host(report.host, report.reason)
        raise MalformedMessage("give exactly one of worker_id and host", "worker_id")

    async def actions(self, request: web.Request) -> web.StreamResponse:
        return self._actions.take(decode_as(await read_body(request), ActionRequest))

    async def alerts(self, request: web.Request) -> web.StreamResponse:
        return self._alerts.take(of_alertmanager(await read_body(request)))

    async def cloud_events(self, request: web.Request) -> web.StreamResponse:
        notice = of_cloud_event(await read_body(request), request.headers, request.content_type)
        if notice is None:
            message = f"no CloudEvent: send {STRUCTURED}, or headers that begin with ce-specversion: 1.0"
            return refusal(415, message, field="Content-Type")
        return self._alerts.take([notice])

    async def hooks(self, request: web.Request) -> web.StreamResponse:
        name, hooks = request.match_info["name"], self._alerts.settings.hooks
        if name not in hooks:
            there = f"there are {', '.join(sorted(hooks))}" if hooks else "there is none in craft.toml"
            return refusal(404, f"there is no hook {name[:64]!r}: {there}", field="name")
        return self._alerts.take([of_hook(await read_body(request), name, hooks[name])])

    def _fail_worker(self, worker_id: str, reason: str) -> web.StreamResponse:
        index = self._loop.report_events.index
        if index.view(worker_id) is None and worker_id not in self._loop.report_events.seen:
            return refusal(404, f"there is no worker {worker_id!r}", field="worker_id")
        event = {"event": "WorkerLost", "worker_id": worker_id, "reason": reason, "source": "api"}
        already = index.gone(worker_id)
        return outcome(event, () if already else self._loop.lose_worker(worker_id, reason, "api"), already)

    def _fail_host(self, host: str, reason: str) -> web.StreamResponse:
        views = self._loop.state.workers
        if host not in self._lighthouse.sessions.by_host and all(view.member.host != host for view in views):
            return refusal(404, f"there is no host {host!r}", field="host")
        already = not (self._loop.report_events.index.living(host) or self._loop.report_events.starting(host))
        event = {"event": "HostLost", "host": host, "reason": reason}
        return outcome(event, self._loop.lose_host(host, reason), already)
