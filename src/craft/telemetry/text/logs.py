"""How processes of CRAFT log: what is logged cannot pass for another line, changes no terminal, and has no secret in it."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, TextIO

from craft.telemetry.text.plain_text import indented

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    # Python 3.10 does not know it with a type.
    _StreamHandler = logging.StreamHandler

IN_FILES = "%(asctime)s %(name)s %(levelname)s %(message)s"
FOR_PEOPLE = "%(message)s"

_HIDDEN = "[hidden]"
# Also of a token that is not ours: it may be that of another job, or ours with a slip of the pen in it.
_BEARER = re.compile(r"\b(bearer\s+)[^\s'\"]+", re.IGNORECASE)
_secrets: set[str] = set()


def hide(secret: str) -> str:
    """From now on a secret is in no log of this process; returns it."""
    if secret:
        _secrets.add(secret)
    return secret


def redacted(text: str) -> str:
    """Return text without the secrets of this process, and without bearer tokens."""
    for secret in _secrets:
        text = text.replace(secret, _HIDDEN)
    return _BEARER.sub(rf"\1{_HIDDEN}", text)


class SafeFormatter(logging.Formatter):
    """Formats records of ``package`` and below; an empty one stands for all. Others, of a script, are left as they are."""

    def __init__(self, fmt: str, package: str = "") -> None:
        super().__init__(fmt)
        self._package = package

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if self._package and record.name.partition(".")[0] != self._package:
            return text
        return redacted(indented(text))


class _StandardError(_StreamHandler):
    """Writes to what standard error is at that moment: it may be replaced after this was made."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def begin(level: int, fmt: str, package: str = "") -> None:
    """Log to standard error from now on, unless this process has a way to log already."""
    handler = _StandardError()
    handler.setFormatter(SafeFormatter(fmt, package))
    logging.basicConfig(level=level, handlers=[handler])
