"""Guard the lighthouse against policies of other packages."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from craft.control.core.loop import JournalWriter
from craft.decide.job.apply import apply
from craft.decide.job.state import JobState
from craft.decide.policies.policy import Policy
from craft.decide.techniques import BUILT_IN
from craft.decide.techniques.technique import Chosen
from craft.protocol.actions import (
    AnyAction,
    DeclareHostLost,
    DeclareLost,
    Preempt,
    Reconfigure,
    RequestDrain,
    Stop,
    TakeCheckpoint,
    WindDown,
)
from craft.protocol.events import AnyEvent, TechniqueFailed

logger = logging.getLogger(__name__)

ALLOWED = (RequestDrain, DeclareLost, DeclareHostLost, TakeCheckpoint, Preempt, Reconfigure, WindDown, Stop)
"""Actions that policies of other packages may return; the others only make sense within CRAFT's own answers."""


def guarded(techniques: Chosen, journal: JournalWriter) -> tuple[Policy, ...]:
    """Return all policies, in the declared order."""
    found: list[Policy] = []
    for name, technique in techniques.by_name.items():
        if type(technique) in BUILT_IN:
            found += technique.policies()
            continue
        try:
            found += [_Guarded(name, policy, journal) for policy in technique.policies()]
        except Exception as error:  # noqa: BLE001  (code of another package; it is journaled)
            _failed(name, "policies", error, journal)
    return tuple(found)


class _Guarded:
    """A policy of another package. It is disabled after it raises or returns something invalid."""

    def __init__(self, technique: str, policy: Policy, journal: JournalWriter) -> None:
        self._technique = technique
        self._policy: Policy | None = policy
        self._journal = journal

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if self._policy is None:
            return ()
        try:
            return _checked(state, self._policy.decide(state, event))
        except Exception as error:  # noqa: BLE001  (code of another package; it is journaled)
            where = f"{type(self._policy).__name__} about {type(event).__name__}"
            self._policy = None
            _failed(self._technique, where, error, self._journal)
            return ()


def _checked(state: JobState, actions: Iterable[AnyAction]) -> tuple[AnyAction, ...]:
    """Return the answer of a policy if it is valid: a wrong type would make every directive unreadable."""
    found = tuple(actions)
    for each in found:
        if not isinstance(each, ALLOWED):
            raise TypeError(
                f"a policy returns actions of these: {', '.join(kind.__name__ for kind in ALLOWED)}; not {each!r}"
            )
        msgspec.convert(msgspec.to_builtins(each), type(each))
        if isinstance(each, Reconfigure) and not (each.members and {*each.members} <= _living(state)):
            raise ValueError(f"members of a generation are workers that live, not {each.members}")
        # What cannot be encoded must fail here, where it can still be dropped.
        apply(state, each, "")
    return found


def _living(state: JobState) -> set[str]:
    return {view.member.worker_id for view in state.having("waiting", "member")}


def _failed(technique: str, where: str, error: Exception, journal: JournalWriter) -> None:
    logger.error("technique %s failed (%s) and is disabled from now on", technique, where, exc_info=error)
    said = f"{type(error).__name__}: {error}"[:500]
    journal.write("event", TechniqueFailed(technique=technique, where=where, error=said))
