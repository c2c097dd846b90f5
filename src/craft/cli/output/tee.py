"""What workers print, for the terminal of ``craft run``: whose output is shown, from where in their logs on.

Enters: which workers this host started and which have ended, as ``display.py`` hears it from the agent; their logs and
their ``generations.jsonl``. Leaves: lines with the id of their worker in front. Workers never wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from craft.protocol.generation_log import Entered
from craft.settings.run import TeeMode
from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import Tail
from craft.telemetry.text.log_tail import MAX_NEW_BYTES, LogTail, ScriptLines
from craft.telemetry.text.plain_text import one_line, output_line

_MIN_NEW_BYTES = 1 << 14


class LeaderOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of this host."""

    started: tuple[str, ...] = ()
    """All that were ever started here, in that order."""
    ended: frozenset[str] = frozenset()
    """Those whose processes are gone."""
    first_generation: int | None = None
    """The first one that this host has heard of."""


class _Shown:
    """The output of one worker."""

    def __init__(self, run_dir: RunDir, worker_id: str, offset: int, *, colours: bool) -> None:
        self.worker_id = worker_id
        name = str(run_dir.log(worker_id).relative_to(run_dir.path))
        self._tail = LogTail(run_dir.log(worker_id), offset, name)
        self._lines = ScriptLines()
        self._colours = colours

    @property
    def offset(self) -> int:
        return self._tail.offset

    def new_lines(self, now: float, *, final: bool, max_bytes: int) -> Iterable[str]:
        for line in self._tail.read(now, final=final, max_bytes=max_bytes):
            text = self._lines.shown(output_line(line, colours=self._colours))
            if text is not None:
                yield f"[{one_line(self.worker_id)}] {text}"


class Tee:
    """One thread owns it: that of the display."""

    def __init__(self, run_dir: RunDir, mode: TeeMode, *, alone: bool, colours: bool) -> None:
        """``alone``: whether this host has all workers of the job, so that its first one is the leader to be."""
        self._run_dir = run_dir
        self._mode = mode
        self._alone = alone
        self._colours = colours
        self._shown: dict[str, _Shown] = {}
        """In mode all: every worker. In mode leader: those that lead or led, each from where it began to."""
        self._leader: str | None = None
        self._led = 0
        """The newest generation whose leader is shown."""
        self._generations: dict[str, Tail] = {}
        self._entries: dict[int, dict[str, Entered]] = {}
        """How workers of this host entered each generation."""
        self._done: set[str] = set()
        """Workers that have ended, and all of whose files was read."""

    def new_lines(self, crowd: LeaderOrder, now: float, *, final: bool = False) -> list[str]:
        """Return what is to be printed now; ``final``: the workers have ended, and there will be no more."""
        if self._mode == "none":
            return []
        if self._mode == "leader":
            return self._of_leaders(crowd, now, final)
        lines: list[str] = []
        followed = self._followed(crowd)
        limit = max(_MIN_NEW_BYTES, MAX_NEW_BYTES // max(1, len(followed)))
        for worker_id in followed:
            if worker_id not in self._shown:
                self._show(worker_id, 0)
            over = final or worker_id in crowd.ended
            lines += self._shown[worker_id].new_lines(now, final=over, max_bytes=limit)
        return lines

    def _followed(self, crowd: LeaderOrder) -> list[str]:
        """Workers whose files may have grown since the last call; one that has ended is among them once more."""
        followed = [worker_id for worker_id in crowd.started if worker_id not in self._done]
        self._done |= crowd.ended
        return followed

    def _of_leaders(self, crowd: LeaderOrder, now: float, final: bool) -> list[str]:
        if self._leader is None and self._alone and crowd.started:
            # It is not the leader yet, but what it prints before the first generation is worth seeing.
            self._show(crowd.started[0], 0)
            self._leader = crowd.started[0]
        lines: list[str] = []
        # Before the logs are read: what a worker wrote before another one became the leader is then there.
        for leader, entered in self._new_leaders(crowd):
            self._led = entered.generation
            if leader != self._leader:
                lines += self._of(self._leader, now, final=True)
                first = crowd.first_generation is not None and entered.generation <= crowd.first_generation
                self._show(leader, 0 if first else entered.log_bytes)
                self._leader = leader
        return [*lines, *self._of(self._leader, now, final=final or self._leader in crowd.ended)]

    def _show(self, worker_id: str, offset: int) -> None:
        before = self._shown.get(worker_id)
        # One that leads again: nothing is shown twice.
        offset = offset if before is None else max(offset, before.offset)
        self._shown[worker_id] = _Shown(self._run_dir, worker_id, offset, colours=self._colours)

    def _of(self, worker_id: str | None, now: float, *, final: bool) -> list[str]:
        if worker_id is None:
            return []
        return list(self._shown[worker_id].new_lines(now, final=final, max_bytes=MAX_NEW_BYTES))

    def _new_leaders(self, crowd: LeaderOrder) -> list[tuple[str, Entered]]:
        """Workers of this host that became leaders since the last call, in order, and how each entered its generation."""
        for worker_id in self._followed(crowd):
            tail = self._generations.setdefault(worker_id, Tail(self._run_dir.generations(worker_id)))
            for line in tail.new_lines():
                entered = msgspec.convert(line, Entered, strict=False)
                self._entries.setdefault(entered.generation, {})[worker_id] = entered
        found = []
        for generation in sorted(self._entries):
            entries = self._entries[generation]
            leader = next((each.leader for each in entries.values() if each.leader), None)
            leader = leader or next(iter(next(iter(entries.values())).members), None)
            # One that is not here yet, or is on another host, is not shown.
            if generation > self._led and leader is not None and leader in entries:
                found.append((leader, entries[leader]))
        return found
