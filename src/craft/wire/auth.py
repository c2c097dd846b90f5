"""The bearer token: made once per job, kept in a private file, sent with every request, compared in constant time."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from craft.protocol.errors import ConfigError
from craft.settings.rundir import write_private

TOKEN_BYTES = 32
MIN_TOKEN_CHARS = 16


def make_token() -> str:
    """Return a new random token of URL-safe characters."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def write_token(path: Path, token: str) -> None:
    """Write the token with mode 0600, whole or not at all."""
    try:
        write_private(path, token.encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the token file {path}: {error.strerror}") from None


def read_token(path: Path) -> str:
    """Return the token in ``path``, or say what is wrong with the file."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise ConfigError(f"there is no token file {path}: it is made by 'craft run' or 'craft lighthouse'") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token file {path}: {error}") from None
    if len(token) < MIN_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {path} is not usable: it must be at least {MIN_TOKEN_CHARS} printable characters without"
            " spaces; remove the file to have a new one made"
        )
    return token


def ensure_token(path: Path) -> str:
    """Return the token in ``path``; make one if the file is not there."""
    if path.exists():
        return read_token(path)
    token = make_token()
    write_token(path, token)
    return token


def state_key(token: str) -> str:
    """Return the key, in hexadecimal, by which workers know each other: made from the token, which it does not give away."""
    return hmac.new(token.encode(), b"craft state", "sha256").hexdigest()


def bearer(token: str) -> dict[str, str]:
    """Return the header that carries the token."""
    return {"Authorization": f"Bearer {token}"}


def accepts(token: str, header: str | None) -> bool:
    """Whether an ``Authorization`` header carries the token; takes the same time for every wrong one."""
    scheme, _, given = (header or "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer"
