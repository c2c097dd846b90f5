"""What the lighthouse of the model can hear and do, and the faults that can happen to the whole world."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from craft.decide.job.state import JobState
from craft.decide.policies.policy import decide
from craft.decide.step.ledger import Ledger
from craft.protocol.actions import Propose, Reconfigure, Restore, Stop
from craft.protocol.events import (
    AnyEvent,
    ArrivalsEnded,
    CheckpointWritten,
    DrainRequested,
    ExchangeBroken,
    GenerationEntered,
    GenerationStuck,
    HoldExpired,
    StateGone,
    WorkerCaughtUp,
    WorkerEnded,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)

from .rules import Rules
from .workers import Label, Moves
from .world import Bounds, Target, Violation, Worker, World

NONCES = "xyzuvw"
CHECKPOINT = CheckpointWritten(name="c", branch=0, step=0, url="")


def first_world(bounds: Bounds, rules: Rules) -> World:
    """All workers have joined and the first generation is made, but nobody has heard of it yet."""
    first = bounds.workers + bounds.joiners
    names = "abcdefgh"[: first + bounds.fresh]
    world = World(
        workers=tuple(Worker(ledger=Ledger(worker_id=name)) for name in names),
        job=_with_checkpoint(bounds.new_job(), bounds),
        crashes=bounds.crashes,
        cuts=bounds.cuts,
        suspicions=bounds.suspicions,
        breaks=bounds.breaks,
        drains=bounds.drains,
        restarts=bounds.restarts,
    )
    for name in names[:first]:
        world = handled(world, WorkerJoined(member=bounds.member(name)), bounds, rules)
    return world


def _with_checkpoint(job: JobState, bounds: Bounds) -> JobState:
    """One of the very beginning, where the job may have to begin again; the real one has it from its journal."""
    return replace(job, checkpoint=CHECKPOINT) if bounds.fresh else job


def moves(world: World, bounds: Bounds, rules: Rules) -> Moves:
    """Every report that the lighthouse can take in now. A report may be late, lost or repeated."""
    if world.job.stopping is not None:
        return
    for worker in world.workers:
        for label, event in _news(world, worker, bounds):
            yield label, handled(world, event, bounds, rules)
    former = world.job.former
    if former is not None:
        # Others would be started again and again; here there are only so many.
        yield ("TIME", "is up"), handled(world, HoldExpired(generation=former.number), bounds, rules)
        yield ("TIME", "nobody else"), handled(world, ArrivalsEnded(generation=former.number), bounds, rules)
    if bounds.late_news:
        yield from _entries_in_any_order(world, bounds, rules)
    elif _have_entered_together(world):
        yield ("report", "all", "entered"), _entries(world, bounds, rules)


def _news(world: World, worker: Worker, bounds: Bounds) -> Iterator[tuple[Label, AnyEvent]]:
    view = world.job.view(worker.name)
    if worker.status == "running" and view is None and bounds.may_join(world):
        yield ("report", worker.name, "joined"), WorkerJoined(member=bounds.member(worker.name))
    elif worker.status == "running" and worker.stateless and world.job.stopping is None:
        yield ("report", worker.name, "no state"), StateGone(generation=worker.number)
    elif worker.status == "finished" and (view is None or view.standing != "finished"):
        yield ("report", worker.name, "finished"), WorkerFinished(worker_id=worker.name)
    elif worker.status == "left" and view is not None and view.standing == "member":
        yield ("report", worker.name, "left"), WorkerLeft(worker_id=worker.name)
    elif worker.status == "running" and view is not None and view.behind and worker.ledger.has_state:
        yield ("report", worker.name, "caught up"), WorkerCaughtUp(worker_id=worker.name)
    elif worker.status == "dead" and (view is None or view.standing != "lost"):
        yield ("report", worker.name, "lost"), WorkerLost(worker_id=worker.name, reason="killed")
    elif worker.status == "dead" and view is not None and not view.ended:
        yield ("report", worker.name, "ended"), WorkerEnded(worker_id=worker.name)


def _have_entered_together(world: World) -> bool:
    """Whether reports of entries would make a difference: only that all are in, or one is in the upcoming one, does."""
    current, upcoming = world.job.generation, world.job.upcoming
    running = list(world.having("running"))
    if current is None or not any(worker.unreported for worker in running):
        return False
    if upcoming is not None and any(worker.number == upcoming.number for worker in running):
        return True
    return all(worker.number >= current.number for worker in running if current.rank_of(worker.name) is not None)


def _entries(world: World, bounds: Bounds, rules: Rules) -> World:
    for worker in world.having("running"):
        if worker.unreported:
            world = _entry(world, worker, worker.number, bounds, rules)
    return world


def _entries_in_any_order(world: World, bounds: Bounds, rules: Rules) -> Moves:
    for worker in world.having("running"):
        for number in worker.unreported:
            label = ("report", worker.name, f"entered={number}")
            yield label, _entry(world, worker, number, bounds, rules)


def _entry(world: World, worker: Worker, number: int, bounds: Bounds, rules: Rules) -> World:
    rest = tuple(other for other in worker.unreported if other > number)
    world = world.with_worker(replace(worker, unreported=rest))
    entered = GenerationEntered(worker_id=worker.name, generation=number, behind=not worker.ledger.has_state)
    return handled(world, entered, bounds, rules)


def handled(world: World, event: AnyEvent, bounds: Bounds, rules: Rules) -> World:
    """observe, decide, apply; make durable; tell. The same report once more must change nothing."""
    world = answered(world, event, bounds, rules)
    if rules.observe(world.job, event) != world.job:
        raise Violation(f"the repeated report {event} is not ignored")
    again = decide(rules.policies, world.job, event)
    if any(isinstance(action, Reconfigure | Propose) for action in again):
        raise Violation(f"the repeated report {event} leads to another generation: {again}")
    return world


def answered(world: World, event: AnyEvent, bounds: Bounds, rules: Rules) -> World:
    job = rules.observe(world.job, event)
    durable, highest = world.durable, world.highest
    for action in decide(rules.policies, job, event):
        job = rules.apply(job, action, NONCES[world.lighthouses - 1])
        made = None
        if isinstance(action, Reconfigure):
            made = job.generation
        if isinstance(action, Propose):
            made = job.upcoming
        if made is not None:
            if made.number <= highest:
                raise Violation(f"generation number {made.number} is given out twice, now as {made.name}")
            highest = made.number
        if isinstance(action, Reconfigure | Propose | Restore | Stop):
            durable = rules.durable_of(job)
    world = replace(world, job=job, durable=durable, highest=highest)
    _check_stop(world, bounds)
    return _told(world)


def _told(world: World) -> World:
    target = Target(world.job.generation, world.job.upcoming, world.job.restoration)
    if target in world.targets[-1:]:
        return world
    return replace(world, targets=(*world.targets, target))


def _check_stop(world: World, bounds: Bounds) -> None:
    stop = world.job.stopping
    if stop is None:
        return
    members = world.job.members
    if stop.exit_code != 0 and bounds.can_go_on(world):
        raise Violation(f"the job is given up though it could go on: {stop.reason}")
    for worker in world.having("running") if stop.exit_code == 0 else ():
        if worker.name in members and worker.ledger.has_state and worker.ledger.step != bounds.steps:
            raise Violation(f"the job is stopped as finished, and {worker.name} has not committed every step")
    if stop.exit_code == 0 and not any(worker.ledger.committed == bounds.steps for worker in world.workers):
        raise Violation("the job is stopped as finished, and nobody has committed every step")


def faults(world: World, bounds: Bounds, rules: Rules) -> Moves:
    """Everything that can go wrong now."""
    if world.job.stopping is not None:
        return
    for worker in world.having("running"):
        if world.crashes and bounds.may_crash(world, worker.name):
            after = replace(world, crashes=world.crashes - 1).with_worker(replace(worker, status="dead"))
            if not bounds.late_news:
                after = handled(after, WorkerLost(worker_id=worker.name, reason="killed"), bounds, rules)
            yield ("CRASH", worker.name), after
        if world.cuts and bounds.may_crash(world, worker.name) and world.job.view(worker.name) is not None:
            after = replace(world, cuts=world.cuts - 1).with_worker(replace(worker, status="cut"))
            lost = WorkerLost(worker_id=worker.name, reason="silent", source="heartbeat")
            yield ("CUT OFF", worker.name), handled(after, lost, bounds, rules)
        if world.suspicions and world.job.view(worker.name) is not None:
            yield ("SUSPECT", worker.name), _suspected(world, worker, bounds, rules)
        if world.drains and world.job.view(worker.name) is not None:
            after = replace(world, drains=world.drains - 1)
            told = DrainRequested(worker_id=worker.name)
            yield ("DRAIN", worker.name), handled(after, told, bounds, rules)
    if world.restarts:
        yield ("RESTART", "lighthouse"), _restarted(world, bounds, rules)
    if world.breaks and world.job.generation is not None:
        yield from _broken(world, bounds, rules)


def _suspected(world: World, worker: Worker, bounds: Bounds, rules: Rules) -> World:
    """Go on without a worker that does not answer, or wait for it: here it answers in the end."""
    world = replace(world, suspicions=world.suspicions - 1)
    if rules.is_last_copy(world.job, {worker.name}):
        return world
    had_state = _has_state(world)
    world = world.with_worker(replace(worker, status="cut"))
    if had_state and not _has_state(world):
        raise Violation(f"{worker.name} has the only copy of the training state, and is given up on suspicion")
    lost = WorkerLost(worker_id=worker.name, reason="does not answer", source="watch")
    return handled(world, lost, bounds, rules)


def _has_state(world: World) -> bool:
    """Whether a running member of the job has the training state, or one has finished and needs it no more."""
    if any(world.having("finished")):
        return True
    members = world.job.generation.members if world.job.generation is not None else ()
    workers = ((member, world.worker(member.worker_id)) for member in members)
    return any(
        worker.status == "running" and worker.ledger.has_state and worker.number >= member.since
        for member, worker in workers
    )


def _restarted(world: World, bounds: Bounds, rules: Rules) -> World:
    """A new lighthouse has only what was made durable; every worker reports its whole state again."""
    fresh = bounds.new_job()
    workers = tuple(
        replace(worker, unreported=(worker.number,)) if worker.status == "running" and worker.number else worker
        for worker in world.workers
    )
    world = replace(
        world,
        workers=workers,
        job=_with_checkpoint(rules.restore(fresh, world.durable), bounds),
        restarts=world.restarts - 1,
        lighthouses=world.lighthouses + 1,
    )
    return _told(world)


def _broken(world: World, bounds: Bounds, rules: Rules) -> Moves:
    current = world.job.generation
    assert current is not None
    inside = [worker for worker in world.having("running") if worker.number == current.number]
    if inside:
        after = replace(world, breaks=world.breaks - 1)
        broken = ExchangeBroken(worker_id=inside[0].name, generation=current.number)
        after = handled(after, broken, bounds, rules)
        after = answered(after, GenerationStuck(generation=current.number), bounds, rules)
        yield ("BREAK", f"generation={current.name}"), after
