"""Make, store and compare the job's bearer token."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from craft.protocol.errors import ConfigError
from craft.settings.files.private_files import read_named, read_private, write_private
from craft.settings.rundir import RunDir
from craft.telemetry.text.logs import hide

TOKEN_BYTES = 32
MIN_TOKEN_CHARS = 16


def make_token() -> str:
    """Return a new random token of URL-safe characters."""
    return hide(secrets.token_urlsafe(TOKEN_BYTES))


def write_token(path: Path, token: str, *, named: bool = True) -> None:
    """Write the token with mode 0600, atomically; ``named``: to a file that the user named, in any folder."""
    try:
        write_private(path, token.encode() + b"\n", shared=named)
    except OSError as error:
        raise ConfigError(f"cannot write the token file {path}: {error.strerror}") from None


def read_token(path: Path, *, named: bool = True) -> str:
    """Return the token in ``path``, or raise ConfigError; ``named``: by the user, not that of a run directory."""
    try:
        token = (read_named(path) if named else read_private(path)).decode("ascii").strip()
    except FileNotFoundError:
        raise ConfigError(f"there is no token file {path}: 'craft run' or 'craft lighthouse' makes it") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the token file {path}: {reason}") from None
    if len(token) < MIN_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {path} is not usable: it must be at least {MIN_TOKEN_CHARS} printable characters without"
            " spaces; remove the file to get a new one"
        )
    return hide(token)


def ensure_token(path: Path, *, named: bool = True) -> str:
    """Return the token in ``path``; make one if the file does not exist."""
    if os.path.lexists(path):
        return read_token(path, named=named)
    token = make_token()
    write_token(path, token, named=named)
    return token


def own_token(run: RunDir, named: Path | None) -> str:
    """Return the token of a lighthouse in ``run``: from the file that the user named, or else from the run directory."""
    return ensure_token(named) if named is not None else ensure_token(run.token, named=False)


def state_key(token: str) -> str:
    """Return the key, in hexadecimal, by which workers authenticate each other: derived one-way from the token."""
    return hide(hmac.new(token.encode(), b"craft state", "sha256").hexdigest())


def bearer(token: str) -> dict[str, str]:
    """Return the header that carries the token."""
    return {"Authorization": f"Bearer {token}"}


def accepts(token: str, header: str | None) -> bool:
    """Return whether an ``Authorization`` header carries the token, in constant time."""
    scheme, _, given = (header or "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer"
