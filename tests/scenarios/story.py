"""Story files: blocks of input lines, ``----``, and the output that they lead to.

Blocks are separated by blank lines; lines that begin with ``#`` are comments. The blocks of a file are told to the same
teller, one after the other. After a change that is meant, ``REWRITE=1 pytest tests/scenarios`` writes the new output
into the files, to be reviewed as a diff.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SEPARATOR = "----"


@dataclass(frozen=True)
class Line:
    """``verb key=value flag ...``"""

    verb: str
    args: dict[str, str]

    def text(self, key: str, default: str = "") -> str:
        return self.args.get(key, default)

    def number(self, key: str, default: int | None = None) -> int | None:
        return int(self.args[key]) if key in self.args else default

    def numbers(self, key: str) -> tuple[int, ...]:
        return tuple(int(part) for part in self.args.get(key, "").split(",") if part)


@dataclass(frozen=True)
class Block:
    comments: tuple[str, ...]
    source: tuple[str, ...]
    output: tuple[str, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(_line(text) for text in self.source)


def _line(text: str) -> Line:
    verb, *rest = shlex.split(text)
    pairs = (part.partition("=") for part in rest)
    return Line(verb, {key: value if equals else "yes" for key, equals, value in pairs})


def read(path: Path) -> Iterator[Block]:
    for part in path.read_text().strip("\n").split("\n\n"):
        lines = part.split("\n")
        comments = tuple(line for line in lines if line.startswith("#"))
        body = [line for line in lines if not line.startswith("#")]
        at = body.index(SEPARATOR) if SEPARATOR in body else len(body)
        yield Block(comments, tuple(body[:at]), tuple(body[at + 1 :]))


def retold(blocks: list[Block], teller: Callable[[tuple[Line, ...]], list[str]]) -> str:
    """The file as it must be, given what ``teller`` answers to each block."""
    parts = []
    for block in blocks:
        answer = [SEPARATOR, *teller(block.lines)] if block.source else []
        parts.append("\n".join([*block.comments, *block.source, *answer]))
    return "\n\n".join(parts) + "\n"
