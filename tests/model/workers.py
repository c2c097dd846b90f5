"""What a worker of the model can do next. Each function yields ``(label, next world)``; the decisions are the rules'."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from craft.decide.detect.stragglers import StragglerSettings
from craft.decide.step import ledger as ledgers
from craft.protocol.errors import StateLost
from craft.protocol.membership import DROPPED, Generation

from .rules import Rules
from .world import (
    TARGET,
    Ack,
    Bounds,
    Claimed,
    Share,
    Target,
    Verified,
    Violation,
    Worker,
    World,
    goes_back,
    is_news,
    leaves,
)

HASTY = StragglerSettings(patience=0.5)
"""One step is enough."""

Label = tuple[str, ...]
Moves = Iterator[tuple[Label, World]]


def moves(world: World, bounds: Bounds, rules: Rules) -> Moves:
    """Everything that some worker can do now without a fault."""
    yield from prepare(world)
    for worker in world.having("running"):
        yield from _hear(world, worker, rules)
        yield from _follow(world, worker, rules)
    for worker in world.having("running", "cut"):
        yield from _settle(world, worker, bounds, rules)
        if worker.acts:
            yield from _hold(world, worker, bounds, rules)
            yield from _complete(world, worker, bounds, rules)
            yield from _commit(world, worker, bounds, rules)
            yield from _adopt(world, worker, rules)
            yield from _go_back(world, worker, bounds, rules)
            yield from _end_behind(world, worker)
            yield from _finish(world, worker, bounds)


def _hear(world: World, worker: Worker, rules: Rules) -> Moves:
    """A directive arrives: any that is still under way, in any order."""
    for target in world.targets:
        if rules.must_end(worker, target):
            # The job began again: what it has is of no use to anybody.
            yield ("end", worker.name, "fenced"), world.with_worker(replace(worker, status="dead"))
    for target in {
        target.generation: target for target in world.targets if not rules.must_end(worker, target)
    }.values():
        generation = target.generation
        if generation is not None and is_news(worker, generation) and rules.must_leave(worker):
            # All were ready to go on without it, and some may have: what it has may be old.
            yield ("leave", worker.name), world.with_worker(replace(worker, status="left"))
        elif generation is not None and is_news(worker, generation):
            label = ("hear", worker.name, f"generation={generation.name}")
            yield label, enter(world, begins(worker, target), generation, rules)


def begins(worker: Worker, target: Target) -> Worker:
    """One that takes part for the first time does so in the branch that began with the job's latest beginning."""
    again = target.restoration
    if worker.number or again is None:
        return worker
    return replace(worker, restoration=again.number, ledger=replace(worker.ledger, branch=again.branch))


def prepare(world: World) -> Moves:
    """The members of an upcoming generation hear of it and open its group in the background.

    Its group opens only when every member is there, and nothing is done with it before: so they may all do it in one move.
    """
    for target in world.targets:
        upcoming = target.upcoming
        if upcoming is None:
            continue
        members = [worker for worker in world.having("running") if is_news(worker, upcoming)]
        leaving = [worker for worker in world.having("running") if leaves(worker, upcoming)]
        if len(members) == len(upcoming.members) and any(worker.prepared != upcoming for worker in members + leaving):
            after = world
            for worker in members + leaving:
                outside = target.generation is None or target.generation.rank_of(worker.name) is None
                ready = begins(worker, target)
                after = after.with_worker(replace(ready, prepared=upcoming, outside=outside))
            yield ("prepare", f"upcoming={upcoming.name}"), after


def enter(world: World, worker: Worker, generation: Generation, rules: Rules) -> World:
    """Promise, then claim. What it sent under older generations may still arrive."""
    entered = rules.enter(worker.ledger, generation)
    prepared = worker.prepared
    if prepared is not None and prepared.number <= generation.number:
        prepared = None
    worker = replace(
        worker,
        ledger=entered,
        generation=generation,
        prepared=prepared,
        outside=prepared is not None and worker.outside,
        hand=worker.hand if entered.result is not None else None,
        stateless=False,
        unreported=(*worker.unreported, generation.number),
    )
    return world.with_worker(worker, Claimed(worker.name, generation, rules.claim(entered)))


def _follow(world: World, worker: Worker, rules: Rules) -> Moves:
    """A joiner enters the generation it prepared for when the first claim of it arrives."""
    upcoming = worker.prepared
    if upcoming is not None and worker.outside and world.claims(upcoming.number):
        yield ("follow", worker.name, f"generation={upcoming.name}"), enter(world, worker, upcoming, rules)


def _settle(world: World, worker: Worker, bounds: Bounds, rules: Rules) -> Moves:
    generation = worker.generation
    if generation is None or not worker.claims:
        return
    arrived = world.claims(generation.number)
    if len(arrived) < len(generation.members):
        return
    claims = [arrived[name] for name in generation.worker_ids]
    try:
        settlement = rules.settle(claims, bounds.size_of, bounds.on_loss)
    except StateLost:
        if not worker.stateless:
            yield ("settle", worker.name, "no state"), world.with_worker(replace(worker, stateless=True))
        return
    if settlement.owners or not settlement.rewinds:
        _check_owners(settlement.owners, len(claims), bounds, settlement.step)
    if worker.name in settlement.commits:
        world = recorded(world, worker)
        worker = replace(worker, knows=worker.knows or worker.ledger.step == bounds.back_after)
    elif worker.ledger.has_state and worker.ledger.rewinds < settlement.rewinds and not worker.knows:
        yield ("end", worker.name, "left behind"), world.with_worker(replace(worker, status="dead"))
        return
    worker = replace(
        worker,
        ledger=rules.settled(worker.ledger, settlement, generation),
        hand=None,
        agreed=0,
        able=frozenset(),
        busy_us=(),
    )
    label = (
        "settle",
        worker.name,
        f"branch={settlement.branch}" * bool(settlement.branch),
        f"level={settlement.step}",
    )
    yield tuple(filter(None, label)), _contributed(world, _begun(worker, bounds, rules), bounds)


def _begun(worker: Worker, bounds: Bounds, rules: Rules) -> Worker:
    """After going back a step is planned when it begins."""
    return replace(worker, ledger=rules.begin(worker.ledger, bounds.size_of(worker.ledger.step)))


def _go_back(world: World, worker: Worker, bounds: Bounds, rules: Rules) -> Moves:
    """At the boundary at which numbers are not finite: read the checkpoint, tell all, go back when all have it."""
    ledger = worker.ledger
    if not goes_back(worker, bounds) or not ledger.has_state:
        return
    said = world.verified(ledger.generation)
    if worker.name not in said:
        worker = replace(worker, ledger=ledgers.verified(ledger, *TARGET))
        yield ("verify", worker.name), world.with_worker(worker, Verified(worker.name, ledger.generation))
    elif rules.may_go_back(ledger, said):
        worker = _begun(replace(worker, ledger=ledgers.rewound(ledger)), bounds, rules)
        yield ("back", worker.name), _contributed(world, worker, bounds)


def _end_behind(world: World, worker: Worker) -> Moves:
    """One that joined meanwhile sees by a word of the others that all have gone back: it ends, another one may come."""
    ledger = worker.ledger
    shares = [each for each in world.wire if isinstance(each, Share) and each.generation == ledger.generation]
    if worker.status == "running" and not worker.knows and any(each.branch > ledger.branch for each in shares):
        yield ("end", worker.name, "left behind"), world.with_worker(replace(worker, status="dead"))


def _contributed(world: World, worker: Worker, bounds: Bounds) -> World:
    """Send this worker's share as soon as it holds all of it; idle members send theirs, with nothing but the word."""
    ledger = worker.ledger
    if not ledger.owners or ledger.pending or goes_back(worker, bounds):
        return world.with_worker(worker)
    share = Share(
        worker.name,
        ledger.generation,
        ledger.step,
        _ready(worker),
        ledger.owners,
        ledger.can_compute,
        ledger.branch,
        _busy_us(worker, bounds),
    )
    return world.with_worker(worker, share)


def _busy_us(worker: Worker, bounds: Bounds) -> int:
    """How long a microbatch took, in a world where that differs."""
    if bounds.slow is None or not worker.ledger.held:
        return 0
    return 100_000 if worker.name == bounds.slow else 10_000


def _ready(worker: Worker) -> int:
    """The upcoming generation for which it is ready."""
    return worker.prepared.number if worker.prepared is not None and worker.ledger.has_state else 0


def _hold(world: World, worker: Worker, bounds: Bounds, rules: Rules) -> Moves:
    if worker.ledger.pending and not goes_back(worker, bounds):
        microbatch = worker.ledger.pending[0]
        worker = replace(worker, ledger=rules.hold(worker.ledger, microbatch))
        yield ("hold", worker.name, f"microbatch={microbatch}"), _contributed(world, worker, bounds)


def _complete(world: World, worker: Worker, bounds: Bounds, rules: Rules) -> Moves:
    ledger = worker.ledger
    if ledger.result is not None or not ledger.owners:
        return
    shares = world.shares(ledger)
    if len(shares) < len(ledger.members):
        return
    if any(share.owners != ledger.owners for share in shares.values()):
        raise Violation(f"P2: members of generation {ledger.generation} do not agree on who owns what")
    _check_owners(ledger.owners, len(ledger.members), bounds, ledger.step)
    worker = replace(
        worker,
        ledger=rules.complete(ledger),
        hand=frozenset(microbatch for microbatch, owner in enumerate(ledger.owners) if owner != DROPPED),
        agreed=min(share.ready for share in shares.values()),
        able=frozenset(name for name, share in shares.items() if share.able),
        busy_us=tuple(shares[name].busy_us for name in ledger.members),
    )
    acknowledgement = Ack(worker.name, ledger.generation, ledger.step, ledger.branch)
    yield ("complete", worker.name, f"step={ledger.step}"), world.with_worker(worker, acknowledgement)


def _check_owners(owners: tuple[int, ...], num_ranks: int, bounds: Bounds, step: int) -> None:
    lowest = 0 if bounds.on_loss == "redo" else DROPPED
    if len(owners) != bounds.size_of(step) or any(not lowest <= owner < num_ranks for owner in owners):
        raise Violation(f"P2: owners {owners} are not a partition of the microbatches of step {step}")


def _commit(world: World, worker: Worker, bounds: Bounds, rules: Rules) -> Moves:
    ledger = worker.ledger
    if ledger.result is None:
        return
    for message in world.wire:
        if isinstance(message, Ack) and message.branch == ledger.branch:
            ledger = rules.acknowledged(ledger, message.sender, message.generation, message.step)
    if not rules.may_commit(ledger):
        return
    step = ledger.step
    world = recorded(world, worker)
    worker = replace(worker, knows=worker.knows or step == bounds.back_after)
    pace = rules.observed(ledger.pace, worker.busy_us, HASTY)
    ledger = rules.commit(ledger, worker.able, pace)
    upcoming, agreed = worker.prepared, worker.agreed
    worker = replace(worker, ledger=ledger, hand=None, agreed=0, able=frozenset(), busy_us=())
    label = ("commit", worker.name, f"step={step}")
    if ledger.step == bounds.steps:
        yield label, world.with_worker(worker)
    elif upcoming is not None and agreed == upcoming.number and leaves(worker, upcoming):
        yield (*label, "leaves"), world.with_worker(replace(worker, status="left"))
    elif upcoming is not None and agreed == upcoming.number:
        # All saw the same combined word, so all enter it at this very boundary.
        yield (*label, f"enters={upcoming.name}"), enter(world, worker, upcoming, rules)
    elif goes_back(worker, bounds):
        yield label, world.with_worker(worker)
    else:
        yield label, _contributed(world, _begun(worker, bounds, rules), bounds)


def recorded(world: World, worker: Worker) -> World:
    """The worker commits what it has in hand: compare it with what others committed for the same step."""
    step, hand = worker.ledger.step, worker.hand
    if hand is None:
        raise Violation(f"P3: {worker.name} commits without a result")
    branch = worker.ledger.branch
    known = dict(world.history)
    if step > 0 and (branch, step - 1) not in known:
        raise Violation(f"P3: {worker.name} commits step {step} before anybody committed step {step - 1}")
    if known.setdefault((branch, step), hand) != hand:
        raise Violation(
            f"P3: {worker.name} commits step {step} made of microbatches {sorted(hand)},"
            f" another committed it made of {sorted(known[branch, step])}"
        )
    return replace(world, history=frozenset(known.items()))


def _adopt(world: World, worker: Worker, rules: Rules) -> Moves:
    """The state as of the settlement arrives from a donor; with the results queued since, the joiner is level."""
    if worker.ledger.has_state:
        return
    donors = (world.worker(name) for name in worker.ledger.members if name != worker.name)
    if any(donor.acts and donor.number == worker.number and donor.ledger.has_state for donor in donors):
        adopted = replace(worker, ledger=ledgers.keeps_pace(rules.adopt(worker.ledger)))
        yield ("adopt", worker.name, f"level={adopted.ledger.step}"), world.with_worker(adopted)


def _finish(world: World, worker: Worker, bounds: Bounds) -> Moves:
    """The script ends, once every member of the generation has committed every step: nobody needs this worker then."""
    if worker.status != "running" or worker.ledger.committed != bounds.steps:
        return
    others = (world.worker(name) for name in worker.ledger.members if name != worker.name)
    if worker.ledger.generation == worker.number and all(
        other.status == "finished" or (other.ledger.committed == bounds.steps and other.number == worker.number)
        for other in others
    ):
        yield ("finish", worker.name), world.with_worker(replace(worker, status="finished"))
