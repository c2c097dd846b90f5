"""Who is slow: from how long a microbatch takes on each member, step by step.

Every member has the same times at the same step, from the control word, and comes to the same answer without asking
anybody: the plan of the next step may depend on it. So nothing here but additions and divisions, which have the same bits on
every machine. A new generation begins with an empty ``MemberSpeeds``, since who joins has not seen what came before.

A step says something about a worker only beside the others: where all are slow, nobody is. Each step in which it takes
``factor`` times as long as the median of the others or more speaks against it, each other one for it; no single step counts
for more than one. Noise strikes everybody, now this one and now that one: how much speaks against the *others* is remembered,
and the more that is, the more it takes to find somebody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from craft.protocol.values.config import says

StragglerAnswer = Literal["report", "rebalance", "drain"]

_QUIET = 0.05
"""The noise that a generation begins with."""
_NOISE_RISES, _NOISE_FALLS = 1 / 16, 1 / 64
"""How much of the difference to what is remembered a step makes up for."""
_WEIGHT_OF_NOISE = 8.0
"""So many times as much patience more it takes where everything speaks against the others, too, in every step."""
_SLOW_TO_FORGIVE = 0.25
"""What speaks for a member that was found counts so much: with a small share, it is often lucky."""
_MOST_TIMES = 8
"""A step counts as at most so many times as slow as the others': one that hung for a second must not decide the shares."""
_REVIEW_STEPS = 16
"""So often the share of a slow worker is looked at again; older steps count half by then."""
_OVER = 1.2
"""A slow worker that takes no more than so many times as long, over the latest steps, is slow no more."""
_WORTH_IT = 1.25
"""By so much its slowness must differ from what its share was made for: every other plan costs a little to get used to."""


class StragglerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a worker is taken for slow, and what is done about it; the same on every worker."""

    answer: Annotated[
        StragglerAnswer,
        says(
            "report; rebalance: microbatches move to the others, with the same bits; drain: and the slow worker leaves."
        ),
    ] = "rebalance"
    factor: Annotated[
        float,
        msgspec.Meta(gt=1.0, le=1e9),
        says("A worker is slow in a step in which a microbatch takes so many times as long there as elsewhere."),
    ] = 1.5
    patience: Annotated[
        float,
        msgspec.Meta(gt=0.0, le=1e9),
        says(
            "It is found after so many steps in which it takes twice as much longer or more; later where there is noise."
        ),
    ] = 5.0
    min_lost_ms: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=1e9),
        says("A microbatch must have taken so much longer there in all steps together: less is over before it counts."),
    ] = 50.0


class SlowEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What speaks against one member."""

    rank: int
    score: float = 0.0
    """Grows by up to 1 with every step in which it was slow, and shrinks with every other one."""
    steps: int = 0
    """Steps looked at."""
    counted: int = 0
    """Of these, how many the sums below are made of: the latest."""
    own_us: int = 0
    others_us: int = 0
    found: bool = False
    """Whether it is taken for slow; until the score is down to nothing."""
    slowness: float = 1.0
    """By how many times as long its share is cut."""

    @property
    def ratio(self) -> float:
        """How many times as long as elsewhere a microbatch takes there."""
        return self.own_us / self.others_us if self.others_us else 1.0


class MemberSpeeds(msgspec.Struct, frozen=True):
    """What the members of a generation know of each other's speed; the same on all of them after the same step."""

    suspicions: tuple[SlowEvidence, ...] = ()
    noise: float = _QUIET
    """How much speaks against an ordinary member in an ordinary step, from 0 to 1."""

    @property
    def found(self) -> tuple[SlowEvidence, ...]:
        return tuple(each for each in self.suspicions if each.found)

    def slowness(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """How many times as long as usual a microbatch takes on each of ``ranks``; empty while there is no difference."""
        slow = {each.rank: each.slowness for each in self.suspicions if each.slowness > 1.0}
        return tuple(slow.get(rank, 1.0) for rank in ranks) if slow else ()


EVEN = MemberSpeeds()


def observed(pace: MemberSpeeds, busy_us: Sequence[int], settings: StragglerSettings) -> MemberSpeeds:
    """Return what is known after a step; ``busy_us`` is the time of a microbatch on each rank, 0 where it had none."""
    measured = sorted(us for us in busy_us if us > 0)
    if len(measured) < 2:
        return pace
    before = {each.rank: each for each in pace.suspicions}
    limit = settings.factor * measured[(len(measured) - 1) // 2]
    # Usually nobody is far from the others, and this is empty.
    suspects = [rank for rank, us in enumerate(busy_us) if us > limit or (us > 0 and rank in before)]
    others = {rank: _median_of_others(measured, busy_us[rank]) for rank in suspects}
    gains = {rank: _gain(busy_us[rank], others[rank], settings) for rank in suspects}
    # The most suspect one first: what speaks against it is not the others' noise, but theirs is its.
    suspects.sort(key=lambda rank: (-_score(before, rank), -gains[rank], rank))
    noise = _noise(pace.noise, suspects, gains, before, len(measured))
    patience = settings.patience * (1.0 + _WEIGHT_OF_NOISE * noise)
    kept = [each for each in pace.suspicions if each.rank not in others]
    total, num_others = sum(max(0.0, gain) for gain in gains.values()), len(measured) - 1
    for rank in suspects:
        total -= max(0.0, gains[rank])
        # What rounding leaves of the sum must not count.
        gain = gains[rank] - (max(0.0, total) / num_others if num_others else 0.0)
        num_others -= 1
        seen = before.get(rank) or SlowEvidence(rank=rank)
        after = _judged(seen, gain, patience, busy_us[rank], others[rank], settings)
        if after is not None:
            kept.append(after)
    return MemberSpeeds(tuple(sorted(kept, key=lambda each: each.rank)), noise)


def _score(before: Mapping[int, SlowEvidence], rank: int) -> float:
    return before[rank].score if rank in before else 0.0


def _gain(own_us: int, others_us: int, settings: StragglerSettings) -> float:
    """How much a step speaks against a member, from -1 to 1."""
    return max(-1.0, min(1.0, (own_us / others_us - 1.0) / (settings.factor - 1.0) - 1.0))


def _noise(
    noise: float,
    suspects: Sequence[int],
    gains: Mapping[int, float],
    before: Mapping[int, SlowEvidence],
    num_measured: int,
) -> float:
    """Take in what a step says about noise: how much speaks against those who are neither found nor the most suspect."""
    slow = {rank for rank in suspects if rank in before and before[rank].found} | set(suspects[:1])
    ordinary = max(1, num_measured - max(1, len(slow)))
    seen = sum(max(0.0, gains[rank]) for rank in suspects if rank not in slow) / ordinary
    after = noise + (_NOISE_RISES if seen > noise else _NOISE_FALLS) * (seen - noise)
    return after if after > 1e-3 else 0.0


def _median_of_others(measured: Sequence[int], own_us: int) -> int:
    """Of two in the middle, the larger one; ``measured`` is in order, and ``own_us`` is in it."""
    middle = (len(measured) - 1) // 2
    return measured[middle] if middle < bisect_left(measured, own_us) else measured[middle + 1]


def _judged(
    seen: SlowEvidence, gain: float, patience: float, own_us: int, others_us: int, settings: StragglerSettings
) -> SlowEvidence | None:
    """Return what speaks against a member after another step; None if nothing does."""
    gain = max(-1.0, gain)
    if seen.found:
        # Noise makes it harder to be found, and not to be forgiven.
        gain, patience = gain * _SLOW_TO_FORGIVE if gain < 0.0 else gain, settings.patience
    score = min(seen.score + gain, patience)
    if score <= 0.0:
        return None
    after = replace(
        seen,
        score=score,
        steps=seen.steps + 1,
        counted=seen.counted + 1,
        own_us=seen.own_us + min(own_us, _MOST_TIMES * others_us),
        others_us=seen.others_us + others_us,
    )
    lost = after.own_us - after.others_us >= settings.min_lost_ms * 1000
    after = replace(after, found=seen.found or (score >= patience and lost))
    review = after.steps % _REVIEW_STEPS == 0
    if review and seen.found and after.ratio < _OVER:
        return None
    if after.found and (review or not seen.found) and settings.answer != "report":
        after = replace(after, slowness=_share_for(after))
    return _aged(after) if review else after


def _share_for(seen: SlowEvidence) -> float:
    """The slowness that a member's share is to be made for."""
    ratio = seen.ratio
    apart = ratio > seen.slowness * _WORTH_IT or ratio * _WORTH_IT < seen.slowness
    return max(1.0, ratio) if apart else seen.slowness


def _aged(seen: SlowEvidence) -> SlowEvidence:
    """Let older steps count half."""
    return replace(seen, counted=seen.counted // 2, own_us=seen.own_us // 2, others_us=seen.others_us // 2)
