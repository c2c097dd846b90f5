"""Bugs to be found: the rules with one decision replaced by a plausible wrong one."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from craft.control.core.persistence import Durable
from craft.decide.job.apply import apply, restarted
from craft.decide.job.state import JobState
from craft.decide.policies.loss import LossPolicy
from craft.decide.policies.policy import Policy
from craft.decide.policies.stop import StopPolicy
from craft.decide.step import regroup
from craft.decide.step.ledger import Ledger
from craft.decide.techniques import defaults
from craft.protocol.actions import AnyAction, Restore
from craft.protocol.events import AnyEvent, WorkerFinished
from craft.protocol.membership import Generation, Settlement

from .rules import Rules
from .world import Worker


def _result_is_enough(ledger: Ledger) -> bool:
    return ledger.settled and ledger.result == ledger.generation


COMMITS_WITHOUT_ACKNOWLEDGEMENTS = Rules(may_commit=_result_is_enough)


def _idle_members_do_not_count(ledger: Ledger) -> bool:
    busy = frozenset(ledger.members[owner] for owner in ledger.owners)
    return ledger.settled and ledger.result == ledger.generation and ledger.acknowledged_by >= busy


def _alone(ledger: Ledger, said: Collection[str]) -> bool:
    return True


GOES_BACK_ALONE = Rules(may_go_back=_alone)

SKIPS_IDLE_MEMBERS = Rules(may_commit=_idle_members_do_not_count)


def _keep_the_old_generation(ledger: Ledger, generation: Generation) -> Ledger:
    return ledger if ledger.settled else regroup.enter(ledger, generation)


def _enter_only_to_settle(ledger: Ledger, settlement: Settlement, generation: Generation) -> Ledger:
    if ledger.generation < generation.number:
        ledger = regroup.enter(ledger, generation)
    return regroup.settled(ledger, settlement)


CLAIMS_WITHOUT_THE_PROMISE = Rules(enter=_keep_the_old_generation, settled=_enter_only_to_settle)


def _forget_what_was_proposed(fresh: JobState, durable: Durable | None) -> JobState:
    return restarted(fresh, durable.generation if durable is not None else None)


REUSES_GENERATION_NUMBERS = Rules(restore=_forget_what_was_proposed)


def _never(worker: Worker) -> bool:
    return False


STAYS_THOUGH_ALL_WENT_ON = Rules(must_leave=_never)


def _claims_before_the_state_is_there(ledger: Ledger, generation: Generation) -> Ledger:
    return replace(regroup.enter(ledger, generation), has_state=True)


def _remembers_who_was_slow(ledger: Ledger, settlement: Settlement, generation: Generation) -> Ledger:
    return replace(regroup.settled(ledger, settlement), pace=ledger.pace)


REMEMBERS_WHO_WAS_SLOW = Rules(settled=_remembers_who_was_slow)


COUNTS_JOINERS_AS_WHOLE = Rules(enter=_claims_before_the_state_is_there)


def _any_member_has_the_state(state: JobState, suspects: Collection[str]) -> bool:
    return not frozenset(state.members).difference(suspects)


TAKES_NEWCOMERS_FOR_COPIES = Rules(is_last_copy=_any_member_has_the_state)


class _FinishedIsNeverMissed(LossPolicy):
    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        return () if isinstance(event, WorkerFinished) else super().decide(state, event)


class _SparesKeepTheJobOpen(StopPolicy):
    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, WorkerFinished) and state.having("waiting"):
            return ()
        return super().decide(state, event)


def _with(wrong: Policy) -> Rules:
    """The built-in policies, with ``wrong`` in the place of the one that it is made from."""
    policies = tuple(wrong if isinstance(wrong, type(policy)) else policy for policy in defaults().policies())
    return Rules(policies=policies)


WAITS_FOR_THE_FINISHED = _with(_FinishedIsNeverMissed())
WAITS_FOR_SPARES = _with(_SparesKeepTheJobOpen())


def _begins_again_in_the_same_branch(state: JobState, action: AnyAction, nonce: str) -> JobState:
    return apply(state, replace(action, branch=0) if isinstance(action, Restore) else action, nonce)


BEGINS_AGAIN_IN_THE_SAME_BRANCH = Rules(apply=_begins_again_in_the_same_branch)
