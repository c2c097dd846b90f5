"""Make external text safe for a terminal and for line-based logs. The only place that does so.

Reasons, alerts, ids, host names, errors and tracebacks come from workers, other hosts and HTTP clients. They may contain
escape sequences, which control the terminal, and line ends, after which a line could pass for one of CRAFT's. Everything
that is printed for people, or logged, goes through one of these functions. JSON keeps the original text.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(
    # Control characters except tab, line separators, bidirectional controls, surrogates.
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_SGR = r"\x1b\[[0-9;:]*m"
_ESCAPES = re.compile(
    rf"(?P<colour>{_SGR})"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # cursor movement and other control sequences
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # titles, links and other strings
    r"|\x1b[ -/]*[0-~]?"
    # Control characters except tab, and bidirectional controls.
    "|[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def one_line(text: object) -> str:
    r"""Return text as one line with control characters spelled out, such as ``\x1b`` and ``\n``."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def indented(text: object) -> str:
    """Return text of several lines, each made safe; all but the first are indented, so that none passes for ours."""
    return "\n  ".join(one_line(line) for line in str(text).split("\n"))


def output_line(line: bytes, *, colours: bool) -> str:
    """Return a line of a script's output without terminal control sequences; ``colours``: keep colours."""
    text = line.decode("utf-8", "replace")
    kept = _ESCAPES.sub(lambda found: (found["colour"] or "") if colours else "", text)
    return f"{kept}\x1b[0m" if "\x1b" in kept else kept
