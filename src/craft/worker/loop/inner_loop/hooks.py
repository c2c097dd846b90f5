"""Step hooks of techniques, called at the safe points of a step in the techniques' order.

``TrainingLoop``, ``Step`` and ``Attempts`` call ``reach``. A point without hooks costs one dictionary lookup. Hooks of
built-in techniques may raise, to end the job. A hook of another package that raises is removed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from craft.decide.step.ledger import Ledger
from craft.decide.techniques import BUILT_IN
from craft.decide.techniques.technique import POINTS, Chosen, Hooks, Moment
from craft.protocol.errors import ConfigError
from craft.protocol.events import AnyNote, ConditionSeen, TechniqueFailed
from craft.settings.worker import WorkerSettings
from craft.worker.report.reporter import Reporter

logger = logging.getLogger(__name__)

_MOST_PER_S = 10
"""Most conditions reported per technique and second; the next report says how many were dropped."""
_MAX_WHAT_CHARS = 100
_MAX_DETAIL_CHARS = 1000
_OWN = frozenset(kind.name for kind in BUILT_IN)


class StepHooks:
    """Calls the hooks that are registered for each point. Owned by the main thread."""

    def __init__(
        self, hooks: Sequence[tuple[str, Hooks]], note: Callable[[AnyNote], None], moment: Callable[..., Moment]
    ) -> None:
        self._hooks = list(hooks)
        self._note = note
        self._moment = moment
        self._waiting: dict[str, list[tuple[str, Callable[[Moment], None]]]] = {}
        self._arrange()

    def _arrange(self) -> None:
        self._waiting = {
            point: [(name, getattr(hooks, point)) for name, hooks in self._hooks if _overrides(hooks, point)]
            for point in POINTS
        }

    def reach(self, point: str, **more: Any) -> None:
        """Call all hooks registered for ``point``; ``more`` are fields of the moment."""
        waiting = self._waiting[point]
        if not waiting:
            return
        moment = self._moment(**more)
        for name, call in waiting:
            if name in _OWN:
                call(moment)
            else:
                self._guarded(name, point, partial(call, moment))

    def _guarded(self, name: str, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            # Another package's code must not end the training.
            logger.exception("technique %s failed in %s and is left out from now on", name, what)
            self._note(TechniqueFailed(technique=name, where=what, error=f"{type(error).__name__}: {error}"[:500]))
            self._hooks = [each for each in self._hooks if each[0] != name]
            self._arrange()

    def close(self) -> None:
        for name, hooks in list(self._hooks):
            if name not in _OWN:
                self._guarded(name, "close", hooks.close)


def moment_of(ledger: Ledger, step: int, behind: bool, **more: Any) -> Moment:
    """Return the moment that hooks get; ``more`` are fields that only some points have."""
    return Moment(
        step=step,
        branch=ledger.branch,
        generation=ledger.generation or 0,
        members=ledger.members,
        behind=behind,
        **more,
    )


def _overrides(hooks: Hooks, point: str) -> bool:
    return getattr(type(hooks), point) is not getattr(Hooks, point)


class InWorker:
    """The interface that the hooks of one technique get."""

    def __init__(self, technique: str, settings: WorkerSettings, reporter: Reporter) -> None:
        self._technique = technique
        self._reporter = reporter
        self.worker_id = settings.worker_id
        self.host = settings.host
        # Guards the two below: any thread may call tell.
        self._lock = threading.Lock()
        self._recent: list[float] = []
        self._left_out = 0

    def tell(self, what: str, value: float | None = None, detail: str = "") -> None:
        now = time.time()
        seen = ConditionSeen(
            technique=self._technique,
            what=what,
            worker_id=self.worker_id,
            host=self.host,
            value=value,
            detail=detail,
            time=now,
        )
        # A wrong type would make the whole report unreadable: the caller gets the exception.
        msgspec.convert(msgspec.to_builtins(seen), ConditionSeen)
        if len(what) > _MAX_WHAT_CHARS or len(detail) > _MAX_DETAIL_CHARS:
            raise ConfigError(f"tell: what has at most {_MAX_WHAT_CHARS} characters, detail {_MAX_DETAIL_CHARS}")
        with self._lock:
            self._recent = [each for each in self._recent if now - 1.0 < each <= now]
            if len(self._recent) >= _MOST_PER_S:
                self._left_out += 1
                return
            self._recent.append(now)
            left_out, self._left_out = self._left_out, 0
        if left_out:
            seen = replace(seen, detail=f"{detail} ({left_out} more since the last one)".strip())
        self._reporter.note(seen)


def hooks_of(
    techniques: Chosen, own: Mapping[str, Hooks], settings: WorkerSettings, reporter: Reporter
) -> list[tuple[str, Hooks]]:
    """Return the hooks of all enabled techniques; ``own`` holds those of built-in techniques."""
    found: list[tuple[str, Hooks]] = []
    for name, technique in techniques.by_name.items():
        hooks = own.get(name)
        if name not in _OWN:
            try:
                hooks = technique.hooks(InWorker(name, settings, reporter))
                if not isinstance(hooks, Hooks | None):
                    raise TypeError(f"hooks() returns an object derived from Hooks, or None; not {hooks!r}")
            except Exception as error:
                # Another package's code must not end the training.
                logger.exception("technique %s has no hooks here", name)
                hooks = None
                reporter.note(
                    TechniqueFailed(technique=name, where="hooks", error=f"{type(error).__name__}: {error}"[:500])
                )
        if hooks is not None:
            found.append((name, hooks))
    return found
