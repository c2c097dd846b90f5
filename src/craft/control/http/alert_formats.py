"""Parse alerts of other systems into ``Notice``: Alertmanager's, CloudEvents, and bodies of hooks.

Enters: bytes, and headers for CloudEvents. Leaves: notices, or MalformedMessage that names the field. ``server`` calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote

import msgspec

from craft.decide.job.alerts import ANSWER_LABEL, RESOLVED, Hook
from craft.protocol.errors import MalformedMessage
from craft.protocol.values.alerts import Alert, AlertGroup, CloudEvent, Notice
from craft.wire.codec import decode_as, field_of

STRUCTURED = "application/cloudevents+json"
_HEADER = "ce-"
_MAX_LABELS = 128
_MAX_NAME_CHARS = 256
_MAX_VALUE_CHARS = 2048
_SUMMARIES = ("summary", "description", "message")
_NAME_LABEL = "alertname"


def of_alertmanager(body: bytes) -> list[Notice]:
    group = decode_as(body, AlertGroup)
    return [_of_alert(alert, f"$.alerts[{at}]") for at, alert in enumerate(group.alerts)]


def _of_alert(alert: Alert, where: str) -> Notice:
    in_labels = ANSWER_LABEL in alert.labels
    return Notice(
        source="alertmanager",
        name=alert.labels.get(_NAME_LABEL, "without a name")[:_MAX_NAME_CHARS],
        fingerprint=alert.fingerprint,
        starts_at=_moment(alert.starts_at),
        resolved=alert.status == "resolved",
        labels=alert.labels,
        summary=_summary(alert.annotations),
        wanted=alert.labels.get(ANSWER_LABEL, alert.annotations.get(ANSWER_LABEL)),
        where=f"{where}.{'labels' if in_labels else 'annotations'}",
    )


def of_cloud_event(body: bytes, headers: Mapping[str, str], mime: str) -> Notice | None:
    """Parse a CloudEvent; None if neither its type nor its headers say that it is one."""
    if mime == STRUCTURED:
        raw = decode_as(body, dict[str, Any])
    elif any(name.lower() == f"{_HEADER}specversion" for name in headers):
        raw = {name.lower()[3:]: unquote(value) for name, value in headers.items() if name.lower().startswith(_HEADER)}
        raw["data"] = _data(body, mime)
    else:
        return None
    try:
        event = msgspec.convert(raw, CloudEvent)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"no CloudEvent: {error}", field_of(error)) from None
    attributes = {name: value for name, value in raw.items() if name not in ("data", "data_base64", "time")}
    data = event.data if isinstance(event.data, dict) else {}
    labels = {**_labels(data, "$.data"), **_labels(attributes, "$")}
    return Notice(
        source=f"cloudevents {event.source}",
        name=event.type,
        fingerprint=event.id,
        # A single event, not a state that holds until it is resolved.
        starts_at=_moment(event.time) if event.time is not None else "once",
        resolved=labels.get("status") == RESOLVED,
        labels=labels,
        summary=_summary(labels),
        wanted=labels.get(ANSWER_LABEL),
        where="$" if ANSWER_LABEL in attributes else "$.data",
    )


def of_hook(body: bytes, name: str, hook: Hook) -> Notice:
    raw = decode_as(body, dict[str, Any])
    whom = {each: _field(raw, getattr(hook, each)) for each in ("worker", "host", "gpu")}
    labels = {label: value for label, value in whom.items() if value is not None}
    wanted = [path for path in (hook.worker, hook.host) if path is not None]
    if wanted and not (whom["worker"] or whom["host"]):
        raise MalformedMessage(f"the body names no worker or host: it needs {' or '.join(wanted)}", wanted[0])
    value = _field(raw, hook.value)
    if hook.value is not None and value is None:
        raise MalformedMessage(f"the body has no {hook.value}, which says what it means", hook.value)
    meaning = hook.meaning(value)
    unique = _field(raw, hook.id)
    if hook.id is not None and not unique:
        raise MalformedMessage(f"the body has no {hook.id}, by which a repetition is known", hook.id)
    if value is not None:
        labels["value"] = value
    return Notice(
        source=f"hook {name}",
        hook=name,
        name=name,
        fingerprint=_digest(unique) if unique else _digest(*(f"{key}={whom[key]}" for key in sorted(whom))),
        # Without an id it holds until another value comes for the same worker or host.
        starts_at="once" if unique else "",
        resolved=meaning == RESOLVED,
        labels=labels,
        summary=_summary(_labels({key: raw[key] for key in _SUMMARIES if key in raw}, "$")),
        wanted=None if meaning == RESOLVED else meaning,
        where=f"[hooks.{name}]",
    )


def _data(body: bytes, mime: str) -> Any:
    """Return the data of a CloudEvent in binary mode, if it is a JSON object."""
    if not body or not (mime == "application/json" or mime.endswith("+json")):
        return None
    return decode_as(body, Any)


def _labels(values: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the scalar values as text."""
    labels = {name: _text(value) for name, value in values.items() if isinstance(value, str | int | float)}
    if len(labels) > _MAX_LABELS:
        raise MalformedMessage(f"{where} has {len(labels)} values, the limit is {_MAX_LABELS}", where)
    for name, value in labels.items():
        if len(name) > _MAX_NAME_CHARS or len(value) > _MAX_VALUE_CHARS:
            raise MalformedMessage(
                f"{where}.{name[:40]} is too long: the limit is {_MAX_VALUE_CHARS} characters", where
            )
    return labels


def _field(raw: dict[str, Any], path: str | None) -> str | None:
    """Return the value at ``path``, such as ``payload.nodes.0.name``, as text; None if it is missing."""
    if path is None:
        return None
    found: Any = raw
    for part in path.split("."):
        if isinstance(found, dict):
            found = found.get(part)
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    if found is None:
        return None
    if not isinstance(found, str | int | float):
        raise MalformedMessage(f"{path} must be a text or a number", path)
    if len(_text(found)) > _MAX_VALUE_CHARS:
        raise MalformedMessage(f"{path} is too long: the limit is {_MAX_VALUE_CHARS} characters", path)
    return _text(found)


def _text(value: str | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _summary(texts: Mapping[str, str]) -> str:
    return " ".join(next((texts[name] for name in _SUMMARIES if texts.get(name)), "")[:500].split())


def _moment(moment: datetime) -> str:
    """Return the same text for one moment, in whichever time zone it was written."""
    try:
        return moment.astimezone(timezone.utc).isoformat()
    except OverflowError:
        # At the limits of the calendar, in a zone beyond them.
        return moment.isoformat()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
