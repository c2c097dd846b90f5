"""The run directory: paths of one job's files, how to find and claim it. The only place that knows their names."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from craft.protocol.errors import ConfigError
from craft.settings.files.private_files import is_own_folder, make_folder, open_private, own_folder, read_private

logger = logging.getLogger(__name__)

PREFIX = "craft-run"


class RunDir:
    """Paths of one job's files. The directory is private (0700), because it holds the token."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token = path / "token"
        self.address = path / "address"
        """Holds the lighthouse's URL while the job exists."""
        self.certificate = path / "certificate.pem"
        """A copy of the lighthouse's certificate, if it uses TLS."""
        self.journal = path / "journal.jsonl"
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.generation = path / "generation.json"
        """The state that the lighthouse made durable last."""
        self.lock = path / "lighthouse.lock"
        """Locked by the living lighthouse of this directory; holds its process id."""
        self.lighthouse_log = path / "lighthouse.log"
        """Output of a lighthouse that ``craft run`` started."""
        self.diagnosis = path / "diagnosis"
        """Diagnosis bundles of hangs and of ``craft debug``, one folder each."""

    def worker(self, worker_id: str) -> Path:
        return self.path / "workers" / worker_id

    def log(self, worker_id: str) -> Path:
        return self.worker(worker_id) / "log"

    def stacks(self, worker_id: str) -> Path:
        """Where the worker writes the stacks of its threads at its agent's request."""
        return self.worker(worker_id) / "stacks"

    def steps(self, worker_id: str) -> Path:
        return self.worker(worker_id) / "steps.jsonl"

    def generations(self, worker_id: str) -> Path:
        return self.worker(worker_id) / "generations.jsonl"

    def create(self) -> RunDir:
        """Make the directory private to this user, also if it exists; refuse one of another user."""
        with _explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            before = make_folder(self.path)
            make_folder(self.path / "workers")
        if before != 0o700:
            logger.warning("the run directory %s had mode %04o, and has mode 0700 now", self.path, before)
        return self

    def check(self) -> RunDir:
        """Raise ConfigError if another user owns the directory or can write to it: token and address may be planted."""
        try:
            with own_folder(self.path):
                return self
        except OSError as error:
            raise ConfigError(f"the run directory {self.path} cannot be trusted: {error.strerror}") from None

    def read_address(self) -> str:
        """Return the lighthouse's URL; raise ConfigError if there is none."""
        try:
            return read_private(self.address).decode().strip()
        except PermissionError as error:
            raise ConfigError(f"cannot read {self.address}: {error.strerror}") from None
        except (OSError, UnicodeDecodeError):
            raise ConfigError(
                f"{self.path} names no lighthouse (it has no file 'address'): is it a run directory?"
                " Name the right one with --dir, or start a job with 'craft run'"
            ) from None


START_ANEW = "Start the job again in another directory, with --resume if it takes checkpoints"


class HeldRunDir:
    """The run directory of a running job: notices when it is removed or replaced."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.path
        # Kept open for the life of this process, so that no other directory gets the same inode.
        self._fd = os.open(run.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def trouble(self) -> str:
        """Return what happened to it, as the beginning of a sentence; empty: nothing."""
        try:
            if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                return ""
            what = "replaced by another one"
        except FileNotFoundError:
            what = "removed or moved away"
        except OSError:
            # A file system that does not answer for a moment is not a directory that was removed.
            return ""
        return f"the run directory {self._path} was {what} while the job ran"


def find_run(path: Path | None = None) -> RunDir:
    """Return the run directory at ``path``, or the newest ``craft-run*`` in the current directory."""
    if path is not None:
        if not path.is_dir():
            raise ConfigError(f"there is no run directory {path}: name one that 'craft run' made with --dir")
        return RunDir(path)
    # In a folder that others can write to, ignore their directories.
    runs = [found for found in Path.cwd().glob(f"{PREFIX}*") if found.is_dir() and is_own_folder(found)]
    if not runs:
        raise ConfigError(
            f"no run directory here: nothing named {PREFIX}* in {Path.cwd()}. Start a job with 'craft run', or name its"
            " directory with --dir"
        )
    return RunDir(max(runs, key=_age_key))


def _age_key(path: Path) -> tuple[float, str]:
    """Return a sort key: when the lighthouse was started, then the name."""
    address = path / "address"
    return (address.stat().st_mtime if address.exists() else path.stat().st_mtime, path.name)


def claim(path: Path) -> RunDir:
    """Return the directory for a new job; refuse one that belongs to another job, running or ended."""
    run = RunDir(path)
    if os.path.lexists(path):
        # First: nothing in a directory of another user is trusted.
        with _explained(path), own_folder(path):
            pass
    if run.lock.exists() and _is_locked(run.lock):
        raise ConfigError(
            f"{path} belongs to a job that is running: choose another --dir, or end it with 'craft stop --dir {path}'"
        )
    if run.journal.exists():
        raise ConfigError(f"{path} holds the files of an earlier job: choose another --dir, or remove it")
    return run.create()


def claim_new() -> RunDir:
    """Return an unused directory for a new job, named by the time: several may start in the same second."""
    stamp = f"{PREFIX}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain((stamp,), (f"{stamp}-{number}" for number in itertools.count(2)))
    return claim(next(path for path in map(Path, names) if _is_made(path)))


def _is_made(path: Path) -> bool:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"cannot make the run directory {path}: {error.strerror}") from None
    return True


def _is_locked(path: Path) -> bool:
    try:
        fd = open_private(path, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Explain why a run directory cannot be made, or cannot be private to this user."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EPERM:
            raise ConfigError(f"cannot make the run directory {path}: {error.strerror}") from None
        raise ConfigError(
            f"{error.filename or path} cannot be used as a run directory: {error.strerror}. It holds the token that controls the"
            " job. Name a directory that does not exist yet with --dir; it is made with mode 0700"
        ) from None
