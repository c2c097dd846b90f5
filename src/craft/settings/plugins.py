"""Techniques of other packages: found by the entry-point group ``craft.techniques`` and validated before use.

Every defect of one becomes a ConfigError that names it and its class.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from craft.decide.techniques import BUILT_IN
from craft.decide.techniques.technique import POINTS, AnyTechnique, Technique, described
from craft.protocol.errors import ConfigError
from craft.protocol.events import Event

GROUP = "craft.techniques"


def foreign() -> dict[str, EntryPoint]:
    """Return the techniques of other packages, by name, without importing them."""
    return {each.name: each for each in entry_points(group=GROUP)}


def load(entry: EntryPoint) -> type[AnyTechnique]:
    """Import a technique of another package; ConfigError says what is wrong with it."""
    where = f"technique {entry.name} ({entry.value})"
    try:
        kind = entry.load()
    except Exception as error:
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Technique)):
        raise ConfigError(f"{where} is not a class derived from craft.techniques.Technique")
    if getattr(kind, "name", None) != entry.name:
        raise ConfigError(f"{where} calls itself {getattr(kind, 'name', None)!r}: both names must be the same")
    if kind.name in {each.name for each in BUILT_IN}:
        raise ConfigError(f"{where} has the name of a built-in one: it needs another")
    for wrong in _wrong(kind):
        raise ConfigError(f"{where}: {wrong}")
    why_inexact(made(kind, kind.Settings()))
    return kind


def _wrong(kind: type[AnyTechnique]) -> Iterator[str]:
    """Yield what is wrong with the declarations of a technique."""
    settings: Any = kind.Settings
    if not (isinstance(settings, type) and issubclass(settings, msgspec.Struct)):
        yield f"Settings must be a class derived from msgspec.Struct, not {settings!r}"
        return
    try:
        settings()
        msgspec.json.schema(settings, schema_hook=lambda _: {})
    except TypeError as error:
        yield f"every one of its settings needs a default, and a type that msgspec knows: {error}"
    except Exception as error:  # noqa: BLE001  (code of another package; the message names the error)
        yield f"Settings: {type(error).__name__}: {error}"
    if not (isinstance(getattr(kind, "summary", None), str) and kind.summary.strip()):
        yield "it needs a summary: one line for people"
    for attribute in ("before", "shared", "points"):
        found: Any = getattr(kind, attribute)
        if not (isinstance(found, tuple) and all(isinstance(each, str) for each in found)):
            yield f"{attribute} must be a tuple of names, such as ('one',), not {found!r}"
    for attribute in ("emits", "answers"):
        found = getattr(kind, attribute)
        if not (isinstance(found, tuple) and all(isinstance(each, type) and issubclass(each, Event) for each in found)):
            yield f"{attribute} must be a tuple of events, not {found!r}"
    if kind.name in kind.before:
        yield "before: it cannot be asked before itself"
    yield from _unknown("shared", kind.shared, settings.__struct_fields__)
    yield from _unknown("points", kind.points, POINTS)


def _unknown(attribute: str, given: tuple[str, ...], known: tuple[str, ...]) -> Iterator[str]:
    for each in given:
        if each not in known:
            yield f"{attribute}: there is no {each!r}; there are {', '.join(known) or 'none'}"


def made(kind: type[AnyTechnique], settings: msgspec.Struct) -> AnyTechnique:
    """Return a technique with its settings; raise ConfigError if its constructor fails."""
    try:
        return kind(settings)
    except Exception as error:
        raise ConfigError(f"{described(kind)} cannot be made: {type(error).__name__}: {error}") from error


def why_inexact(technique: AnyTechnique) -> str | None:
    """Return the result of ``inexact``; raise ConfigError if it fails."""
    try:
        return technique.inexact()
    except Exception as error:
        raise ConfigError(f"{described(type(technique))}: inexact: {type(error).__name__}: {error}") from error
