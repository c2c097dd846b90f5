"""Search all reachable worlds of a small job of sharded replicas."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from craft.decide.step.ledger import Ledger
from craft.protocol.events import ExchangeBroken, GenerationStuck, WorkerJoined

from .. import lighthouse, workers
from ..search import Found, explore
from ..workers import Label, Moves
from ..world import World
from . import members, replica
from .members import shares_of
from .rules import ShardedRules
from .world import UPDATE, ShardedBounds, ShardedWorker, ShardedWorld


def search(bounds: ShardedBounds, rules: ShardedRules | None = None, *, max_worlds: int = 3_000_000) -> Found:
    """Visit every reachable world; stop at the first violation."""
    rules = rules or ShardedRules()
    return explore(_first_world(bounds, rules), _all_moves, bounds, rules, max_worlds)


def _first_world(bounds: ShardedBounds, rules: ShardedRules) -> World:
    world: World = ShardedWorld(
        workers=tuple(ShardedWorker(ledger=Ledger(worker_id=name)) for name in bounds.names),
        job=bounds.new_job(),
        chained=bounds.chained,
        crashes=bounds.crashes,
        cuts=bounds.cuts,
        restarts=bounds.restarts,
        replica_breaks=bounds.replica_breaks,
        resends=bounds.resends,
    )
    for name in bounds.names[: bounds.workers]:
        world = lighthouse.handled(world, WorkerJoined(member=bounds.member(name)), bounds, rules)
    return _settled(world, bounds, rules) if bounds.from_the_first_step else world


def _settled(world: World, bounds: ShardedBounds, rules: ShardedRules) -> World:
    """All first workers hear of the first generation, then settle it, and the lighthouse hears that."""
    for wanted in ("hear", "settle"):
        for name in bounds.names[: bounds.workers]:
            worker = world.worker(name)
            assert isinstance(worker, ShardedWorker) and isinstance(world, ShardedWorld)
            found = members.moves(world, worker, bounds, rules)
            world = next(after for label, after in found if label[0] == wanted)
    return next(after for label, after in lighthouse.moves(world, bounds, rules) if label[-1] == "entered")


def _all_moves(
    world: ShardedWorld, bounds: ShardedBounds, rules: ShardedRules
) -> Iterator[tuple[bool, tuple[Label, World]]]:
    for move in _of_workers(world, bounds, rules):
        yield False, move
    for move in lighthouse.moves(world, bounds, rules):
        yield False, move
    for move in lighthouse.faults(world, bounds, rules):
        yield True, move
    for move in _faults(world, bounds, rules):
        yield True, move


def _of_workers(world: ShardedWorld, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    yield from workers.prepare(world)
    yield from members.finish(world, bounds, rules)
    for worker in world.having("running", "cut"):
        assert isinstance(worker, ShardedWorker)
        yield from members.moves(world, worker, bounds, rules)
        if worker.acts and (worker.ledger.is_live or worker.updating):
            yield from replica.moves(world, worker, bounds, rules)


def _faults(world: ShardedWorld, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    if world.job.stopping is not None:
        return
    for worker in world.having("running"):
        assert isinstance(worker, ShardedWorker)
        exposed = world.replica_breaks and worker.name in bounds.breakable
        if bounds.one_after_the_other and (worker.phase != "work" or worker.activity != UPDATE):
            exposed = False
        if exposed and worker.acts and worker.phase in ("work", "ready", "beat", "commit beat"):
            yield from _broken(world, worker, bounds, rules)
        if world.resends and worker.phase == "exchange" and not worker.attempt and worker.ledger.result is None:
            yield from _resent(world, worker)


def _broken(world: ShardedWorld, worker: ShardedWorker, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    """A collective of its replica breaks here; on a device, that may show only later."""
    after: World = replace(world, replica_breaks=world.replica_breaks - 1)
    if worker.updating and not rules.echoes_updates:
        after = after.with_worker(replace(worker, broken=True))
    elif worker.phase == "work":
        after = after.with_worker(replace(worker, tainted=worker.progress))
    else:
        after = after.with_worker(replace(worker, phase="wait", broken=True, message=None))
    number = worker.ledger.generation
    current = world.job.generation
    if current is not None and current.number == number:
        broken = ExchangeBroken(worker_id=worker.name, generation=number)
        after = lighthouse.handled(after, broken, bounds, rules)
        after = lighthouse.answered(after, GenerationStuck(generation=number), bounds, rules)
    yield ("BREAK IN THE REPLICA", worker.name), after


def _resent(world: ShardedWorld, worker: ShardedWorker) -> Moves:
    """A gradient changed after it was sent; its word says so."""
    share = shares_of(world, worker).get(worker.name)
    taken = any(each.ledger.result is not None for each in world.having("running", "cut"))
    if share is not None and not share.word.resend and not taken:
        changed = replace(share, word=replace(share.word, resend=True))
        wire = (world.wire - {share}) | {changed}
        yield ("CHANGED GRADIENT", worker.name), replace(world, wire=wire, resends=world.resends - 1)
