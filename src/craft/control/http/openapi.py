"""Describe the HTTP interface: ``GET /openapi.json``, made from the types that the server decodes and sends.

It has nothing of the job, so it needs no token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from craft.control.http.actions import ActionRequest
from craft.control.http.alert_formats import STRUCTURED
from craft.control.replay.status import Status
from craft.protocol.messages import FailureReport
from craft.protocol.values.alerts import AlertGroup, CloudEvent
from craft.protocol.values.inspection import CloseUp

Json = dict[str, Any]
_JSON = "application/json"
_REF = "#/components/schemas/{name}"


class Health(msgspec.Struct, kw_only=True):
    """The lighthouse answers."""

    ok: bool


class Refusal(msgspec.Struct, kw_only=True):
    """What is wrong. Nothing was changed."""

    error: str
    field: str = ""
    """The part of the request that is to blame."""


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a report or an order."""

    event: Json
    actions: tuple[Json, ...]
    already: bool
    """Whether there was nothing to do: it was done before."""


class Outcomes(msgspec.Struct, kw_only=True):
    """What came of each alert, in their order."""

    outcomes: tuple[Outcome, ...]
    already: bool
    """Whether all of them were known before."""


def description() -> Json:
    """Return the document, OpenAPI 3.1."""
    bodies = (AlertGroup, CloudEvent, FailureReport, ActionRequest)
    answers = (Health, Status, CloseUp, Refusal, Outcome, Outcomes)
    _, schemas = msgspec.json.schema_components((*bodies, *answers), ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "CRAFT lighthouse",
            "version": "1",
            "description": "Reports, orders and alerts for one training job. The token is in its run directory.",
        },
        "security": [{"token": []}],
        "paths": _paths(),
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _paths() -> Json:
    worker = {"in": "path", "name": "worker_id", "required": True, "schema": {"type": "string", "minLength": 1}}
    hook = {"in": "path", "name": "name", "required": True, "schema": {"type": "string", "minLength": 1}}
    follow = {"in": "query", "name": "follow", "schema": {"type": "string", "enum": ["0", "1"], "default": "1"}}
    last = {"in": "header", "name": "Last-Event-ID", "schema": {"type": "string", "pattern": "^[0-9]{1,15}$"}}
    return {
        "/healthz": {"get": {**_get("Whether it answers.", Health), "security": []}},
        "/openapi.json": {"get": {**_get("This document.", None, _JSON), "security": []}},
        "/v1/status": {"get": _guarded(_get("The job as one value.", Status))},
        "/v1/events": {
            "get": _guarded(
                {**_get("The journal, as server-sent events.", None, "text/event-stream"), "parameters": [follow, last]},
                400,
            )
        },
        "/v1/workers/{worker_id}/debug": {
            "get": {
                **_guarded(_get("A worker from close up: what it does, its stacks.", CloseUp), 404, 409, 424, 429),
                "parameters": [worker],
            }
        },
        "/metrics": {"get": _guarded(_get("For Prometheus.", None, "text/plain"))},
        "/v1/failures": {"post": _post("A worker or a host failed.", {_JSON: _ref(FailureReport)}, Outcome, 404)},
        "/v1/actions": {"post": _post("Order something.", {_JSON: _ref(ActionRequest)}, Outcome, 404, 409)},
        "/v1/alerts": {"post": _post("Alertmanager's webhook.", {_JSON: _ref(AlertGroup)}, Outcomes, 429)},
        "/v1/cloudevents": {
            "post": _post(
                "A CloudEvent: structured, or with its attributes in ce- headers and any body.",
                {STRUCTURED: _ref(CloudEvent)}, Outcomes, 415, 429,
            )
        },
        "/v1/hooks/{name}": {
            "post": {
                **_post("Any JSON object, by the rules of craft.toml.", {_JSON: {"type": "object"}}, Outcomes, 404, 429),
                "parameters": [hook],
            }
        },
    }  # fmt: skip


def _ref(kind: type) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def _get(summary: str, kind: type | None, mime: str = _JSON) -> Json:
    content = {mime: {"schema": _ref(kind)} if kind is not None else {}}
    return {"summary": summary, "responses": {"200": {"description": "It is so.", "content": content}}}


def _post(summary: str, bodies: Json, kind: type, *refusals: int) -> Json:
    content = {mime: {"schema": schema} for mime, schema in bodies.items()}
    answered = {**_get(summary, kind), "requestBody": {"required": True, "content": content}}
    return _guarded(answered, 400, 408, 413, *refusals)


_WORDS = {
    400: "The body or a parameter is not what it should be.",
    401: "The token is missing or wrong.",
    404: "There is no such worker, host or hook.",
    408: "The body did not come in time.",
    409: "Not in the state that the job, or the worker, is in.",
    413: "The body is too large.",
    415: "No CloudEvent.",
    424: "The agent of that host is away, or does not answer.",
    429: "Too much at once: new alerts, or workers to be looked at; Retry-After says when there may be more.",
}


def _guarded(operation: Json, *refusals: int) -> Json:
    """Return the operation with its error responses."""
    refused = {
        str(code): {"description": _WORDS[code], "content": {_JSON: {"schema": _ref(Refusal)}}}
        for code in sorted({401, *refusals})
    }
    return {**operation, "responses": {**operation["responses"], **refused}}
