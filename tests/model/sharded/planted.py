"""Bugs to be found: the rules of sharded replicas with one decision replaced by a plausible wrong one."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from craft.decide.step import ledger as ledgers
from craft.decide.step.ledger import Ledger
from craft.decide.step.replicas import Layout
from craft.decide.step.settle import settle
from craft.protocol.control_word import Combined, Word
from craft.protocol.membership import Claim, Generation, Settlement, Slot

from .rules import ShardedRules, SizeOf, combined

ECHOES_IN_UPDATES = ShardedRules(echoes_updates=True)
WAITS_FOR_A_TWIN_ASIDE = ShardedRules(waits_aside=True)
TAKES_OUTPUTS_OF_ANY_STEP = ShardedRules(takes_any_step=True)


def _merged_at_once(ledger: Ledger, microbatch: int) -> Ledger:
    return replace(ledgers.hold(ledger, microbatch), leaf=None)


def _holds_what_all_claim(ledger: Ledger, claims: Sequence[Claim], size_of: SizeOf) -> Settlement:
    """Of what the workers of a replica hold, what all of them do; the rest stays in the sums of some."""
    common = list(claims)
    for replica in ledger.layout.complete(len(claims)):
        ranks = ledger.layout.ranks_of(replica)
        held = frozenset.intersection(*(frozenset(claims[rank].held) for rank in ranks))
        for rank in ranks:
            given = {*claims[rank].held, *claims[rank].pending}
            common[rank] = replace(
                claims[rank], held=tuple(sorted(held)), pending=tuple(sorted(given.difference(held)))
            )
    return settle(common, size_of, "redo", ledger.layout)


MERGES_BEFORE_THE_BEAT = ShardedRules(hold=_merged_at_once, settle_all=_holds_what_all_claim)


def _settled_by_column(ledger: Ledger, claims: Sequence[Claim], size_of: SizeOf) -> Settlement:
    """The twins of one position settle among themselves, as if each were a whole replica."""
    layout = ledger.layout
    column = layout.column(layout.position_of(ledger.rank), len(claims))
    alone = Layout(1, tuple(Slot(layout.replica_of(rank), 0) for rank in column))
    return settle([claims[rank] for rank in column], size_of, "redo", alone)


COLUMNS_SETTLE_ALONE = ShardedRules(settle_all=_settled_by_column)


def _resend_of_one_column(words: tuple[Word, ...], layout: Layout, position: int) -> Combined:
    column = layout.column(position, len(words))
    theirs = any(word.resend for rank, word in enumerate(words) if rank in column)
    return replace(combined(words, layout, position), resend=theirs)


COLUMNS_RESEND_ALONE = ShardedRules(combine=_resend_of_one_column)
ACKNOWLEDGES_WHAT_IS_SENT_AGAIN = ShardedRules(combine=_resend_of_one_column, acknowledges_first=True)
POSITIONS_ENTER_ALONE = ShardedRules(enters_alone=True, ends_groups=False)
POSITIONS_LEAVE_THE_EXCHANGE_ALONE = ShardedRules(commits_alone=True, ends_groups=False)


def _always(ledger: Ledger, generation: Generation) -> bool:
    return True


def _never(ledger: Ledger, generation: Generation) -> bool:
    return False


DIRECTIVES_BREAK_REPLICAS = ShardedRules(ends_replica=_always)
WAITS_FOR_ONE_THAT_IS_CUT_OFF = ShardedRules(ends_replica=_never)


def _whenever_complete(ledger: Ledger, claims: Sequence[Claim], settlement: Settlement) -> bool:
    return ledger.is_live


def _only_at_the_beginning(ledger: Ledger, claims: Sequence[Claim], settlement: Settlement) -> bool:
    return ledger.is_live and all(mate in settlement.commits for mate in ledger.mates)


UPDATES_TOGETHER_FROM_DIFFERENT_PLACES = ShardedRules(updates_together=_whenever_complete)
NEVER_RESUMES_UPDATES = ShardedRules(updates_together=_only_at_the_beginning)
