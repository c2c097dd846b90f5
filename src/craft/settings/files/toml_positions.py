"""Find the line of each key of a craft.toml.

``tomllib`` does not keep lines. This scans a text that it has accepted for its keys: headers, dotted keys, inline tables,
and values of several lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_PART = r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'"""
_PATH = re.compile(rf"(?:{_PART})(?:[ \t]*\.[ \t]*(?:{_PART}))*")
_PARTS = re.compile(_PART)
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_OPENING, _CLOSING = re.compile(r"\[{1,2}[ \t]*"), re.compile(r"[ \t]*\]{1,2}")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"""+' r"|'''.*?'''+" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'", re.DOTALL)
_BARE = re.compile(r"[^,\]}#\n]+")


class TomlPosition(NamedTuple):
    path: str
    """Of a table or a key, such as ``techniques.hang.limit_s``."""
    line: int
    number: int
    """Number of the enclosing table in a list (``[[alerts]]``), from 1."""


def places(text: str) -> tuple[TomlPosition, ...]:
    """Return all tables and keys of a text that ``tomllib`` accepts, in order."""
    return tuple(_Scan(text).statements())


class _Scan:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def statements(self) -> Iterator[TomlPosition]:
        here, number = "", 1
        lists: dict[str, int] = {}
        self._take(_BLANK)
        while self._at < len(self._text):
            before = self._at
            opening = self._take(_OPENING)
            if opening:
                line, here = self._line(), self._path()
                self._take(_CLOSING)
                if opening.startswith("[["):
                    lists[here] = lists.get(here, 0) + 1
                number = max((lists[name] for name in lists if f"{here}.".startswith(f"{name}.")), default=1)
                yield TomlPosition(here, line, number)
            else:
                yield from self._assignment(here, number)
            self._take(_BLANK)
            if self._at == before:
                return

    def _assignment(self, table: str, number: int) -> Iterator[TomlPosition]:
        line, key = self._line(), self._path()
        path = f"{table}.{key}" if table else key
        yield TomlPosition(path, line, number)
        self._take(_EQUALS)
        yield from self._value(path, number)

    def _value(self, path: str, number: int) -> Iterator[TomlPosition]:
        first = self._text[self._at : self._at + 1]
        if first in ("[", "{"):
            yield from self._inside(path, number, "]" if first == "[" else "}")
        else:
            self._take(_STRING) or self._take(_BARE)

    def _inside(self, path: str, number: int, closing: str) -> Iterator[TomlPosition]:
        """Scan a list or an inline table."""
        self._at += 1
        each = 0
        while self._at < len(self._text):
            before = self._at
            self._take(_BLANK)
            found = self._text[self._at : self._at + 1]
            if found in (closing, ","):
                self._at += 1
                if found == closing:
                    return
            elif closing == "}":
                yield from self._assignment(path, number)
            else:
                each += 1
                yield TomlPosition(path, self._line(), each)
                yield from self._value(path, each)
            if self._at == before:
                return

    def _path(self) -> str:
        return ".".join(part.strip("\"'") for part in _PARTS.findall(self._take(_PATH)))

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1
