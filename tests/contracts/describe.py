"""Describe messages and commands as plain data: what another program sees of them, and nothing of how the code calls it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import click
import msgspec
from msgspec import inspect

Json = Any


def message(kind: Any) -> Json:
    """Describe how values of a type are encoded: keys, their order where that counts, tags, types and defaults."""
    return _type(inspect.type_info(kind), ())


def _type(info: inspect.Type, above: tuple[type, ...]) -> Json:
    if isinstance(info, inspect.StructType):
        return _struct(info, above)
    if isinstance(info, inspect.DataclassType):
        return {"fields": [[field.encode_name, _type(field.type, above)] for field in info.fields]}
    if isinstance(info, inspect.UnionType):
        return {"any of": sorted((_type(each, above) for each in info.types), key=str)}
    if isinstance(info, inspect.EnumType):
        return {"one of": sorted(each.value for each in info.cls)}
    if isinstance(info, inspect.LiteralType):
        return {"one of": sorted(info.values, key=str)}
    if isinstance(info, inspect.TupleType):
        return {"tuple": [_type(each, above) for each in info.item_types]}
    if isinstance(info, inspect.CollectionType):
        return {"list": _type(info.item_type, above)}
    if isinstance(info, inspect.DictType):
        return {"map": [_type(info.key_type, above), _type(info.value_type, above)]}
    if isinstance(info, inspect.Metadata):
        return _type(info.type, above)
    return type(info).__name__.removesuffix("Type").lower()


def _struct(info: inspect.StructType, above: tuple[type, ...]) -> Json:
    if info.cls in above:
        return {"same as above": above[::-1].index(info.cls)}
    found: dict[str, Json] = {
        "fields": [
            [field.encode_name, _type(field.type, (*above, info.cls)), *_default(field)] for field in info.fields
        ]
    }
    if info.array_like:
        found["as"] = "array"
    if info.tag is not None:
        found["tag"] = [info.tag_field, info.tag]
    return found


def _default(field: inspect.Field) -> list[Json]:
    if field.required:
        return []
    if callable(field.default_factory):
        return [_plain(field.default_factory())]
    return [_plain(field.default)]


def _plain(value: Any) -> Json:
    if isinstance(value, Enum):
        return value.value
    return msgspec.to_builtins(value, enc_hook=lambda each: type(each).__name__)


def command(found: click.Command) -> Json:
    """Describe a command line: its options and arguments, what they take and what they are by default."""
    described: dict[str, Json] = {"parameters": [_parameter(each) for each in found.params]}
    if isinstance(found, click.Group):
        context = click.Context(found)
        within = {name: found.get_command(context, name) for name in found.list_commands(context)}
        described["commands"] = {name: command(each) for name, each in within.items() if each is not None}
    return described


def _parameter(found: click.Parameter) -> Json:
    described: dict[str, Json] = {"names": [*found.opts, *found.secondary_opts], "required": found.required}
    kind = found.type
    described["takes"] = list(kind.choices) if isinstance(kind, click.Choice) else kind.name
    if isinstance(found, click.Option):
        described["flag"] = found.is_flag
        described["several"] = found.multiple
        described["environment"] = found.envvar
    if isinstance(found.default, bool | int | float | str):
        described["default"] = found.default
    return described
