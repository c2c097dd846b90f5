"""Generations that break though nobody is known to be lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from craft.decide.membership import JobState
from craft.decide.policies.policy import names
from craft.protocol.actions import AnyAction, DeclareLost, Reconfigure, Watch
from craft.protocol.events import AnyEvent, ExchangeBroken, GenerationStuck

_PROBED = 5
"""So many times in a row count as one, where members find out whom they reach: that takes seconds."""


class BrokenPolicy:
    """Answers a broken exchange that no death explains: the same members meet again, without those out of reach."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        current = state.generation
        if current is None or state.holding:
            return ()
        wanted = [each.number for each in (current, state.upcoming) if each is not None]
        if isinstance(event, ExchangeBroken) and event.generation in wanted:
            reason = "a death would show within moments"
            times = 1 + state.retries
            if state.probing == event.generation:
                reason, times = "who is out of reach takes a while to find out", max(times, _PROBED)
            return (Watch(generation=event.generation, times=times, reason=reason),)
        if not isinstance(event, GenerationStuck) or event.generation not in wanted or not state.members:
            return ()
        if event.generation != current.number:
            return self._does_not_open(state, event.generation)
        cut_off = blame(state.members, state.complaints)
        if cut_off:
            return tuple(
                DeclareLost(worker_id=worker_id, source="peers", reason=_complaint(worker_id, state.complaints))
                for worker_id in cut_off
            )
        reason = f"generation {event.generation} broke though nobody is known to be lost: the same members meet again"
        return (Reconfigure(members=state.members, again=True, reason=reason),)

    def _does_not_open(self, state: JobState, number: int) -> tuple[AnyAction, ...]:
        """An upcoming generation: whoever was to join in it is followed by another, for whom it may."""
        assert state.upcoming is not None
        joiners = [each for each in state.upcoming.worker_ids if each not in state.members]
        reason = f"generation {number}, in which it was to join, does not open"
        # The loss of the first leads to a newer generation, in which the others are.
        return tuple(DeclareLost(worker_id=each, source="peers", reason=reason) for each in joiners[:1])


def blame(members: Sequence[str], complaints: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the fewest that must go so that all others can reach each other, as far as that is easily found.

    Again and again the one with the most broken links goes; among equals the one of the highest rank, so that a whole
    host goes rather than half of each.
    """
    rank = {worker_id: number for number, worker_id in enumerate(members)}
    links = {frozenset(pair) for pair in complaints if pair[0] in rank and pair[1] in rank and pair[0] != pair[1]}
    gone: list[str] = []
    while links:
        degree = Counter(worker_id for link in links for worker_id in link)
        worst = max(degree, key=lambda worker_id: (degree[worker_id], rank[worker_id]))
        gone.append(worst)
        links = {link for link in links if worst not in link}
    return tuple(gone)


def _complaint(worker_id: str, complaints: Iterable[tuple[str, str]]) -> str:
    others = sorted({by if about == worker_id else about for by, about in complaints if worker_id in (by, about)})
    return f"no connection between it and {names(others)}"
