"""Explain why collectives of the script do not end: who started what, in which order and of what size.

Enters: what workers reported of their collectives. Leaves: sentences that name the worker and the collective, for the
bundle of a hang. A collective ends only if every rank of its group starts the same one, of the same size, as its nth.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod

from craft.protocol.values.inspection import Collective, Collectives

_ANY_SIZE = frozenset({"all_to_all", "alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "barrier"})
"""Their inputs may differ from rank to rank."""
_BYTES = {
    "double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2, "char": 1, "byte": 1, "bool": 1,
}  # fmt: skip


def findings(told: Sequence[Collectives]) -> tuple[str, ...]:
    """Return a sentence for each process group of the script with a mismatch."""
    names = sorted({name for each in told for name in each.groups})
    return tuple(found for name in names if (found := _finding(name, told)) is not None)


def _finding(group: str, told: Sequence[Collectives]) -> str | None:
    here = [each for each in told if group in each.groups]
    ranks = {rank for each in here for rank in each.groups[group]}
    started = {each.worker_id: {entry.number: entry for entry in each.entries if entry.group == group} for each in here}
    last = {worker_id: max(entries, default=0) for worker_id, entries in started.items()}
    silent = len(ranks) - len(here)
    for number in range(_first_open(started), max(last.values(), default=0) + 1):
        at = {worker_id: entries[number] for worker_id, entries in started.items() if number in entries}
        found = _compared(number, at) or _missing(number, at, last)
        if found is None and silent and at:
            found = f"{_who(at)} {_are(at)} at {_it(at)} number {number}, and of {silent} ranks of the group nothing is known"
        if found is not None:
            return found
    return None


def _first_open(started: Mapping[str, Mapping[int, Collective]]) -> int:
    """Return the number of the first collective that a worker waits in; all have completed those before."""
    waiting = [entry.number for entries in started.values() for entry in entries.values() if not entry.done]
    return min(waiting, default=1 << 62)


def _compared(number: int, at: Mapping[str, Collective]) -> str | None:
    """Return how the workers' ``number``-th collectives differ, if they do."""
    by_name = _groups(at, lambda entry: entry.name)
    if len(by_name) > 1:
        return "mismatched order: " + _apart(by_name, lambda some: f"{_it(some)} number {number}{_of_size(some)}")
    by_type = _groups(at, lambda entry: entry.dtypes)
    if len(by_type) > 1:
        return "mismatched types: " + _apart(by_type, lambda some: f"{_it(some)} number {number} of {_dtype(some)}")
    by_size = _groups(at, lambda entry: () if entry.name in _ANY_SIZE else entry.sizes)
    if len(by_size) > 1:
        return "mismatched size: " + _apart(by_size, lambda some: f"{_it(some)} number {number}{_of_size(some)}")
    return None


def _missing(number: int, at: Mapping[str, Collective], last: Mapping[str, int]) -> str | None:
    if not any(not entry.done for entry in at.values()):
        return None
    away = [worker_id for worker_id in last if worker_id not in at and last[worker_id] < number]
    if not away:
        return None
    newest = max(last[worker_id] for worker_id in away)
    been = f"the last one it started is number {newest}" if newest else "it has started none in this group"
    if len(away) > 1:
        been = "they have started fewer"
    return (
        f"missing rank: {_names(away)} {'has' if len(away) == 1 else 'have'} not come to {_it(at)} number {number}, in which"
        f" {_who(at)} {'waits' if len(at) == 1 else 'wait'}; {been}"
    )


def _groups(at: Mapping[str, Collective], key: Callable[[Collective], Hashable]) -> list[dict[str, Collective]]:
    """Return the workers grouped by ``key``, smallest group first: it is more likely to be wrong."""
    found: dict[Hashable, dict[str, Collective]] = {}
    for worker_id, entry in at.items():
        found.setdefault(key(entry), {})[worker_id] = entry
    return sorted(found.values(), key=len)


def _apart(groups: Sequence[dict[str, Collective]], say: Callable[[Mapping[str, Collective]], str]) -> str:
    """``worker w2 is at broadcast number 7 of 4 bytes while all others are at all_reduce number 7 of 4 bytes``."""
    *few, most = groups
    parts = [f"{_who(some)} {_are(some)} at {say(some)}" for some in few]
    others = "all others" if len(groups) == 2 and len(most) > 1 else _who(most)
    return f"{' and '.join(parts)} while {others} {'are' if len(most) > 1 else 'is'} at {say(most)}"


def _who(at: Mapping[str, Collective]) -> str:
    return _names(sorted(at))


def _names(worker_ids: Sequence[str]) -> str:
    shown = ", ".join(worker_ids[:8])
    more = f" and {len(worker_ids) - 8} others" if len(worker_ids) > 8 else ""
    return f"{'worker' if len(worker_ids) == 1 else 'workers'} {shown}{more}"


def _are(at: Mapping[str, Collective]) -> str:
    return "is" if len(at) == 1 else "are"


def _one(at: Mapping[str, Collective]) -> Collective:
    return next(iter(at.values()))


def _it(at: Mapping[str, Collective]) -> str:
    return _one(at).name


def _dtype(at: Mapping[str, Collective]) -> str:
    return ", ".join(_one(at).dtypes) or "an unknown type"


def _of_size(at: Mapping[str, Collective]) -> str:
    entry = _one(at)
    if not entry.sizes:
        return ""
    counts = [prod(size) for size in entry.sizes]
    width = _BYTES.get(entry.dtypes[0].lower()) if len(set(entry.dtypes)) == 1 else None
    if width is None:
        return f" of {sum(counts)} elements"
    return f" of {sum(counts) * width} bytes"
