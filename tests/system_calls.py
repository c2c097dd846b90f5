"""Make system calls fail, or take long, in production processes: a test's switch, which production code does not know.

Enters: rules, in a file that a test can change at any time. Leaves: an ``OSError``, a short write or a delay where a rule fits,
and one line in ``struck`` for each call that it changed. In the processes of a job, Python loads this module at its start:
``environment`` makes the variables for that. In the test's own process, ``failing`` does the same for a while.

It reaches calls that Python code makes through ``os``, ``open`` and ``socket``, which is all that CRAFT itself makes. Calls of
torch and of C extensions are not reached: ``tests.small_disk``, signals and ``tests/integration/network.py`` are for those.
"""

from __future__ import annotations

import builtins
import errno
import fnmatch
import functools
import io
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "CRAFT_TEST_SYSTEM_CALLS"
"""Names the folder with the rules."""
_RULES = "rules.json"
_STRUCK = "struck.jsonl"
_REAL_OPEN, _REAL_WRITE, _REAL_STAT = os.open, os.write, os.stat
_REAL_CLOSE, _REAL_READLINK = os.close, os.readlink
_REAL_IO_OPEN = io.open


@dataclass(frozen=True)
class Rule:
    """Which calls it changes, and how."""

    call: str
    """open, read, write, fsync, rename, link, fork, pipe, socket, accept, connect, or ``*`` for any. Reading and writing
    includes files of ``open``; fork includes what ``subprocess`` starts."""
    error: str = ""
    """The name of the error with which it fails, such as ENOSPC; empty: it does not fail."""
    path: str = "*"
    """A pattern (``*/metrics.jsonl``) for the path of the file; a rename fits by either of its paths."""
    process: str = "*"
    """A pattern for the kind of process: agent, keeper, lighthouse, forkserver, worker, other."""
    after: int = 0
    """In each process the first so many calls that fit are left alone."""
    times: int | None = None
    """And of the others only the first so many are changed; None: all."""
    probability: float = 1.0
    """Of those this share, by chance; ``seed`` fixes which."""
    seed: int = 0
    delay_s: float = 0.0
    """It takes this long before it fails or not."""
    short: bool = False
    """A write takes only half of the bytes, at least one."""


class Switch:
    """The rules of one folder. Tests ``set`` them; the processes of the job look at the file before each call."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.set()

    def set(self, *rules: Rule) -> None:
        """From now on these rules hold, and no others."""
        # Renamed: a process never reads half of it.
        new = self.folder / f"{_RULES}.new"
        new.write_text(json.dumps([asdict(rule) for rule in rules]))
        new.replace(self.folder / _RULES)

    def environment(self) -> dict[str, str]:
        """Variables with which a process, and all that it starts, obeys the rules."""
        here = Path(__file__).resolve().parent
        path = os.pathsep.join([str(here / "site"), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {VARIABLE: str(self.folder), "PYTHONPATH": path}

    def struck(self, call: str = "", process: str = "") -> list[dict[str, Any]]:
        """The calls that were changed so far: call, path, error, process and pid of each."""
        file = self.folder / _STRUCK
        lines = file.read_text().splitlines() if file.exists() else []
        found = [json.loads(line) for line in lines]
        return [each for each in found if call in ("", each["call"]) and process in ("", each["process"])]


@contextmanager
def failing(folder: Path, *rules: Rule) -> Iterator[Switch]:
    """Have rules hold in this process, until the end of the block."""
    switch = Switch(folder)
    switch.set(*rules)
    undo = install(folder)
    try:
        yield switch
    finally:
        undo()


def kind_of_process(arguments: Sequence[str]) -> str:
    """The kind of process that a command line starts."""
    if "craft.agent.linux.forkserver" in arguments:
        return "forkserver"
    if "lighthouse" in arguments:
        return "keeper" if "--keep" in arguments else "lighthouse"
    return "agent" if "run" in arguments and any("craft" in each for each in arguments) else "other"


_CHILDREN = {"forkserver": "worker", "keeper": "lighthouse"}
"""What becomes of a process's forks."""


def each_failure(folder: Path, work: Callable[[], object], error: str, path: str = "*") -> Iterator[Exception | None]:
    """Do the work again and again, with its first call failing, then its second alone, and so on to the last.

    Yields what each round raised, or None, while all calls work again.
    """
    for number in itertools.count():
        raised: Exception | None = None
        with failing(folder, Rule("*", error, path=path, after=number, times=1)) as switch:
            before = len(switch.struck())
            try:
                work()
            except Exception as failure:  # noqa: BLE001  (the test looks at it)
                raised = failure
            struck = len(switch.struck()) > before
        if not struck:
            assert number, f"the work makes no call for {path}"
            assert raised is None, raised
            return
        yield raised


class _Rules:
    """Reads the rules of a folder again whenever they change, and applies them. Any thread may call it."""

    def __init__(self, folder: Path) -> None:
        self._file = str(folder / _RULES)
        self._struck = str(folder / _STRUCK)
        self.process = kind_of_process(sys.orig_argv)
        self._read: tuple[int, int] | None = None
        self._rules: list[tuple[Rule, random.Random, list[int]]] = []
        # A thread that applies a rule itself opens and writes files.
        self._inside = threading.local()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.process = _CHILDREN.get(self.process, self.process)
        self._read = None

    def concern(self, *calls: str) -> bool:
        """Whether there is a rule for one of these calls."""
        self._refresh()
        return any(rule.call in (*calls, "*") for rule, _, _ in self._rules)

    def apply(self, call: str, *paths: Any) -> Rule | None:
        """Wait or fail as the rules say; returns the rule that fits the call, if one does."""
        if getattr(self._inside, "busy", False):
            return None
        self._inside.busy = True
        try:
            rule = self._fitting(call, paths)
            if rule is None:
                return None
            self._write_down(call, paths, rule)
        finally:
            self._inside.busy = False
        time.sleep(rule.delay_s)
        if rule.error:
            number: int = getattr(errno, rule.error)
            raise OSError(number, os.strerror(number))
        return rule

    def _fitting(self, call: str, paths: Sequence[Any]) -> Rule | None:
        self._refresh()
        mine = [
            each
            for each in self._rules
            if each[0].call in (call, "*") and fnmatch.fnmatch(self.process, each[0].process)
        ]
        if not mine:
            return None
        names = [_name(path) for path in paths] or [""]
        for rule, chance, used in mine:
            if not any(fnmatch.fnmatch(name, rule.path) for name in names):
                continue
            used[0] += 1
            last = sys.maxsize if rule.times is None else rule.after + rule.times
            if rule.after < used[0] <= last and chance.random() < rule.probability:
                return rule
        return None

    def _refresh(self) -> None:
        found = _REAL_STAT(self._file)
        if (found.st_ino, found.st_mtime_ns) != self._read:
            self._read = (found.st_ino, found.st_mtime_ns)
            with _REAL_IO_OPEN(self._file) as file:
                rules = [Rule(**each) for each in json.load(file)]
            self._rules = [(rule, random.Random(rule.seed), [0]) for rule in rules]

    def _write_down(self, call: str, paths: Sequence[Any], rule: Rule) -> None:
        line = {"call": call, "path": _name(paths[0]) if paths else "", "error": rule.error, "process": self.process}
        fd = _REAL_OPEN(self._struck, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        _REAL_WRITE(fd, json.dumps({**line, "pid": os.getpid(), "time": time.time()}).encode() + b"\n")
        _REAL_CLOSE(fd)


def _name(path: Any) -> str:
    """A path, or that of an open file."""
    if isinstance(path, int):
        try:
            return _REAL_READLINK(f"/proc/self/fd/{path}")
        except OSError:
            return ""
    return os.path.abspath(os.fsdecode(path))


def install(folder: Path) -> Callable[[], None]:
    """Have this process, and all that it forks, obey the rules in ``folder``; returns what undoes that."""
    rules = _Rules(folder)
    undone = [
        (owner, name, _replace(owner, name, make(rules, call, getattr(owner, name))))
        for call, make, owner, names in _CALLS
        for name in names.split()
    ]

    def undo() -> None:
        for owner, name, real in reversed(undone):
            setattr(owner, name, real)

    return undo


def _replace(owner: Any, name: str, wrapped: Any) -> Any:
    real = getattr(owner, name)
    setattr(owner, name, functools.wraps(real)(wrapped))
    return real


def _plain(rules: _Rules, call: str, real: Any) -> Any:
    def wrapped(*given: Any, **more: Any) -> Any:
        rules.apply(call)
        return real(*given, **more)

    return wrapped


def _making_socket(rules: _Rules, call: str, real: Any) -> Any:
    def wrapped(self: socket.socket, *given: Any, **more: Any) -> None:
        # One that is made of an open file is no new one.
        if more.get("fileno") is None and len(given) < 4:
            rules.apply(call)
        real(self, *given, **more)

    return wrapped


def _with_fd(rules: _Rules, call: str, real: Any) -> Any:
    def wrapped(fd: int, *given: Any, **more: Any) -> Any:
        rules.apply(call, fd)
        return real(fd, *given, **more)

    return wrapped


def _writing(rules: _Rules, call: str, real: Any) -> Any:
    def wrapped(fd: int, data: Any, *given: Any) -> Any:
        rule = rules.apply(call, fd)
        return real(fd, _half(data) if rule is not None and rule.short else data, *given)

    return wrapped


def _half(data: Any) -> memoryview:
    whole = memoryview(data).cast("B")
    return whole[: max(1, len(whole) // 2)]


def _with_paths(rules: _Rules, call: str, real: Any) -> Any:
    def wrapped(source: Any, target: Any, **more: Any) -> Any:
        rules.apply(call, source, target)
        return real(source, target, **more)

    return wrapped


def _opening(rules: _Rules, call: str, real: Any) -> Any:
    def wrapped(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        folder = "" if dir_fd is None else _name(dir_fd)
        rules.apply(call, os.path.join(folder, os.fsdecode(path)))
        opened: int = real(path, flags, mode, dir_fd=dir_fd)
        return opened

    return wrapped


def _opening_file(rules: _Rules, call: str, real: Any) -> Any:
    def wrapped(file: Any, mode: str = "r", buffering: int = -1, *text: Any, **more: Any) -> Any:
        if not isinstance(file, int):
            rules.apply(call, file)
        if not rules.concern("read", "write"):
            return real(file, mode, buffering, *text, **more)
        encoding, errors, newline = (*text, None, None, None)[:3]
        raw = _Raw(rules, file, mode.replace("b", "").replace("t", ""), more.get("closefd", True), more.get("opener"))
        if buffering == 0:
            return raw
        kind: Any = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        buffered = kind(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(
            buffered,
            more.get("encoding", encoding),
            more.get("errors", errors),
            more.get("newline", newline),
            line_buffering=buffering == 1,
        )

    return wrapped


class _Raw(io.FileIO):
    """A file of ``open`` that obeys the rules."""

    def __init__(self, rules: _Rules, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        super().__init__(file, mode, closefd, opener)
        self._rules = rules

    def readinto(self, buffer: Any, /) -> int | None:
        self._rules.apply("read", self.fileno())
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._rules.apply("read", self.fileno())
        return super().readall()

    def read(self, size: int | None = -1, /) -> bytes:
        self._rules.apply("read", self.fileno())
        return super().read(-1 if size is None else size)

    def write(self, data: Any, /) -> int:
        rule = self._rules.apply("write", self.fileno())
        return super().write(_half(data) if rule is not None and rule.short else data)


_CALLS: tuple[tuple[str, Callable[[_Rules, str, Any], Any], Any, str], ...] = (
    ("fsync", _with_fd, os, "fsync fdatasync"),
    ("read", _with_fd, os, "read pread readv preadv"),
    ("write", _writing, os, "write pwrite"),
    ("rename", _with_paths, os, "rename replace"),
    ("link", _with_paths, os, "link"),
    ("open", _opening, os, "open"),
    ("open", _opening_file, io, "open"),
    ("open", _opening_file, builtins, "open"),
    ("pipe", _plain, os, "pipe pipe2"),
    ("fork", _plain, os, "fork"),
    ("fork", _plain, subprocess.Popen, "_execute_child"),
    ("socket", _making_socket, socket.socket, "__init__"),
    ("accept", _plain, socket.socket, "accept"),
    ("connect", _plain, socket.socket, "connect"),
)
"""The calls that rules are about: what each is called there, and where it is in Python."""
