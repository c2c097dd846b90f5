"""Combine the members' control words into the one that all act on."""

from __future__ import annotations

from collections.abc import Sequence

from craft.decide.detect.conflicting_words import groups_of, outcasts, repeated, unequal_buffer
from craft.protocol.control_word import Carried, Combined, Word


def combine(words: Sequence[Word]) -> Combined:
    """Combine all members' words, given in the order of ranks.

    Sums run in the order of microbatches, not of ranks: their bits do not depend on who computed what.
    """
    records = sorted((record for word in words for record in word.records), key=lambda record: record.microbatch)
    present = 0
    for record in records:
        present |= int.from_bytes(record.present, "little")
    width = max((len(record.present) for record in records), default=0)
    buffers_from = next((rank for rank, word in enumerate(words) if word.buffers), -1)
    save, wish = _due(words)
    digests, probes, states, wholes = (
        groups_of([word.digest for word in words]),
        groups_of([word.probe for word in words]),
        groups_of([word.state for word in words]),
        groups_of([word.whole for word in words]),
    )
    buffer = unequal_buffer(words)
    return Combined(
        step=words[0].step,
        total_weight=sum(record.weight for record in records),
        present=present.to_bytes(width, "little"),
        metrics=_mean_scalars(words),
        ready=min(word.ready for word in words),
        able=tuple(rank for rank, word in enumerate(words) if word.able),
        stop=next((word.stop for word in words if word.stop is not None), None),
        resend=any(word.resend for word in words),
        ended=bool(records) and not any(record.more for record in records),
        empty=bool(records) and not any(record.data for record in records),
        buffers=words[buffers_from].buffers if buffers_from >= 0 else (),
        buffers_from=buffers_from,
        unequal_digests=digests,
        unequal_probes=probes,
        save=save,
        busy=any(word.busy for word in words),
        saved=max(word.saved for word in words),
        leave=any(word.leave for word in words),
        wish=wish,
        busy_us=tuple(word.busy_us for word in words),
        sample=next((word.sample for word in words if word.sample), b""),
        said=tuple(sorted({text for record in records for text in record.said})),
        carried=_carried(words) if any(record.carried for record in records) else (),
        unequal_states=states,
        unequal_wholes=wholes,
        unequal_buffer=buffer,
        repeated=repeated(words),
        compared=all(word.digest for word in words if word.able),
        compared_whole=all(word.whole for word in words if word.able),
        agreed=max(word.agreed for word in words),
        stop_is_final=any(word.stop_is_final for word in words),
        outcasts=outcasts(words, (digests, probes, states, wholes, buffer.groups if buffer is not None else ())),
    )


def _carried(words: Sequence[Word]) -> tuple[Carried, ...]:
    found = [
        Carried(record.microbatch, rank, record.carried)
        for rank, word in enumerate(words)
        for record in word.records
        if record.carried
    ]
    return tuple(sorted(found, key=lambda each: each.microbatch))


def _due(words: Sequence[Word]) -> tuple[str | None, int]:
    """Return the tag of the checkpoint that is due, and the request that it answers: the oldest one."""
    wishes = [(word.wish, word.save) for word in words if word.wish]
    if wishes:
        wish, save = min(wishes, key=lambda each: each[0])
        return save or "", wish
    return max((word.save for word in words if word.save is not None), default=None), 0


def _mean_scalars(words: Sequence[Word]) -> tuple[tuple[str, float], ...]:
    """Return the weighted mean of each logged scalar over its microbatches; unweighted if all weights are 0."""
    logged: dict[str, list[tuple[float, float]]] = {}
    records = sorted((record for word in words for record in word.records), key=lambda record: record.microbatch)
    for record in records:
        for name, value in record.scalars:
            logged.setdefault(name, []).append((value, record.weight))
    return tuple((name, _mean(values)) for name, values in sorted(logged.items()))


def _mean(values: Sequence[tuple[float, float]]) -> float:
    # A value of weight 0 must not count, even if it is not a number.
    counted = [each for each in values if each[1]] or [(value, 1.0) for value, _ in values]
    total = weight = 0.0
    for value, share in counted:
        total, weight = total + value * share, weight + share
    return total / weight
