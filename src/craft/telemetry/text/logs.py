"""Logging of CRAFT's processes: a message cannot forge another line, control a terminal, or leak a secret."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, TextIO

from craft.telemetry.text.plain_text import indented

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    # Not generic at run time in Python 3.10.
    _StreamHandler = logging.StreamHandler

IN_FILES = "%(asctime)s %(name)s %(levelname)s %(message)s"
FOR_PEOPLE = "%(message)s"

_HIDDEN = "[hidden]"
# Also tokens that are not ours: of another job, or ours with a typo.
_BEARER = re.compile(r"\b(bearer\s+)[^\s'\"]+", re.IGNORECASE)
_secrets: set[str] = set()


def hide(secret: str) -> str:
    """Keep a secret out of all logs of this process; return it."""
    if secret:
        _secrets.add(secret)
    return secret


def redacted(text: str) -> str:
    """Return text without the secrets of this process, and without bearer tokens."""
    for secret in _secrets:
        text = text.replace(secret, _HIDDEN)
    return _BEARER.sub(rf"\1{_HIDDEN}", text)


class SafeFormatter(logging.Formatter):
    """Formats records of ``package`` and below (empty: all). Others, of a script, stay as they are."""

    def __init__(self, fmt: str, package: str = "") -> None:
        super().__init__(fmt)
        self._package = package

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if self._package and record.name.partition(".")[0] != self._package:
            return text
        return redacted(indented(text))


class _StandardError(_StreamHandler):
    """Writes to the current standard error, which may be replaced after this was made."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def begin(level: int, fmt: str, package: str = "") -> None:
    """Log to standard error from now on, unless logging is configured already."""
    handler = _StandardError()
    handler.setFormatter(SafeFormatter(fmt, package))
    logging.basicConfig(level=level, handlers=[handler])
