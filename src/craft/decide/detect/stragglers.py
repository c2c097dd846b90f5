"""Find slow members from how long a microbatch takes on each, step by step.

Every member has the same times at the same step, from the control word, and finds the same without communication: the
plan of the next step may depend on it. So this uses only additions and divisions, which have the same bits on every
machine. A new generation begins with an empty ``MemberSpeeds``, since joiners have not seen the steps before.

A worker is slow relative to the others. A step in which it takes at least ``factor`` times the median of the others
counts against it, any other step for it; no step counts for more than one. Noise hits all members: the evidence against
the *others* is remembered as noise, and the more there is, the more it takes to find a member slow.
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
"""The initial noise of a generation."""
_NOISE_RISES, _NOISE_FALLS = 1 / 16, 1 / 64
"""How fast the noise estimate follows a step that is above or below it."""
_WEIGHT_OF_NOISE = 8.0
"""At full noise, finding a member takes this many times more patience."""
_SLOW_TO_FORGIVE = 0.25
"""Weight of evidence for a slow member: with a small share, it is fast by luck."""
_MOST_TIMES = 8
"""A step counts as at most this many times slower: a hang of a second must not decide the shares."""
_REVIEW_STEPS = 16
"""The share of a slow member is reviewed this often; older steps then count half."""
_OVER = 1.2
"""A slow member below this ratio over the latest steps is not slow any more."""
_WORTH_IT = 1.25
"""A share changes only if the slowness changed by this factor: every new plan has a small cost."""


class StragglerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a worker counts as slow, and the answer; the same on every worker."""

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
    """The evidence against one member."""

    rank: int
    score: float = 0.0
    """Grows by up to 1 with every slow step, and shrinks with every other one."""
    steps: int = 0
    """Steps observed."""
    counted: int = 0
    """How many of the latest steps are in the sums below."""
    own_us: int = 0
    others_us: int = 0
    found: bool = False
    """Whether it counts as slow; until the score is down to 0."""
    slowness: float = 1.0
    """The ratio that its share is planned for."""

    @property
    def ratio(self) -> float:
        """How many times longer than elsewhere a microbatch takes there."""
        return self.own_us / self.others_us if self.others_us else 1.0


class MemberSpeeds(msgspec.Struct, frozen=True):
    """What the members of a generation know of each other's speed; the same on all after the same step."""

    suspicions: tuple[SlowEvidence, ...] = ()
    noise: float = _QUIET
    """Evidence against an ordinary member in an ordinary step, from 0 to 1."""

    @property
    def found(self) -> tuple[SlowEvidence, ...]:
        return tuple(each for each in self.suspicions if each.found)

    def slowness(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """Return how many times longer a microbatch takes on each of ``ranks``; empty if all are equal."""
        slow = {each.rank: each.slowness for each in self.suspicions if each.slowness > 1.0}
        return tuple(slow.get(rank, 1.0) for rank in ranks) if slow else ()


EVEN = MemberSpeeds()


def observed(pace: MemberSpeeds, busy_us: Sequence[int], settings: StragglerSettings) -> MemberSpeeds:
    """Return what is known after a step; ``busy_us``: time per microbatch on each rank, 0 where it had none."""
    measured = sorted(us for us in busy_us if us > 0)
    if len(measured) < 2:
        return pace
    before = {each.rank: each for each in pace.suspicions}
    limit = settings.factor * measured[(len(measured) - 1) // 2]
    # Usually all are close together, and this is empty.
    suspects = [rank for rank, us in enumerate(busy_us) if us > limit or (us > 0 and rank in before)]
    others = {rank: _median_of_others(measured, busy_us[rank]) for rank in suspects}
    gains = {rank: _gain(busy_us[rank], others[rank], settings) for rank in suspects}
    # Most suspect first: the evidence against it is not noise for the others, but theirs is for it.
    suspects.sort(key=lambda rank: (-_score(before, rank), -gains[rank], rank))
    noise = _noise(pace.noise, suspects, gains, before, len(measured))
    patience = settings.patience * (1.0 + _WEIGHT_OF_NOISE * noise)
    kept = [each for each in pace.suspicions if each.rank not in others]
    total, num_others = sum(max(0.0, gain) for gain in gains.values()), len(measured) - 1
    for rank in suspects:
        total -= max(0.0, gains[rank])
        # Rounding may leave a small negative sum.
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
    """Return how much a step counts against a member, from -1 to 1."""
    return max(-1.0, min(1.0, (own_us / others_us - 1.0) / (settings.factor - 1.0) - 1.0))


def _noise(
    noise: float,
    suspects: Sequence[int],
    gains: Mapping[int, float],
    before: Mapping[int, SlowEvidence],
    num_measured: int,
) -> float:
    """Update the noise by the evidence against members that are neither slow nor the most suspect."""
    slow = {rank for rank in suspects if rank in before and before[rank].found} | set(suspects[:1])
    ordinary = max(1, num_measured - max(1, len(slow)))
    seen = sum(max(0.0, gains[rank]) for rank in suspects if rank not in slow) / ordinary
    after = noise + (_NOISE_RISES if seen > noise else _NOISE_FALLS) * (seen - noise)
    return after if after > 1e-3 else 0.0


def _median_of_others(measured: Sequence[int], own_us: int) -> int:
    """Return the larger of two medians; ``measured`` is sorted and contains ``own_us``."""
    middle = (len(measured) - 1) // 2
    return measured[middle] if middle < bisect_left(measured, own_us) else measured[middle + 1]


def _judged(
    seen: SlowEvidence, gain: float, patience: float, own_us: int, others_us: int, settings: StragglerSettings
) -> SlowEvidence | None:
    """Return the evidence against a member after another step; None without any."""
    gain = max(-1.0, gain)
    if seen.found:
        # Noise makes it harder to be found slow, not to recover.
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
    """Return the slowness that a member's share is planned for."""
    ratio = seen.ratio
    apart = ratio > seen.slowness * _WORTH_IT or ratio * _WORTH_IT < seen.slowness
    return max(1.0, ratio) if apart else seen.slowness


def _aged(seen: SlowEvidence) -> SlowEvidence:
    """Let older steps count half."""
    return replace(seen, counted=seen.counted // 2, own_us=seen.own_us // 2, others_us=seen.others_us // 2)
