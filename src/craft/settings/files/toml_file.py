"""Read craft.toml: its values, and the line of each key, for error messages."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from craft.protocol.errors import ConfigError
from craft.settings.files.toml_positions import TomlPosition, places

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES = ("run", "techniques", "alerts", "hooks")
_BOUNDS = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}
_BOUND = re.compile(r"Expected `\w+` (?P<sign>[<>]=?) (?P<number>\S+)")


class TomlFile:
    """One craft.toml; empty without a path."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._places: tuple[TomlPosition, ...] = ()
        self.values: dict[str, Any] = {}
        if path is None:
            return
        try:
            text = path.read_text()
            self.values = tomllib.loads(text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        self._places = places(text)
        self.check_keys("", self.values, TABLES, "there is no table")

    def table(self, name: str) -> Mapping[str, Any]:
        """Return the table of this name, such as ``run`` or ``techniques.hang``; an empty one if it is missing."""
        found: Any = self.values
        for part in name.split("."):
            found = found.get(part, {})
            if not isinstance(found, dict):
                raise self.error(name, None, f"[{name}] must be a table, not {toml(found)}")
        return dict(found)

    def check_keys(
        self, table: str, given: Iterable[str], known: Iterable[str], complaint: str, *, number: int = 1
    ) -> None:
        """Raise ConfigError with the nearest valid key for the first of ``given`` that is not ``known``."""
        known = tuple(known)
        for key in given:
            if key not in known:
                raise self.error(table, key, f"{complaint} {key!r}{hint(key, known)}", number=number)

    def error(self, table: str, key: str | None, message: str, *, number: int = 1) -> ConfigError:
        """Return an error about a key of a table (the ``number``-th of that name), with file and line."""
        line = self.line(table, key, number=number)
        return ConfigError(f"{self.path}{'' if line is None else f', line {line}'}: {message}")

    def line(self, table: str, key: str | None, *, number: int = 1) -> int | None:
        """Return the line of a key of a table, or else the first one of that table."""
        wanted = ".".join(part for part in (table, key) if part)
        mine = [place for place in self._places if place.number == number] if table else self._places
        for name in (wanted, table):
            exact = (place.line for place in mine if place.path == name)
            inside = (place.line for place in mine if name and place.path.startswith(f"{name}."))
            found = next(exact, None) or next(inside, None)
            if found is not None:
                return found
        return None


def hint(given: str, known: Iterable[str]) -> str:
    known = tuple(known)
    near = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known) or 'none'}"


def key_in(error: msgspec.ValidationError) -> str | None:
    """Return the key that a validation error names, such as ``limit_s`` for ``... - at `$.limit_s```."""
    found = re.search(r"`\$\.([A-Za-z0-9_-]+)", str(error))
    return found[1] if found is not None else None


def complaint(error: msgspec.ValidationError, kind: type[msgspec.Struct], values: Mapping[str, Any]) -> str:
    """Return what is wrong with the value of a setting: its bounds, or the nearest valid value."""
    text, _, place = str(error).partition(" - at ")
    bound = _BOUND.fullmatch(text)
    if bound is not None:
        text = f"must be {_BOUNDS[bound['sign']]} {bound['number'].removesuffix('.0')}"
    key = key_in(error)
    if key is None or place != f"`$.{key}`":
        return str(error)
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    if key in types and isinstance(values.get(key), str):
        known = msgspec.json.schema(types[key], schema_hook=lambda _: {}).get("enum", ())
        text += hint(values[key], map(str, known)) if known else ""
    return text


def toml(value: Any) -> str:
    """Return a value in TOML syntax."""
    if isinstance(value, dict):
        inside = ", ".join(f"{toml(key)} = {toml(each)}" for key, each in value.items() if each is not None)
        return f"{{ {inside} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return msgspec.json.encode(value, enc_hook=str).decode()
