"""Answer generations that break without a known loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from craft.decide.job.last_copy import holders, is_last_copy
from craft.decide.job.observe import PEERS
from craft.decide.job.state import JobState
from craft.decide.policies.policy import EXIT_GIVEN_UP, names
from craft.protocol.actions import AnyAction, DeclareLost, Reconfigure, Stop, Watch
from craft.protocol.events import AnyEvent, ExchangeBroken, GenerationStuck

_PROBED = 5
"""While members probe each other, wait at least this many times the usual delay: probing takes seconds."""
MOST_RETRIES = 4
"""The same members re-form the group this often before one commits a step or completes a call."""
_MOST_BLAMED = 3
"""This many workers are replaced in that time because they seem to be the cause."""


class BrokenPolicy:
    """Re-forms the group after a broken exchange that no death explains, without unreachable members.

    After a few attempts the member that blocks the others is replaced; if there is no such member, or that did not help,
    the job ends.
    """

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
        cut_off = blame(state.members, state.complaints, holders(state), state.position_of)
        if cut_off:
            return tuple(
                DeclareLost(worker_id=worker_id, source=PEERS, reason=_complaint(worker_id, state.complaints))
                for worker_id in cut_off
            )
        return reform_group(
            state, f"generation {event.generation} broke though nobody is known to be lost: the same members"
        )

    def _does_not_open(self, state: JobState, number: int) -> tuple[AnyAction, ...]:
        """Replace a joiner because of which the upcoming generation does not open."""
        assert state.upcoming is not None
        joiners = [each for each in state.upcoming.worker_ids if each not in state.members]
        reason = f"generation {number}, in which it was to join, does not open"
        # The loss of the first makes a newer generation with the others.
        return tuple(DeclareLost(worker_id=each, source=PEERS, reason=reason) for each in joiners[:1])


def reform_group(state: JobState, why: str) -> tuple[AnyAction, ...]:
    """Re-form the group with the same members; ``why`` begins the reason, up to who they are.

    After too many attempts: replace the member that blocks the others, or end the job.
    """
    if state.retries < MOST_RETRIES:
        return (Reconfigure(members=state.members, again=True, reason=f"{why} meet again"),)
    suspect = blocking_member(state.members, state.missed)
    if suspect is not None and is_last_copy(state, {suspect}):
        # The last copy stays, whatever the others report: replace a member without the state.
        suspect = next((each for each in reversed(state.members) if each not in holders(state)), None)
    if suspect is not None and state.blamed < _MOST_BLAMED:
        by = [each for each, about in state.missed if about == suspect]
        reason = (
            f"the same {len(state.members)} workers met {MOST_RETRIES} times again in vain, and {suspect} is in the way, as"
            f" {names(by)} {'says' if len(by) == 1 else 'say'}"
        )
        return (DeclareLost(worker_id=suspect, source=PEERS, reason=reason),)
    reason = (
        f"the same {len(state.members)} workers met {MOST_RETRIES} times again, and none committed a step or completed a call:"
        f" {_who_missed_whom(state)}. Look at the network between their hosts, and at how many files a process may open"
        " (ulimit -n)"
    )
    return (Stop(reason=reason, exit_code=EXIT_GIVEN_UP),)


def blocking_member(members: Sequence[str], missed: Iterable[tuple[str, str]]) -> str | None:
    """Return the member because of which the others do not meet; None if that is unclear.

    Most reports decide; on a tie one that reports itself, else the highest rank. If all are reported alike, it is unclear.
    """
    pairs = {(by, about) for by, about in missed if by in members and about in members}
    votes = Counter(about for _, about in pairs)
    if not votes:
        return None
    weight = {worker_id: (votes[worker_id], (worker_id, worker_id) in pairs) for worker_id in votes}
    worst = [worker_id for worker_id in members if weight.get(worker_id) == max(weight.values())]
    return None if len(worst) == len(members) else worst[-1]


def _who_missed_whom(state: JobState) -> str:
    """Return who could not meet whom, in words."""
    found: dict[str, list[str]] = {}
    for by, about in state.missed:
        found.setdefault(by, []).append("the others" if by == about else about)
    if not found:
        return "no member could say which other one it did not meet"
    return "; ".join(f"{by} did not meet {names(about)}" for by, about in found.items())


def blame(
    members: Sequence[str],
    complaints: Iterable[tuple[str, str]],
    having_state: Collection[str] = (),
    position_of: Callable[[str], int] = lambda worker_id: 0,
) -> tuple[str, ...]:
    """Return a small set of members without which all others reach each other.

    Greedy: the member with the most broken links goes; on a tie the highest rank, so that a full host goes rather than
    half of each. At each position of a replica, one member that has the training state stays.
    """
    rank = {worker_id: number for number, worker_id in enumerate(members)}
    links = {frozenset(pair) for pair in complaints if pair[0] in rank and pair[1] in rank and pair[0] != pair[1]}
    gone: list[str] = []
    while links:
        degree = Counter(worker_id for link in links for worker_id in link)
        left = frozenset(having_state).difference(gone)
        copies = Counter(map(position_of, left))
        candidates = [each for each in degree if each not in left or copies[position_of(each)] > 1]
        if not candidates:
            break
        worst = max(candidates, key=lambda worker_id: (degree[worker_id], rank[worker_id]))
        gone.append(worst)
        links = {link for link in links if worst not in link}
    return tuple(gone)


def _complaint(worker_id: str, complaints: Iterable[tuple[str, str]]) -> str:
    others = sorted({by if about == worker_id else about for by, about in complaints if worker_id in (by, about)})
    return f"no connection between it and {names(others)}"
