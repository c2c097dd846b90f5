"""Read torchrun's environment variables, and those by which its processes find their job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from craft.protocol.errors import ConfigError
from craft.settings.rundir import PREFIX

_RUN_ID = "TORCHELASTIC_RUN_ID"
_HASH_SEED = "PYTHONHASHSEED"
_LIGHTHOUSE, _TOKEN_FILE, _RUN_DIR, _SOCKET = "CRAFT_LIGHTHOUSE", "CRAFT_TOKEN_FILE", "CRAFT_DIR", "CRAFT_SOCKET"


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A process that torchrun started."""

    run_id: str
    lighthouse: str
    run_dir: Path
    """Directory for the files of this host's workers."""
    local_rank: int
    local_world_size: int
    restarts: int
    """How often torchrun has restarted its workers."""


class LighthousePlace(msgspec.Struct, frozen=True, kw_only=True):
    """The lighthouse that the environment names, and the name of this host there."""

    url: str
    token_file: Path
    tls_ca: Path | None
    host: str


def lighthouse() -> LighthousePlace:
    """Return the lighthouse that torchrun's workers are for; raise ConfigError if none is named."""
    environment = os.environ
    for name, what in ((_LIGHTHOUSE, "the URL of a running lighthouse"), (_TOKEN_FILE, "the file with its token")):
        if name not in environment:
            raise ConfigError(
                f"{name} is not set: it names {what} ('craft lighthouse --workers N --dir DIR' starts one)"
            )
    return LighthousePlace(
        url=environment[_LIGHTHOUSE],
        token_file=Path(environment[_TOKEN_FILE]),
        tls_ca=Path(environment["CRAFT_TLS_CA"]) if "CRAFT_TLS_CA" in environment else None,
        host=environment.get("CRAFT_HOST") or socket.gethostname(),
    )


def launched() -> Launched | None:
    """Return the settings of a worker that torchrun started for a lighthouse; None for others, or if it has an agent."""
    environment = os.environ
    if _RUN_ID not in environment or _LIGHTHOUSE not in environment or _SOCKET in environment:
        return None
    if _TOKEN_FILE not in environment:
        raise ConfigError(f"{_LIGHTHOUSE} names a lighthouse: set {_TOKEN_FILE} to the file with its token, too")
    run_id = environment[_RUN_ID]
    return Launched(
        run_id=run_id,
        lighthouse=environment[_LIGHTHOUSE],
        run_dir=Path(environment.get(_RUN_DIR, f"{PREFIX}-torchrun-{run_id}")).absolute(),
        local_rank=_number("LOCAL_RANK"),
        local_world_size=max(1, _number("LOCAL_WORLD_SIZE")),
        restarts=_number("TORCHELASTIC_RESTART_COUNT"),
    )


def check_alone() -> None:
    """Raise ConfigError if every process of a torchrun would become a separate job."""
    environment = os.environ
    if _RUN_ID in environment and not {_SOCKET, _LIGHTHOUSE} & environment.keys() and _number("WORLD_SIZE") > 1:
        raise ConfigError(
            f"torchrun started this process as one of {environment['WORLD_SIZE']}, and {_LIGHTHOUSE} is not set: each would be"
            f" a separate job. Start 'craft lighthouse --workers N --dir DIR', and set {_LIGHTHOUSE} to its URL and"
            f" {_TOKEN_FILE} to DIR/token"
        )


def hash_seed_warning() -> str:
    """Return a warning if the order of sets may differ between workers; empty if PYTHONHASHSEED fixes it.

    ``craft run`` sets it for its workers. A process that torchrun started cannot: Python reads it at startup.
    """
    if os.environ.get(_HASH_SEED, "random") not in ("", "random"):
        return ""
    return (
        f"{_HASH_SEED} is not set: the order of a set of strings differs between workers and between runs, and so may the bits"
        f" of a script that depends on it. Start the workers with '{_HASH_SEED}=0 torchrun ...', on every host"
    )


def take_over(environment: Mapping[str, str]) -> None:
    """Adopt the environment that the agent gave to this process."""
    os.environ.update(environment)


def _number(name: str) -> int:
    given = os.environ.get(name, "0")
    return int(given) if given.isdigit() else 0
