"""Text from outside, made safe for a terminal and for a log of lines. The only place that does so.

Reasons, alerts, ids, host names, errors and tracebacks come from workers, from other hosts and from whoever calls the HTTP
interface. They may hold escape sequences, which move the cursor or change the terminal, and line ends, behind which a line
could pass for one of CRAFT's own. Everything that is printed for people, or logged, goes through one of these functions. JSON
keeps the text as it came.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(
    # Control characters but the tab; separators of lines; what turns the direction of text; halves of characters.
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_SGR = r"\x1b\[[0-9;:]*m"
_ESCAPES = re.compile(
    rf"(?P<colour>{_SGR})"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # what moves the cursor, and other control sequences
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # titles, links and other strings
    r"|\x1b[ -/]*[0-~]?"
    # Control characters but the tab, and what turns the direction of text.
    "|[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def one_line(text: object) -> str:
    r"""Return text as one line in which control characters are written out, such as ``\x1b`` and ``\n``."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def indented(text: object) -> str:
    """Return text of several lines, each made safe; those behind the first are indented, so that none passes for ours."""
    return "\n  ".join(one_line(line) for line in str(text).split("\n"))


def output_line(line: bytes, *, colours: bool) -> str:
    """Return a line of a script's output without what moves the cursor or changes the terminal; ``colours``: these stay."""
    text = line.decode("utf-8", "replace")
    kept = _ESCAPES.sub(lambda found: (found["colour"] or "") if colours else "", text)
    return f"{kept}\x1b[0m" if "\x1b" in kept else kept
