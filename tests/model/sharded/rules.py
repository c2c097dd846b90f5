"""The functions of ``craft.decide`` that the search over sharded replicas drives, beside those of ``Rules``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from craft.decide.step import beat, regroup
from craft.decide.step import ledger as ledgers
from craft.decide.step.beat import BeatAnswer, BeatMessage
from craft.decide.step.columns import combine_columns
from craft.decide.step.ledger import Ledger
from craft.decide.step.replicas import Layout
from craft.decide.step.settle import settle
from craft.protocol.control_word import Combined, Word
from craft.protocol.membership import Claim, Generation, Settlement

from ..rules import Rules

SizeOf = Callable[[int], int]


def settle_all(ledger: Ledger, claims: Sequence[Claim], size_of: SizeOf) -> Settlement:
    """What a member makes of all claims; ``ledger`` is its own, for the sake of planted bugs."""
    return settle(claims, size_of, "redo", ledger.layout)


@lru_cache(maxsize=100_000)
def combined(words: tuple[Word, ...], layout: Layout, position: int) -> Combined:
    return combine_columns(words, layout, position)


@dataclass(frozen=True)
class ShardedRules(Rules):
    """Every decision about replicas."""

    settle_all: Callable[[Ledger, Sequence[Claim], SizeOf], Settlement] = settle_all
    combine: Callable[[tuple[Word, ...], Layout, int], Combined] = combined
    before_microbatch: Callable[[Sequence[BeatMessage]], BeatAnswer] = beat.before_microbatch
    before_commit: Callable[[Sequence[BeatMessage]], BeatAnswer] = beat.before_commit
    confirmed: Callable[[Ledger], Ledger] = ledgers.confirmed
    echoes_updates: bool = False
    """Whether a broken collective of an update is echoed, like one of a microbatch."""
    waits_aside: bool = False
    """Whether a worker that waits for a twin's output enters no generation meanwhile."""
    takes_any_step: bool = False
    """Whether a worker takes an output of any step from its twins."""
    acknowledges_first: bool = False
    """Whether a member acknowledges before it looks whether its gradients are sent again."""
    enters_alone: bool = False
    """Whether a worker enters a generation at its own safe points, not at those of its replica."""
    commits_alone: bool = False
    """Whether a worker leaves the exchange without a beat: it commits, or enters a generation."""
    ends_groups: bool = True
    """Whether a worker that enters a generation ends the groups of its replica at once, not when all have settled."""
    ends_replica: Callable[[Ledger, Generation], bool] = regroup.ends_replica
    updates_together: Callable[[Ledger, Sequence[Claim], Settlement], bool] = regroup.updates_together
