"""What a worker of a sharded replica can do next, besides computing: hear, settle, exchange, commit, adopt, finish."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from msgspec.structs import replace

from craft.decide.step import ledger as ledgers
from craft.protocol.control_word import MicrobatchRecord, Word
from craft.protocol.errors import StateLost
from craft.protocol.events import WorkerFinished
from craft.protocol.membership import Generation, GroupProgress, Settlement

from .. import lighthouse, workers
from ..workers import Moves
from ..world import Ack, Claimed, Violation, World, is_news
from .rules import ShardedRules
from .world import UPDATE, ShardedBounds, ShardedWorker, ShardedWorld, ShardShare, position_of


def moves(world: ShardedWorld, worker: ShardedWorker, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    """Everything that one worker can do outside of its replica's groups."""
    if worker.status == "running":
        yield from _hear(world, worker, rules)
        yield from _follow(world, worker, rules)
    yield from _settle(world, worker, bounds, rules)
    if worker.acts:
        yield from _complete(world, worker, rules)
        yield from _commit_alone(world, worker, bounds, rules)
        yield from _adopt(world, worker, bounds, rules)


def news(world: ShardedWorld, worker: ShardedWorker) -> Iterator[Generation]:
    """Newer generations that it may hear of now."""
    if worker.status == "running":
        for generation in {target.generation for target in world.targets if target.generation is not None}:
            if is_news(worker, generation):
                yield generation


def _is_free(worker: ShardedWorker, rules: ShardedRules) -> bool:
    """Whether it can enter a generation without asking its replica."""
    if worker.updating:
        return worker.waits_for_twins and not rules.waits_aside
    if not worker.acts or not worker.ledger.is_live or worker.phase in ("wait", "adopt"):
        return True
    alone = rules.enters_alone or (rules.commits_alone and worker.phase == "exchange")
    return alone and worker.phase in ("ready", "exchange")


def _hear(world: ShardedWorld, worker: ShardedWorker, rules: ShardedRules) -> Moves:
    if _is_free(worker, rules):
        for generation in news(world, worker):
            yield ("hear", worker.name, f"generation={generation.name}"), enter(world, worker, generation, rules)
        if worker.phase == "wait" and worker.due and worker.prepared is not None:
            label = ("boundary", worker.name, f"enters={worker.prepared.name}")
            yield label, enter(world, worker, worker.prepared, rules)


def _follow(world: ShardedWorld, worker: ShardedWorker, rules: ShardedRules) -> Moves:
    if (upcoming := worker.prepared) is not None and worker.outside and world.claims(upcoming.number):
        yield ("follow", worker.name, f"generation={upcoming.name}"), enter(world, worker, upcoming, rules)


def enter(world: ShardedWorld, worker: ShardedWorker, generation: Generation, rules: ShardedRules) -> ShardedWorld:
    """Promise, discard what no beat confirmed, claim; an update that it is in goes on afterwards, without its replica."""
    worker = replace(
        worker,
        phase="out",
        beats=0,
        message=None,
        activity=UPDATE,
        progress=worker.progress if worker.updating else 0,
        alone=worker.updating,
        broken=False,
        due=False,
        attempt=0,
        tainted=-1,
        dirty=False,
    )
    entered = workers.enter(world, worker, generation, rules)
    if not worker.updating:
        return entered  # type: ignore[return-value]
    claimed = next(each for each in entered.wire - world.wire if isinstance(each, Claimed))
    claim = replace(claimed.claim, collectives=_progress(world, worker))
    return replace(entered, wire=entered.wire - {claimed} | {replace(claimed, claim=claim)})  # type: ignore[return-value]


def _progress(world: ShardedWorld, worker: ShardedWorker) -> tuple[GroupProgress, ...]:
    """How far it is in its update, by group: all collectives are in one, or each in its own."""
    size, mine = worker.ledger.layout.replica_size, position_of(worker)
    if not world.chained:
        return (GroupProgress(0, tuple(range(size)), worker.progress),)
    split = (0, size // 2, size - 1)
    groups = [tuple(range(first, last + 1)) for first, last in pairwise(split)]
    return tuple(
        GroupProgress(number, group, int(worker.progress > number))
        for number, group in enumerate(groups)
        if mine in group
    )


def _settle(world: ShardedWorld, worker: ShardedWorker, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    generation = worker.generation
    if generation is None or not worker.claims:
        return
    arrived = world.claims(generation.number)
    if len(arrived) < len(generation.members):
        return
    claims = [arrived[name] for name in generation.worker_ids]
    try:
        settlement = rules.settle_all(worker.ledger, claims, bounds.size_of)
    except StateLost as lost:
        if not bounds.may_lose_state:
            raise Violation(f"{worker.name} finds in generation {generation.number}: {lost}") from None
        if not worker.stateless:
            yield ("settle", worker.name, "no state"), world.with_worker(replace(worker, stateless=True))
        return
    _check_settlement(world, worker, settlement)
    commits = worker.name in settlement.commits
    if commits:
        world = workers.recorded(world, worker)  # type: ignore[assignment]
    ledger = rules.settled(worker.ledger, settlement, generation)
    ledger = rules.begin(ledger, bounds.size_of(settlement.step))
    worker = replace(
        worker,
        ledger=ledger,
        hand=None,
        agreed=0,
        able=frozenset(),
        added=worker.added if ledger.held else (),
        spoiled=worker.spoiled and ledger.has_state,
    )
    label = ("settle", worker.name, f"level={settlement.step}")
    alone = not rules.updates_together(ledger, claims, settlement)
    if commits:
        yield label, world.with_worker(replace(worker, phase="work", updating=True, progress=0, since=0, alone=alone))
    elif worker.updating:
        yield label, world.with_worker(replace(worker, phase="work", since=worker.progress, alone=alone))
    elif not ledger.has_state:
        yield label, world.with_worker(replace(worker, phase="adopt"))
    else:
        yield label, begun(world, worker)


def begun(world: ShardedWorld, worker: ShardedWorker) -> ShardedWorld:
    """Begin a step: with its replica, or only with its share of the exchange."""
    if worker.ledger.is_live:
        return world.with_worker(replace(worker, phase="ready"))  # type: ignore[return-value]
    return shared(world, replace(worker, phase="out"))


def _check_settlement(world: ShardedWorld, worker: ShardedWorker, settlement: Settlement) -> None:
    """Every column takes a microbatch from the same replica."""
    for other in world.having("running", "cut"):
        same = other.acts and other.ledger.generation == worker.number and other.ledger.step == settlement.step
        if same and settlement.owners and other.ledger.owners != settlement.owners:
            raise Violation(
                f"P2: {worker.name} takes the microbatches of step {settlement.step} from the replicas {settlement.owners},"
                f" {other.name} from {other.ledger.owners}"
            )


def shared(world: ShardedWorld, worker: ShardedWorker, *, resend: bool = False) -> ShardedWorld:
    """Send this worker's word to all and its sum to its twins."""
    ledger = worker.ledger
    if not ledger.owners:
        return world.with_worker(worker)  # type: ignore[return-value]
    ready = worker.prepared.number if worker.prepared is not None and is_ready(worker) else 0
    records = tuple(
        MicrobatchRecord(microbatch=each, weight=1.0, present=b"\1") for each in sorted(frozenset(worker.added))
    )
    share = ShardShare(
        worker.name,
        ledger.generation,
        ledger.step,
        ready,
        ledger.owners,
        ledger.can_compute,
        ledger.branch,
        0,
        Word(step=ledger.step, records=records, ready=ready, able=ledger.can_compute, resend=resend),
        worker.added,
        ledger.mates,
        worker.attempt,
    )
    return world.with_worker(worker, share)  # type: ignore[return-value]


def is_ready(worker: ShardedWorker) -> bool:
    """Whether it says that it is ready for the upcoming generation."""
    return worker.ledger.has_state


def shares_of(world: ShardedWorld, worker: ShardedWorker) -> dict[str, ShardShare]:
    """The shares of this attempt at the step in flight."""
    ledger = worker.ledger
    wanted = (ledger.generation, ledger.branch, ledger.step, worker.attempt)
    return {
        each.sender: each
        for each in world.wire
        if isinstance(each, ShardShare) and (each.generation, each.branch, each.step, each.attempt) == wanted
    }


def _complete(world: ShardedWorld, worker: ShardedWorker, rules: ShardedRules) -> Moves:
    ledger, layout = worker.ledger, worker.ledger.layout
    is_sent = worker.phase == "exchange" or not ledger.is_live
    if not is_sent or ledger.result is not None or not ledger.owners:
        return
    shares = shares_of(world, worker)
    names = ledger.members
    column = tuple(names[rank] for rank in layout.column(position_of(worker), len(names)))
    if len(shares) < len(names):
        return
    if any(shares[name].owners != ledger.owners for name in column):
        raise Violation(f"P2: twins of generation {ledger.generation} do not agree on who owns what")
    words = tuple(shares[name].word for name in names)
    combined = rules.combine(words, layout, position_of(worker))
    if combined.resend:
        again = shared(world, replace(worker, attempt=worker.attempt + 1))
        if rules.acknowledges_first:
            early = Ack(worker.name, ledger.generation, ledger.step, ledger.branch)
            again = replace(again, wire=again.wire | {early})
        yield ("resend", worker.name), again
        return
    added = sorted((each, shares[name].mates) for name in column for each in shares[name].added)
    if [each for each, _ in added] != list(range(len(ledger.owners))):
        raise Violation(f"P2: column {position_of(worker)} of step {ledger.step} sums {[each for each, _ in added]}")
    if combined.total_weight != len(ledger.owners):
        raise Violation(f"P1: the weights of step {ledger.step} are {combined.total_weight} in all")
    worker = replace(
        worker,
        ledger=rules.complete(ledger),
        hand=frozenset(added),
        agreed=combined.ready,
        able=frozenset(names[rank] for rank in combined.able),
    )
    acknowledgement = Ack(worker.name, ledger.generation, ledger.step, ledger.branch)
    yield ("complete", worker.name, f"step={ledger.step}"), world.with_worker(worker, acknowledgement)


def may_commit(world: ShardedWorld, worker: ShardedWorker, rules: ShardedRules) -> bool:
    """Whether every acknowledgement has arrived."""
    ledger = worker.ledger
    if ledger.result is None:
        return False
    for message in world.wire:
        if isinstance(message, Ack) and message.branch == ledger.branch:
            ledger = rules.acknowledged(ledger, message.sender, message.generation, message.step)
    return rules.may_commit(ledger)


def committed(world: ShardedWorld, worker: ShardedWorker, bounds: ShardedBounds, rules: ShardedRules) -> ShardedWorld:
    """Commit, and begin the update: with the replica, if it computed the step, else with what twins record."""
    live = worker.ledger.is_live
    after: ShardedWorld = workers.recorded(world, worker)  # type: ignore[assignment]
    upcoming, agreed = worker.prepared, worker.agreed
    ledger = rules.commit(worker.ledger, worker.able, None)
    ledger = rules.begin(ledger, bounds.size_of(ledger.step))
    worker = replace(
        worker,
        ledger=ledger,
        hand=None,
        agreed=0,
        able=frozenset(),
        added=(),
        attempt=0,
        spoiled=worker.spoiled and ledger.has_state,
        due=upcoming is not None and agreed == upcoming.number,
    )
    worker = replace(
        worker, phase="work", activity=UPDATE, progress=0, dirty=False, tainted=-1, updating=True, alone=not live
    )
    return after.with_worker(worker)  # type: ignore[return-value]


def updated(world: ShardedWorld, worker: ShardedWorker, rules: ShardedRules) -> ShardedWorld:
    """End the update; the state is whole from here on."""
    worker = replace(
        worker, updating=False, alone=False, progress=0, since=0, spoiled=worker.spoiled or worker.dirty, dirty=False
    )
    if worker.ledger.is_live and not worker.broken:
        return world.with_worker(replace(worker, phase="ready"))  # type: ignore[return-value]
    if worker.broken:
        return world.with_worker(replace(worker, phase="wait"))  # type: ignore[return-value]
    if worker.due and worker.prepared is not None:
        return enter(world, worker, worker.prepared, rules)
    return shared(world, replace(worker, phase="out", due=False))


def _commit_alone(world: ShardedWorld, worker: ShardedWorker, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    """One of a replica that does not compute asks no other."""
    if worker.ledger.is_live and not (rules.commits_alone and worker.phase == "exchange"):
        return
    if may_commit(world, worker, rules):
        yield ("commit", worker.name, f"step={worker.ledger.step}"), committed(world, worker, bounds, rules)


def _adopt(world: ShardedWorld, worker: ShardedWorker, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    """Take the state from a twin whose update is at its end; the others wait for the newcomer in the exchange."""
    ledger = worker.ledger
    if worker.phase != "adopt":
        return
    column = ledger.layout.column(position_of(worker), len(ledger.members))
    for name in (ledger.members[rank] for rank in column):
        donor = world.worker(name)
        if not isinstance(donor, ShardedWorker) or not donor.acts or donor.number != worker.number:
            continue
        if donor.ledger.has_state and not donor.updating and donor.ledger.step == ledger.step:
            if donor.spoiled:
                raise Violation(f"P3: {worker.name} takes its state from {name}, which is spoiled")
            adopted = ledgers.keeps_pace(rules.adopt(ledger))
            label = ("adopt", worker.name, f"from={name}", f"level={ledger.step}")
            yield label, begun(world, replace(worker, ledger=adopted, spoiled=False))
            return


def finish(world: ShardedWorld, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    """All scripts end, once every member has the state after the last step; how they end is searched elsewhere."""
    current = world.job.generation
    inside = [world.worker(name) for name in current.worker_ids] if current is not None else []
    if not inside or world.job.stopping is not None:
        return
    if all(each.status == "running" and each.number == inside[0].number and _is_done(each, bounds) for each in inside):
        spoiled = [each.name for each in inside if isinstance(each, ShardedWorker) and each.spoiled]
        if spoiled:
            raise Violation(f"P1: {', '.join(spoiled)} ends with a state that was computed from wrong numbers")
        after: World = world
        for each in inside:
            after = after.with_worker(replace(each, status="finished"))
        for each in inside:
            after = lighthouse.handled(after, WorkerFinished(worker_id=each.name), bounds, rules)
        yield ("finish", "all"), after


def _is_done(worker: object, bounds: ShardedBounds) -> bool:
    if not isinstance(worker, ShardedWorker) or not worker.acts:
        return False
    ledger = worker.ledger
    done = ledger.committed == bounds.steps and not worker.updating
    return done and (worker.phase == "exchange" or not ledger.is_live)
