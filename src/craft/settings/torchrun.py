"""What torchrun tells the processes that it starts, and what they need to find the job that they belong to."""

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
    """A process that torchrun started, as it knows itself."""

    run_id: str
    lighthouse: str
    run_dir: Path
    """Where the files of this host's workers go."""
    local_rank: int
    local_world_size: int
    restarts: int
    """How often torchrun has started its workers anew."""


class LighthousePlace(msgspec.Struct, frozen=True, kw_only=True):
    """The lighthouse that the environment names, and what this host is called there."""

    url: str
    token_file: Path
    tls_ca: Path | None
    host: str


def lighthouse() -> LighthousePlace:
    """The lighthouse of the job that a torchrun is to start workers for; ConfigError if none is named."""
    around = os.environ
    for name, what in ((_LIGHTHOUSE, "the URL of a running lighthouse"), (_TOKEN_FILE, "the file with its token")):
        if name not in around:
            raise ConfigError(
                f"{name} is not set: it names {what} ('craft lighthouse --workers N --dir DIR' starts one)"
            )
    return LighthousePlace(
        url=around[_LIGHTHOUSE],
        token_file=Path(around[_TOKEN_FILE]),
        tls_ca=Path(around["CRAFT_TLS_CA"]) if "CRAFT_TLS_CA" in around else None,
        host=around.get("CRAFT_HOST") or socket.gethostname(),
    )


def launched() -> Launched | None:
    """Whether torchrun started this process as a worker of a lighthouse's job; None if not, or if it has an agent already."""
    around = os.environ
    if _RUN_ID not in around or _LIGHTHOUSE not in around or _SOCKET in around:
        return None
    if _TOKEN_FILE not in around:
        raise ConfigError(f"{_LIGHTHOUSE} names a lighthouse: set {_TOKEN_FILE} to the file with its token, too")
    run_id = around[_RUN_ID]
    return Launched(
        run_id=run_id,
        lighthouse=around[_LIGHTHOUSE],
        run_dir=Path(around.get(_RUN_DIR, f"{PREFIX}-torchrun-{run_id}")).absolute(),
        local_rank=_number("LOCAL_RANK"),
        local_world_size=max(1, _number("LOCAL_WORLD_SIZE")),
        restarts=_number("TORCHELASTIC_RESTART_COUNT"),
    )


def check_alone() -> None:
    """Raise ConfigError where every process of a torchrun would become a job of its own."""
    around = os.environ
    if _RUN_ID in around and _SOCKET not in around and _LIGHTHOUSE not in around and _number("WORLD_SIZE") > 1:
        raise ConfigError(
            f"torchrun started this process as one of {around['WORLD_SIZE']}, and {_LIGHTHOUSE} is not set: each would be a"
            f" job of its own. Start 'craft lighthouse --workers N --dir DIR', and set {_LIGHTHOUSE} to its URL and"
            f" {_TOKEN_FILE} to DIR/token"
        )


def hash_seed_warning() -> str:
    """What to say where the order of sets may differ from worker to worker; empty where PYTHONHASHSEED fixes it.

    ``craft run`` sets it for its workers. A process that torchrun started cannot: Python reads it at its start.
    """
    if os.environ.get(_HASH_SEED, "random") not in ("", "random"):
        return ""
    return (
        f"{_HASH_SEED} is not set: the order of a set of strings differs from worker to worker and from run to run, and so may"
        f" the bits of a script that goes by it. Start the workers with '{_HASH_SEED}=0 torchrun ...', on every host"
    )


def take_over(environment: Mapping[str, str]) -> None:
    """From here on this process has an agent, which told it all this."""
    os.environ.update(environment)


def _number(name: str) -> int:
    given = os.environ.get(name, "0")
    return int(given) if given.isdigit() else 0
