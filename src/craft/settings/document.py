"""craft.toml as it is read: its values, and where in the file each of them is, so that an error can say."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from craft.protocol.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES = ("run", "techniques", "alerts", "hooks")
_HEADER = re.compile(r"\s*\[{1,2}\s*(?P<name>[^\[\]]+?)\s*\]{1,2}\s*(#.*)?")
_KEY = re.compile(r"""\s*(?P<name>[A-Za-z0-9_-]+|"[^"]*"|'[^']*')\s*[=.]""")


class Document:
    """One craft.toml; an empty one where there is none."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._text = ""
        self.values: dict[str, Any] = {}
        if path is None:
            return
        try:
            self._text = path.read_text()
            self.values = tomllib.loads(self._text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        self.check_keys("", self.values, TABLES, "there is no table")

    def table(self, name: str) -> Mapping[str, Any]:
        """The table of this name, such as ``run`` or ``techniques.hang``; an empty one if it is not there."""
        found: Any = self.values
        for part in name.split("."):
            found = found.get(part, {})
            if not isinstance(found, dict):
                raise self.error(name, None, f"[{name}] is a table")
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
        """An error about a key of a table (the ``number``-th of that name), with file and line."""
        line = self.line(table, key, number=number)
        return ConfigError(f"{self.path}{'' if line is None else f', line {line}'}: {message}")

    def line(self, table: str, key: str | None, *, number: int = 1) -> int | None:
        """The line with a key of a table, or with its header where the key is not on a line of its own."""
        here, seen, header = "", 0, None
        for at, text in enumerate(self._text.splitlines(), start=1):
            found = _HEADER.fullmatch(text)
            if found is not None:
                here = re.sub(r"""["'\s]""", "", found["name"])
                seen += here == table
                if here == table and seen == number:
                    header = at
                if key is not None and f"{here}.".startswith(f"{table}.{key}." if table else f"{key}."):
                    return at
            elif here == table and (not table or seen == number) and key is not None:
                assigned = _KEY.match(text)
                if assigned is not None and assigned["name"].strip("\"'") == key:
                    return at
        return header


def hint(given: str, known: Iterable[str]) -> str:
    known = tuple(known)
    near = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def key_in(error: msgspec.ValidationError) -> str | None:
    """The key that a validation error is about, such as ``limit_s`` for ``... - at `$.limit_s```."""
    found = re.search(r"`\$\.([A-Za-z0-9_-]+)", str(error))
    return found[1] if found is not None else None


def toml(value: Any) -> str:
    """A value as it is written in a craft.toml."""
    if isinstance(value, dict):
        inside = ", ".join(f"{toml(key)} = {toml(each)}" for key, each in value.items() if each is not None)
        return f"{{ {inside} }}"
    return msgspec.json.encode(value).decode()
