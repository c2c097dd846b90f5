"""The functions of ``craft.decide`` that the search drives, as one value.

A planted bug is this value with one function replaced; nothing is patched and nothing in ``src`` is edited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from craft.control.core.persistence import Durable, durable_of, restore
from craft.decide.detect import stragglers
from craft.decide.detect.stragglers import MemberSpeeds, StragglerSettings
from craft.decide.job import apply as applying
from craft.decide.job import last_copy
from craft.decide.job import observe as observing
from craft.decide.job.state import JobState
from craft.decide.policies.policy import Policy
from craft.decide.step import ledger as ledgers
from craft.decide.step import regroup
from craft.decide.step.ledger import Ledger
from craft.decide.step.settle import LossAnswer, settle
from craft.decide.techniques import defaults
from craft.protocol.actions import AnyAction
from craft.protocol.events import AnyEvent
from craft.protocol.membership import Claim, Generation, Settlement

from .world import Target, Worker

SettleFn = Callable[[Sequence[Claim], Callable[[int], int], LossAnswer], Settlement]


def _all_have_it(ledger: Ledger, said: Collection[str]) -> bool:
    return all(member in said for member in ledger.members if member not in ledger.idle)


def _may_commit(ledger: Ledger) -> bool:
    return ledger.may_commit


def _has_no_place(worker: Worker, target: Target) -> bool:
    return bool(worker.number) and target.restoration is not None and target.restoration.number > worker.restoration


@dataclass(frozen=True)
class Rules:
    """Every decision that a worker or the lighthouse of the model makes."""

    enter: Callable[[Ledger, Generation], Ledger] = regroup.enter
    claim: Callable[[Ledger], Claim] = regroup.claim
    settle: SettleFn = settle
    settled: Callable[[Ledger, Settlement, Generation], Ledger] = lambda ledger, settlement, generation: (
        regroup.settled(ledger, settlement)
    )
    """Is given the generation too, for the sake of a planted bug that has not entered it yet."""
    begin: Callable[[Ledger, int], Ledger] = ledgers.begin
    hold: Callable[[Ledger, int], Ledger] = ledgers.hold
    complete: Callable[[Ledger], Ledger] = ledgers.complete
    acknowledged: Callable[[Ledger, str, int, int], Ledger] = ledgers.acknowledged
    may_commit: Callable[[Ledger], bool] = _may_commit
    commit: Callable[[Ledger, Collection[str] | None, MemberSpeeds | None], Ledger] = ledgers.commit
    observed: Callable[[MemberSpeeds, Sequence[int], StragglerSettings], MemberSpeeds] = stragglers.observed
    may_go_back: Callable[[Ledger, Collection[str]], bool] = _all_have_it
    """In the workers, this is an exchange in which all say that they have the checkpoint."""
    adopt: Callable[[Ledger], Ledger] = ledgers.adopt
    observe: Callable[[JobState, AnyEvent], JobState] = observing.observe
    apply: Callable[[JobState, AnyAction, str], JobState] = applying.apply
    policies: tuple[Policy, ...] = defaults().policies()
    is_last_copy: Callable[[JobState, Collection[str]], bool] = last_copy.is_last_copy
    durable_of: Callable[[JobState], Durable] = durable_of
    must_leave: Callable[[Worker], bool] = lambda worker: worker.gone_without
    """In the workers, this is a question of what they remember, not of a function of ``decide``."""
    must_end: Callable[[Worker, Target], bool] = _has_no_place
    """In the workers, this is what they make of a directive (``Meeting``); their agent ends them, too."""
    restore: Callable[[JobState, Durable | None], JobState] = restore
