"""Combine the control words of sharded replicas: one word over all members, with what belongs to a position per column.

A column is the twins of one position. They compare digests and exchange gradients and buffers among themselves. What decides
about the step (resend, ready, stop, save, differences) is the same for all members, whichever column it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

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
    return replace(
        combine(counted_once(words)),
        present=mine.present,
        buffers=mine.buffers,
        buffers_from=ranks[mine.buffers_from] if mine.buffers_from >= 0 else -1,
        carried=tuple(Carried(each.microbatch, ranks[each.rank], each.nbytes) for each in mine.carried),
        sample=mine.sample,
        unequal_digests=_first([(part.unequal_digests, column) for part, column in differing]),
        unequal_probes=_first([(part.unequal_probes, column) for part, column in differing]),
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
        outcasts=_outcasts(differing),
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


def _outcasts(differing: Sequence[tuple[Combined, Sequence[int]]]) -> tuple[int, ...]:
    """Return the newcomers that leave; () if in some column it is not known who is wrong."""
    if not all(part.outcasts for part, _ in differing):
        return ()
    return tuple(sorted(column[rank] for part, column in differing for rank in part.outcasts))
