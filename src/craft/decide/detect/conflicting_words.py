"""Find contradictions between members' control words, and the members that leave because of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from craft.protocol.control_word import Groups, Repeated, UnequalBuffer, Word


def groups_of(values: Sequence[object]) -> Groups:
    """Return ranks grouped by value, larger groups first; () if all values are equal. None and b"" are no values."""
    groups: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None and value != b"":
            groups.setdefault(value, []).append(rank)
    if len(groups) < 2:
        return ()
    return tuple(tuple(ranks) for ranks in sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks)))


def unequal_buffer(words: Sequence[Word]) -> UnequalBuffer | None:
    """Return the first module buffer that code between the steps left unequal."""
    if not any(word.touched for word in words):
        return None
    told = [dict(word.touched) if word.touched is not None else None for word in words]
    for index in sorted({index for each in told if each is not None for index in each}):
        # Where it was not touched, the old content is a value too.
        groups = groups_of([None if each is None else each.get(index, b"as it was") for each in told])
        if groups:
            return UnequalBuffer(index=index, groups=groups)
    return None


def repeated(words: Sequence[Word]) -> tuple[Repeated, ...]:
    """Return the microbatches that were computed twice in this step, by their owners and for comparison."""
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
    """Return the ranks of newcomers that differ from all others, who agree: only they leave.

    () if longer-standing members differ: then the wrong one is unknown.
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
