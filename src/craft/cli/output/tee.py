"""Select the output of workers for the terminal of ``craft run``: whose, and from where in their logs on.

In: the workers that this host started and that have ended, from ``display.py``; their logs and their ``generations.jsonl``.
Out: lines with the worker's id in front. Workers never wait for it.
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
    """All that were ever started here, in order."""
    ended: frozenset[str] = frozenset()
    """Those whose processes have ended."""
    first_generation: int | None = None
    """The first generation that this host has heard of."""


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
        """``alone``: this host has all workers of the job, so that its first one will be the leader."""
        self._run_dir = run_dir
        self._mode = mode
        self._alone = alone
        self._colours = colours
        self._shown: dict[str, _Shown] = {}
        """In mode all: every worker. In mode leader: current and former leaders, each from where it became one."""
        self._leader: str | None = None
        self._led = 0
        """The newest generation whose leader is shown."""
        self._generations: dict[str, Tail] = {}
        self._entries: dict[int, dict[str, Entered]] = {}
        """How workers of this host entered each generation."""
        self._done: set[str] = set()
        """Workers that have ended, and whose files were read completely."""

    def new_lines(self, order: LeaderOrder, now: float, *, final: bool = False) -> list[str]:
        """Return the lines to print now; ``final``: the workers have ended."""
        if self._mode == "none":
            return []
        if self._mode == "leader":
            return self._of_leaders(order, now, final)
        lines: list[str] = []
        followed = self._followed(order)
        limit = max(_MIN_NEW_BYTES, MAX_NEW_BYTES // max(1, len(followed)))
        for worker_id in followed:
            if worker_id not in self._shown:
                self._show(worker_id, 0)
            over = final or worker_id in order.ended
            lines += self._shown[worker_id].new_lines(now, final=over, max_bytes=limit)
        return lines

    def _followed(self, order: LeaderOrder) -> list[str]:
        """Return workers whose files may have grown since the last call; one that has ended is included once more."""
        followed = [worker_id for worker_id in order.started if worker_id not in self._done]
        self._done |= order.ended
        return followed

    def _of_leaders(self, order: LeaderOrder, now: float, final: bool) -> list[str]:
        if self._leader is None and self._alone and order.started:
            # Not the leader yet, but its output before the first generation is worth showing.
            self._show(order.started[0], 0)
            self._leader = order.started[0]
        lines: list[str] = []
        # Before the logs are read: output before a change of leader is then complete.
        for leader, entered in self._new_leaders(order):
            self._led = entered.generation
            if leader != self._leader:
                lines += self._of(self._leader, now, final=True)
                first = order.first_generation is not None and entered.generation <= order.first_generation
                self._show(leader, 0 if first else entered.log_bytes)
                self._leader = leader
        return [*lines, *self._of(self._leader, now, final=final or self._leader in order.ended)]

    def _show(self, worker_id: str, offset: int) -> None:
        before = self._shown.get(worker_id)
        # It leads again: show nothing twice.
        offset = offset if before is None else max(offset, before.offset)
        self._shown[worker_id] = _Shown(self._run_dir, worker_id, offset, colours=self._colours)

    def _of(self, worker_id: str | None, now: float, *, final: bool) -> list[str]:
        if worker_id is None:
            return []
        return list(self._shown[worker_id].new_lines(now, final=final, max_bytes=MAX_NEW_BYTES))

    def _new_leaders(self, order: LeaderOrder) -> list[tuple[str, Entered]]:
        """Return workers of this host that became leaders since the last call, in order, with their entries."""
        for worker_id in self._followed(order):
            tail = self._generations.setdefault(worker_id, Tail(self._run_dir.generations(worker_id)))
            for line in tail.new_lines():
                entered = msgspec.convert(line, Entered, strict=False)
                self._entries.setdefault(entered.generation, {})[worker_id] = entered
        found = []
        for generation in sorted(self._entries):
            entries = self._entries[generation]
            leader = next((each.leader for each in entries.values() if each.leader), None)
            leader = leader or next(iter(next(iter(entries.values())).members), None)
            # One that is not known yet, or is on another host, is not shown.
            if generation > self._led and leader is not None and leader in entries:
                found.append((leader, entries[leader]))
        return found
