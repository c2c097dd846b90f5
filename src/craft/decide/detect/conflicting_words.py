"""Find where members' words contradict each other, and which members are to leave for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from craft.protocol.control_word import Groups, Repeated, UnequalBuffer, Word


def groups_of(values: Sequence[object]) -> Groups:
    """Ranks grouped by value, larger groups first; () if all that have a value have the same. Empty ones and None are none."""
    groups: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None and value != b"":
            groups.setdefault(value, []).append(rank)
    if len(groups) < 2:
        return ()
    return tuple(tuple(ranks) for ranks in sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks)))


def unequal_buffer(words: Sequence[Word]) -> UnequalBuffer | None:
    """The first module buffer that code between the steps did not leave the same everywhere."""
    if not any(word.touched for word in words):
        return None
    told = [dict(word.touched) if word.touched is not None else None for word in words]
    for index in sorted({index for each in told if each is not None for index in each}):
        # Who did not touch it has it as it was: that is a value, too.
        groups = groups_of([None if each is None else each.get(index, b"as it was") for each in told])
        if groups:
            return UnequalBuffer(index=index, groups=groups)
    return None


def repeated(words: Sequence[Word]) -> tuple[Repeated, ...]:
    """Microbatches that were computed twice in this step, by their owners and for comparison."""
    if not any(word.repeated for word in words):
        return ()
    owned = {index: (rank, digest) for rank, word in enumerate(words) for index, digest in word.computed}
    return tuple(
        Repeated(microbatch=index, owner=owned[index][0], other=rank, equal=owned[index][1] == digest)
        for rank, word in enumerate(words)
        for index, digest in word.repeated
        if index in owned
    )


def outcasts(words: Sequence[Word], differences: Iterable[Groups]) -> tuple[int, ...]:
    """Ranks that have just joined and differ from all others, who agree among themselves: only they leave.

    () where that cannot be told: where members differ that have trained all the time.
    """
    found = [groups for groups in differences if groups]
    if not found:
        return ()
    newcomers = frozenset(rank for rank, word in enumerate(words) if word.newcomer)
    leaving: set[int] = set()
    for groups in found:
        others = [group for group in groups if not newcomers.issuperset(group)]
        if len(others) != 1:
            return ()
        leaving.update(rank for group in groups if group is not others[0] for rank in group)
    return tuple(sorted(leaving))
