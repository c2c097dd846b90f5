"""The JSON schema of craft.toml, for editors, and the reference made from it (docs/reference/settings.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from craft.decide.job.alerts import AlertRule, Hook
from craft.decide.techniques import BUILT_IN, Alerts
from craft.decide.techniques.technique import AnyTechnique
from craft.settings.run import OWN, RunSettings
from craft.settings.techniques import flags_of

Kinds = Sequence[type[AnyTechnique]]
_ENABLED = {"type": "boolean", "default": True, "description": "Whether it is on."}


def schema(kinds: Kinds = BUILT_IN) -> dict[str, Any]:
    """Return the schema with these techniques."""
    tables = {kind.name: _technique(kind) for kind in kinds}
    rules, components = msgspec.json.schema_components([AlertRule, Hook], ref_template="#/$defs/{name}")
    names = {"type": "array", "items": {"enum": [kind.name for kind in kinds]}}
    order = {**names, "description": "Whose policies are asked first, where that is not to be as they are listed."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "craft.toml",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "run": {"type": "object", "additionalProperties": False, "properties": _run(kinds)},
            "techniques": {"type": "object", "additionalProperties": False, "properties": {"order": order, **tables}},
            "alerts": {"type": "array", "items": rules[0]},
            "hooks": {"type": "object", "additionalProperties": rules[1]},
        },
        "$defs": components,
    }


def _run(kinds: Kinds) -> dict[str, Any]:
    own = {name: each for name, each in _properties(RunSettings) if name in OWN}
    elsewhere = {
        name: {**dict(_properties(kind.Settings))[key], "description": f"As {key} of [techniques.{kind.name}]."}
        for kind in kinds
        for name, key in flags_of(kind).items()
    }
    return {**own, **elsewhere}


def _technique(kind: type[AnyTechnique]) -> dict[str, Any]:
    properties = {} if kind is Alerts else dict(_properties(kind.Settings))
    if kind.optional:
        properties = {"enabled": _ENABLED, **properties}
    return {"type": "object", "description": kind.summary, "additionalProperties": False, "properties": properties}


def _properties(kind: type[msgspec.Struct]) -> Iterator[tuple[str, dict[str, Any]]]:
    for field in msgspec.structs.fields(kind):
        if field.name == "techniques":
            continue
        found = msgspec.json.schema(field.type, schema_hook=lambda _: {"type": "string"})
        if field.default is not msgspec.NODEFAULT and field.default is not None:
            found = {**found, "default": msgspec.to_builtins(field.default, enc_hook=str)}
        yield field.name, found


def reference(kinds: Kinds = BUILT_IN) -> str:
    """Return the same for people, in Markdown: one table for each table of craft.toml."""
    tables = schema(kinds)["properties"]
    own = {name: each for name, each in tables["run"]["properties"].items() if name in OWN}
    parts = [_markdown("[run]", "What flags of `craft run` say, under their names.", own)]
    for kind in kinds:
        table = tables["techniques"]["properties"][kind.name]
        flags = {key: name for name, key in flags_of(kind).items()}
        parts.append(
            _markdown(
                f"[techniques.{kind.name}]", f"{kind.summary[0].upper()}{kind.summary[1:]}.", table["properties"], flags
            )
        )
    return "\n".join(parts)


def _markdown(title: str, text: str, properties: dict[str, Any], flags: dict[str, str] | None = None) -> str:
    lines = [f"### `{title}`", "", text, ""]
    if properties:
        lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, each in properties.items():
        flag = f" Also `{flags[name]}` in `[run]`." if flags and name in flags else ""
        default = f"`{json.dumps(each['default'])}`" if "default" in each else ""
        lines.append(f"| `{name}` | {_values(each)} | {default} | {each.get('description', '')}{flag} |")
    return "\n".join([*lines, ""])


def _values(each: dict[str, Any]) -> str:
    if "enum" in each:
        return ", ".join(f"`{value}`" for value in each["enum"] if value is not None)
    kinds = [one for one in each.get("anyOf", [each]) if one.get("type") != "null"]
    return " or ".join(f"{one.get('type')}{_least(one)}" for one in kinds)


def _least(each: dict[str, Any]) -> str:
    if "minimum" in each:
        return f", at least {each['minimum']:g}"
    return f", more than {each['exclusiveMinimum']:g}" if "exclusiveMinimum" in each else ""
