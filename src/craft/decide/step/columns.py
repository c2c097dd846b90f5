"""Combine the control words of sharded replicas: one word over all members, with what belongs to a position per column.

A column is the twins of one position. They compare digests and exchange gradients and buffers among themselves. What decides
about the step (resend, ready, stop, save, differences) is the same for all members, whichever column it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from craft.decide.detect.conflicting_words import outcasts
from craft.decide.step.combine import combine
from craft.decide.step.replicas import Layout
from craft.protocol.control_word import Carried, Combined, Groups, MicrobatchRecord, Word
from craft.protocol.errors import ConfigError


def combine_columns(words: Sequence[Word], layout: Layout, position: int) -> Combined:
    """Combine all members' words, given in the order of ranks, for the members at ``position``."""
    columns = [layout.column(each, len(words)) for each in range(layout.replica_size)]
    parts = [combine([words[rank] for rank in column]) for column in columns]
    mine, ranks = parts[position], columns[position]
    differing = [(part, column) for part, column in zip(parts, columns, strict=True) if part.differs]
    probes = _probes_by_replica(words, layout) if any(part.unequal_probes for part in parts) else ()
    return replace(
        combine(counted_once(words)),
        present=mine.present,
        buffers=mine.buffers,
        buffers_from=ranks[mine.buffers_from] if mine.buffers_from >= 0 else -1,
        carried=tuple(Carried(each.microbatch, ranks[each.rank], each.nbytes) for each in mine.carried),
        sample=mine.sample,
        unequal_digests=_first([(part.unequal_digests, column) for part, column in differing]),
        unequal_probes=probes,
        unequal_states=_first([(part.unequal_states, column) for part, column in differing]),
        unequal_wholes=_first([(part.unequal_wholes, column) for part, column in differing]),
        unequal_buffer=next(
            (
                replace(part.unequal_buffer, groups=_of_members(part.unequal_buffer.groups, column))
                for part, column in differing
                if part.unequal_buffer is not None
            ),
            None,
        ),
        repeated=tuple(
            replace(each, owner=column[each.owner], other=column[each.other])
            for part, column in zip(parts, columns, strict=True)
            for each in part.repeated
        ),
        outcasts=_outcasts(words, layout, differing, probes),
    )


def counted_once(words: Sequence[Word]) -> list[Word]:
    """Return the words with one record for each microbatch: the positions of its replica all send one.

    A logged scalar is the mean over the positions that logged it.
    """
    found: dict[int, list[MicrobatchRecord]] = {}
    for word in words:
        for record in word.records:
            found.setdefault(record.microbatch, []).append(record)
    merged = {microbatch: _merged(records) for microbatch, records in found.items()}
    # A record that is taken once stays with the first word that has it.
    return [
        replace(word, records=tuple(merged.pop(each.microbatch) for each in word.records if each.microbatch in merged))
        for word in words
    ]


def _merged(records: Sequence[MicrobatchRecord]) -> MicrobatchRecord:
    first = records[0]
    if len(records) == 1:
        return first
    weights = sorted({record.weight for record in records})
    if len(weights) > 1:
        raise ConfigError(
            f"step.weight of microbatch {first.microbatch} is {weights[0]:g} on one position of its replica and {weights[-1]:g}"
            " on another: they compute one microbatch together, so give step.weight the same number on all of them"
        )
    logged: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.scalars:
            logged.setdefault(name, []).append(value)
    return replace(
        first,
        scalars=tuple((name, sum(values) / len(values)) for name, values in sorted(logged.items())),
        more=all(record.more for record in records),
        data=all(record.data for record in records),
        said=tuple(sorted({text for record in records for text in record.said})),
    )


def _of_members(groups: Groups, column: Sequence[int]) -> Groups:
    """Return groups of a column as groups of ranks."""
    return tuple(tuple(column[each] for each in group) for group in groups)


def _first(found: Sequence[tuple[Groups, Sequence[int]]]) -> Groups:
    return next((_of_members(groups, column) for groups, column in found if groups), ())


def _probes_by_replica(words: Sequence[Word], layout: Layout) -> Groups:
    """Return the members grouped by what their replicas computed; those that compared nothing are in no group.

    Whichever position is wrong, its numbers reach the others in the collectives of the replica: all of them may differ from
    their twins.
    """
    groups: list[tuple[dict[int, bytes], list[int]]] = []
    for replica in layout.complete(len(words)):
        ranks = layout.ranks_of(replica)
        found = {layout.position_of(rank): words[rank].probe for rank in ranks if words[rank].probe}
        if not found:
            continue
        # A position may lack its digest, if a worker was lost while it computed.
        same = next(
            (each for each in groups if all(each[0].get(at, digest) == digest for at, digest in found.items())), None
        )
        if same is None:
            groups.append((found, list(ranks)))
        else:
            same[0].update(found)
            same[1].extend(ranks)
    ordered = sorted((ranks for _, ranks in groups), key=lambda ranks: (-len(ranks), ranks))
    return tuple(tuple(ranks) for ranks in ordered) if len(ordered) > 1 else ()


def _outcasts(
    words: Sequence[Word], layout: Layout, differing: Sequence[tuple[Combined, Sequence[int]]], probes: Groups
) -> tuple[int, ...]:
    """Return the newcomers that leave; () if it is not known who is wrong."""
    leaving: set[int] = set()
    if probes:
        replicas = [{layout.replica_of(rank) for rank in group} for group in probes]
        fresh = {layout.replica_of(rank) for rank, word in enumerate(words) if word.newcomer}
        others = [each for each in replicas if not fresh.issuperset(each)]
        if len(others) != 1:
            return ()
        wrong = fresh - others[0]
        leaving.update(rank for rank, word in enumerate(words) if word.newcomer and layout.replica_of(rank) in wrong)
    for part, column in differing:
        buffer = part.unequal_buffer.groups if part.unequal_buffer is not None else ()
        unequal = (part.unequal_digests, part.unequal_states, part.unequal_wholes, buffer)
        found = outcasts([words[rank] for rank in column], unequal)
        if any(unequal) and not found:
            return ()
        leaving.update(column[rank] for rank in found)
    return tuple(sorted(leaving))
