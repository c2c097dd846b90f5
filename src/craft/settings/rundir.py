"""The run directory: one job's files, and how to find them. The only place that knows their names."""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from craft.protocol.errors import ConfigError

PREFIX = "craft-run"


@dataclass(frozen=True)
class RunDir:
    """Paths of one job's files. The directory itself is private (0700): it holds the token."""

    path: Path

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def address(self) -> Path:
        """Holds the lighthouse's URL while the job exists."""
        return self.path / "address"

    @property
    def certificate(self) -> Path:
        """A copy of the lighthouse's certificate, where it speaks TLS."""
        return self.path / "certificate.pem"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def generation(self) -> Path:
        """What the lighthouse made durable last."""
        return self.path / "generation.json"

    @property
    def lock(self) -> Path:
        """Locked by the living lighthouse of this directory; holds its process id."""
        return self.path / "lighthouse.lock"

    @property
    def lighthouse_log(self) -> Path:
        """What the lighthouse has to say to people, where ``craft run`` started it."""
        return self.path / "lighthouse.log"

    def worker(self, worker_id: str) -> Path:
        return self.path / "workers" / worker_id

    def log(self, worker_id: str) -> Path:
        return self.worker(worker_id) / "log"

    def stacks(self, worker_id: str) -> Path:
        """Where the worker writes the stacks of its threads when its agent asks for them."""
        return self.worker(worker_id) / "stacks"

    def steps(self, worker_id: str) -> Path:
        return self.worker(worker_id) / "steps.jsonl"

    def generations(self, worker_id: str) -> Path:
        return self.worker(worker_id) / "generations.jsonl"

    @property
    def diagnosis(self) -> Path:
        """What was collected when a worker hung, or when somebody asked: one folder each."""
        return self.path / "diagnosis"

    def create(self) -> RunDir:
        """Make the directory, readable by its owner alone; one that is there already stays as it is."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.path / "workers").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the run directory {self.path}: {error.strerror}") from None
        return self

    def read_address(self) -> str:
        """Return the lighthouse's URL, or say that there is none."""
        try:
            return self.address.read_text().strip()
        except OSError:
            raise ConfigError(
                f"{self.path} names no lighthouse (it has no file 'address'): is it a run directory?"
                " Name the right one with --dir, or start a job with 'craft run'"
            ) from None


def find_run(path: Path | None = None) -> RunDir:
    """Return the run directory at ``path``, or the newest ``craft-run*`` in the current directory."""
    if path is not None:
        if not path.is_dir():
            raise ConfigError(f"there is no run directory {path}: name one that 'craft run' made with --dir")
        return RunDir(path)
    runs = [found for found in Path.cwd().glob(f"{PREFIX}*") if found.is_dir()]
    if not runs:
        raise ConfigError(
            f"no run directory here: nothing named {PREFIX}* in {Path.cwd()}. Start a job with 'craft run', or name its"
            " directory with --dir"
        )
    return RunDir(max(runs, key=_age_key))


def _age_key(path: Path) -> tuple[float, str]:
    """Runs in the order in which their lighthouses were started; the name decides between equals."""
    address = path / "address"
    return (address.stat().st_mtime if address.exists() else path.stat().st_mtime, path.name)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file at once and durably, readable by its owner alone: a reader sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # One of this process id may have been killed right here: in containers they come again.
    temporary.unlink(missing_ok=True)
    try:
        write_over(temporary, data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path)


def write_over(path: Path, data: bytes) -> None:
    """Write a private file in place and durably; what is behind ``data`` stays. It is made if it is not there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        while data:
            # A disk that is nearly full takes a part, and refuses the rest.
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Make what was renamed to ``path`` durable: a power cut could bring the old one back after the new one was acted upon."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def claim(path: Path) -> RunDir:
    """Return the directory for a new job. One that belongs to another job, living or ended, is refused."""
    run = RunDir(path)
    if run.lock.exists() and _is_locked(run.lock):
        raise ConfigError(
            f"{path} belongs to a job that is running: choose another --dir, or end it with 'craft stop --dir {path}'"
        )
    if run.journal.exists():
        raise ConfigError(f"{path} holds the files of an earlier job: choose another --dir, or remove it")
    return run.create()


def claim_new() -> RunDir:
    """Return a directory for a new job, named by the time, that nobody else has: several may start in the same second."""
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
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
