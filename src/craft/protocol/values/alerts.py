"""Alerts of other systems: Alertmanager's groups, CloudEvents, and ``Notice`` for all formats.

``control/http/server`` decodes bodies as these types and describes them in its OpenAPI document.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

AlertAnswer = Literal["report", "drain", "fail", "checkpoint", "preempt", "stop", "abort"]
"""The answer to an alert; ``report`` only journals it."""

Short = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
LabelName = Annotated[str, msgspec.Meta(max_length=256)]
Labels = Annotated[dict[LabelName, Text], msgspec.Meta(max_length=128)]
"""Labels are journaled, so they are shorter than a body may be."""
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class Alert(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One alert of a group."""

    status: Literal["firing", "resolved"]
    labels: Labels
    annotations: dict[str, str] = {}
    starts_at: Moment
    """Since when; one that fires again later has another."""
    ends_at: Moment | None = None
    generator_url: str = msgspec.field(default="", name="generatorURL")
    fingerprint: Short
    """The same for the same labels."""


class AlertGroup(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Body of ``POST /v1/alerts``: Alertmanager's webhook format."""

    version: Literal["4"]
    group_key: Annotated[str, msgspec.Meta(max_length=16384)]
    """Names the group of which these alerts are."""
    alerts: Annotated[tuple[Alert, ...], msgspec.Meta(max_length=1000)]
    truncated_alerts: int = 0
    status: Literal["firing", "resolved"] = "firing"
    receiver: str = ""
    group_labels: dict[str, str] = {}
    common_labels: dict[str, str] = {}
    common_annotations: dict[str, str] = {}
    external_url: str = msgspec.field(default="", name="externalURL")


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /v1/cloudevents`` in structured mode; in binary mode ``ce-*`` headers say the same.

    Whatever else is at its top level is an extension attribute, and counts as a label.
    """

    specversion: Literal["1.0"]
    id: Short
    """Unique within its source."""
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    type: Short
    subject: Text | None = None
    time: Moment | None = None
    datacontenttype: str | None = None
    data: Any = None
    """An object's own values that are no objects and no lists count as labels."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An alert, in one form for all formats."""

    source: str
    """``alertmanager``, ``cloudevents`` and the event's own source, or ``hook`` and its name."""
    hook: str | None = None
    """The name of the hook that received it."""
    name: str
    fingerprint: str
    """Two notices of one source with the same fingerprint and ``starts_at`` are one, delivered twice."""
    starts_at: str = ""
    """Empty: it holds until it is resolved, and may come again after that."""
    resolved: bool = False
    labels: dict[str, str] = {}
    summary: str = ""
    wanted: str | None = None
    """The answer that it asks for itself."""
    where: str = ""
    """The field of the request that it came from, for error messages."""
