"""Seal small files with a checksum, so that damage is detected.

In a JSON object the checksum is the last key; in TOML it is a comment in the last line. It covers all bytes before it.
Readers that do not know it see the same values.
"""

from __future__ import annotations

import hashlib
import re

_COMMENT = re.compile(rb"(.*)# checksum: ([0-9a-f]{32})\n", re.DOTALL)
_SEAL = re.compile(rb'(.*),"checksum":"([0-9a-f]{32})"\}', re.DOTALL)


class Damaged(ValueError):
    """The checksum of a record does not match its bytes."""


def seal(record: bytes) -> bytes:
    """Return a JSON object with its checksum added; it must have other keys."""
    body = record.removesuffix(b"}")
    return b'%b,"checksum":"%b"}' % (body, _checksum(body))


def is_sealed(data: bytes) -> bool:
    """Return whether a record has a checksum; raise Damaged if it is wrong. Earlier versions wrote none."""
    return _fits(_SEAL.fullmatch(data.strip()))


def seal_toml(text: str) -> bytes:
    """Return a TOML document with its checksum in a final comment."""
    body = text.encode()
    return b"%b# checksum: %b\n" % (body, _checksum(body))


def is_sealed_toml(data: bytes) -> bool:
    """Return whether a document has a checksum; raise Damaged if it is wrong."""
    return _fits(_COMMENT.fullmatch(data))


def _fits(found: re.Match[bytes] | None) -> bool:
    if found is None:
        return False
    if _checksum(found.group(1)) != found.group(2):
        raise Damaged("its checksum does not match its content")
    return True


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()
