"""What workers of a replica do together: the beat, the collectives of a microbatch and of the update, and how they break."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from craft.decide.step.beat import BeatAnswer, BeatMessage

from ..workers import Label, Moves
from ..world import Violation
from .members import committed, may_commit, news, shared, updated
from .rules import ShardedRules
from .world import COLLECTIVES, UPDATE, ShardedBounds, ShardedWorker, ShardedWorld, position_of

NOT_THERE = ("dead", "left", "finished")


def moves(world: ShardedWorld, worker: ShardedWorker, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    """Everything that a worker of a replica that computes, or runs an update, can do with the others of it."""
    if worker.waits_for_twins and worker.phase == "work":
        yield from _take_output(world, worker, bounds, rules)
        return
    mates = mates_of(world, worker)
    together = is_steady(world, mates, bounds)
    if rules.commits_alone and worker.phase == "exchange":
        return
    if worker.is_leader:
        yield from _collect(world, worker, mates, together, bounds, rules)
    elif not together:
        yield from _tell(world, worker, rules)
    if worker.phase in ("beat", "commit beat"):
        yield from _take(world, worker, mates[0], bounds, rules)
    if worker.phase == "work":
        yield from _work(world, worker, mates, together, bounds, rules)
    yield from _break(world, worker, mates, rules)


def mates_of(world: ShardedWorld, worker: ShardedWorker) -> list[ShardedWorker | None]:
    """The workers of its replica in the order of positions; None in the place of one that is gone."""
    found: list[ShardedWorker | None] = []
    for name in worker.ledger.mates:
        mate = world.worker(name)
        is_there = isinstance(mate, ShardedWorker) and mate.status not in NOT_THERE
        found.append(mate if is_there and isinstance(mate, ShardedWorker) else None)
    return found


def is_steady(world: ShardedWorld, mates: Sequence[ShardedWorker | None], bounds: ShardedBounds) -> bool:
    """Whether nothing can break in a replica any more: then its positions move together."""
    if not bounds.lockstep:
        return False
    exposed = bounds.victims if world.crashes or world.cuts else ""
    exposed += bounds.breakable if world.replica_breaks else ""
    return all(mate is not None and mate.tainted < 0 and not mate.broken and mate.name not in exposed for mate in mates)


def _messages(
    world: ShardedWorld, worker: ShardedWorker, rules: ShardedRules, *, commit: bool
) -> Iterator[BeatMessage]:
    """What it may tell in the beat that it came to: a directive may have arrived already, or not."""
    has_news = any(news(world, worker))
    if commit:
        if may_commit(world, worker, rules):
            yield BeatMessage(may_commit=True)
        if has_news:
            yield BeatMessage(waits=True)
    elif worker.due:
        yield BeatMessage(waits=True)
    else:
        yield BeatMessage()
        if has_news:
            yield BeatMessage(waits=True)


def _tell(world: ShardedWorld, worker: ShardedWorker, rules: ShardedRules) -> Moves:
    """A position other than 0 sends its message, and waits."""
    if worker.phase not in ("ready", "exchange"):
        return
    commit = worker.phase == "exchange"
    for message in _messages(world, worker, rules, commit=commit):
        told = replace(worker, phase="commit beat" if commit else "beat", message=message)
        yield ("tell", worker.name, _said(message)), world.with_worker(told)


def _collect(
    world: ShardedWorld,
    leader: ShardedWorker,
    mates: Sequence[ShardedWorker | None],
    together: bool,
    bounds: ShardedBounds,
    rules: ShardedRules,
) -> Moves:
    """Position 0 has every message: it answers, and takes its own answer."""
    if leader.phase not in ("ready", "exchange"):
        return
    commit = leader.phase == "exchange"
    told: list[list[BeatMessage]] = []
    for mate in mates:
        if mate is None or not _is_in_step(mate, leader):
            return
        if mate.phase == ("commit beat" if commit else "beat") and mate.message is not None:
            told.append([mate.message])
        elif mate.phase == leader.phase and (together or mate is leader):
            told.append(list(_messages(world, mate, rules, commit=commit)))
        else:
            return
    for messages in _choices(told):
        answer = rules.before_commit(messages) if commit else rules.before_microbatch(messages)
        answered = replace(leader, answer=(leader.ledger.generation, leader.beats, answer))
        after = taken(world, answered, answer, bounds, rules)
        for mate in mates if together else ():
            if mate is not None and mate.name != leader.name:
                after = taken(after, mate, answer, bounds, rules)
        what = "commit" if commit else "beat"
        yield (what, leader.name, "go" if answer.go else "regroup", f"step={leader.ledger.step}"), after


def _choices(told: Sequence[Sequence[BeatMessage]]) -> Iterator[tuple[BeatMessage, ...]]:
    """Every combination that differs in what is answered: all as they are, or all with a generation waiting."""
    seen = set()
    for wanted in range(max((len(each) for each in told), default=0)):
        if all(told):
            chosen = tuple(each[min(wanted, len(each) - 1)] for each in told)
            if chosen not in seen:
                seen.add(chosen)
                yield chosen


def _is_in_step(mate: ShardedWorker, worker: ShardedWorker) -> bool:
    return mate.acts and mate.ledger.generation == worker.ledger.generation and mate.beats == worker.beats


def _said(message: BeatMessage) -> str:
    return "may commit" if message.may_commit else "a generation waits" if message.waits else "all is well"


def _take(
    world: ShardedWorld,
    worker: ShardedWorker,
    leader: ShardedWorker | None,
    bounds: ShardedBounds,
    rules: ShardedRules,
) -> Moves:
    if leader is not None and leader.answer is not None:
        generation, beats, answer = leader.answer
        if (generation, beats) == (worker.ledger.generation, worker.beats):
            label = ("take", worker.name, "go" if answer.go else "regroup")
            yield label, taken(world, worker, answer, bounds, rules)


def taken(
    world: ShardedWorld, worker: ShardedWorker, answer: BeatAnswer, bounds: ShardedBounds, rules: ShardedRules
) -> ShardedWorld:
    """Do what the answer to a beat says."""
    commit = worker.phase in ("exchange", "commit beat")
    worker = replace(worker, beats=worker.beats + 1, message=None)
    if commit:
        if answer.go:
            return committed(world, worker, bounds, rules)
        return _with(world, replace(worker, phase="wait"))
    if answer.confirms:
        worker = confirmed(worker, rules)
    if not answer.go:
        return _with(world, replace(worker, phase="wait"))
    pending = worker.ledger.pending
    if pending:
        return _with(world, replace(worker, phase="work", activity=pending[0], progress=0, dirty=False, tainted=-1))
    return shared(world, replace(worker, phase="exchange"))


def confirmed(worker: ShardedWorker, rules: ShardedRules) -> ShardedWorker:
    """All positions ran whole: merge the leaf."""
    leaf = worker.ledger.leaf
    if leaf is not None:
        if worker.dirty:
            raise Violation(f"P1: {worker.name} merges microbatch {leaf}, which it computed from wrong numbers")
        worker = replace(worker, added=tuple(sorted((*worker.added, leaf))))
    return replace(worker, ledger=rules.confirmed(worker.ledger), dirty=False)


def _work(
    world: ShardedWorld,
    worker: ShardedWorker,
    mates: Sequence[ShardedWorker | None],
    together: bool,
    bounds: ShardedBounds,
    rules: ShardedRules,
) -> Moves:
    """Come out of the next collective, if every worker of the replica came to it."""
    there = [mate for mate in mates if mate is not None]
    # Positions that go on with an update may stand at different collectives of it.
    alike = all(mate.phase == "work" and mate.progress == worker.progress for mate in there)
    if together and alike and all(_is_in_step(mate, worker) for mate in there):
        if worker.is_leader:
            after = world
            for mate in there:
                whole = frozenset((mate.ledger.step - 1, each) for each in range(mate.progress, COLLECTIVES))
                after = _finished(after, replace(mate, records=mate.records | whole), rules)
            yield _label(worker, "run"), after
        return
    needed = [mates[position] for position in _group(worker, len(mates), bounds)]
    arrived = [mate for mate in needed if mate is not None and _has_issued(mate, worker)]
    wrong = worker.tainted >= 0 or any(0 <= mate.tainted < worker.progress for mate in arrived)
    passed = replace(worker, progress=worker.progress + 1, dirty=worker.dirty or wrong)
    if len(arrived) < len(needed):
        gone = any(mate is None or _has_ended(mate, worker, rules) for mate in needed)
        tainted = worker.progress if worker.tainted < 0 else worker.tainted
        if worker.updating and rules.echoes_updates and gone:
            echoed = replace(passed, tainted=tainted, dirty=True)
            is_last = echoed.progress == COLLECTIVES
            yield _label(worker, "goes on"), _finished(world, echoed, rules) if is_last else _with(world, echoed)
        elif bounds.chained and not worker.updating and gone and passed.progress < COLLECTIVES:
            # A device goes on with what an aborted collective left, and tells so later.
            yield _label(worker, "goes on"), _with(world, replace(passed, tainted=tainted, dirty=True))
        return
    passed = recorded(passed, worker.progress)
    if passed.progress < COLLECTIVES:
        yield _label(worker, f"collective={worker.progress}"), _with(world, passed)
    elif passed.tainted < 0 or passed.updating:
        yield _label(worker, "ends"), _finished(world, passed, rules)


def recorded(worker: ShardedWorker, collective: int) -> ShardedWorker:
    """Record what a collective of the update gave."""
    if not worker.updating:
        return worker
    return replace(worker, records=worker.records | {(worker.ledger.step - 1, collective)})


def _take_output(world: ShardedWorld, worker: ShardedWorker, bounds: ShardedBounds, rules: ShardedRules) -> Moves:
    """Take the output of the next collective of the update from a twin that recorded it."""
    if worker.progress == COLLECTIVES:
        yield _label(worker, "ends"), _finished(world, worker, rules)
        return
    wanted = (worker.ledger.step - 1, worker.progress)
    for twin in world.having("running"):
        if not isinstance(twin, ShardedWorker) or twin.name == worker.name:
            continue
        if bounds.slot(twin.name).position != bounds.slot(worker.name).position:
            continue
        found = [each for each in twin.records if each == wanted or (rules.takes_any_step and each[1] == wanted[1])]
        if found:
            wrong = worker.dirty or twin.dirty or twin.spoiled or wanted not in found
            taken_over = recorded(replace(worker, progress=worker.progress + 1, dirty=wrong), worker.progress)
            yield (*_label(worker, f"takes={worker.progress}"), f"from={twin.name}"), _with(world, taken_over)
            return


def _group(worker: ShardedWorker, replica_size: int, bounds: ShardedBounds) -> Sequence[int]:
    """The positions that take part in the collective that it is in; of two groups, the second begins where the first ends."""
    if not bounds.chained:
        return range(replica_size)
    split = (0, replica_size // 2, replica_size - 1)
    first, last = split[worker.progress], split[worker.progress + 1]
    mine = position_of(worker)
    return range(first, last + 1) if first <= mine <= last else (mine,)


def _label(worker: ShardedWorker, what: str) -> Label:
    return (what, worker.name, "update" if worker.activity == UPDATE else f"microbatch={worker.activity}")


def _has_issued(mate: ShardedWorker, worker: ShardedWorker) -> bool:
    """Whether ``mate`` has come to the collective that ``worker`` is in, or past it."""
    if mate.name == worker.name:
        return True
    if not mate.acts or mate.ledger.generation != worker.ledger.generation:
        return False
    if mate.beats != worker.beats:
        return mate.beats > worker.beats
    if mate.broken or mate.phase == "work":
        return mate.activity == worker.activity and mate.since <= worker.progress <= mate.progress
    return mate.phase in ("ready", "beat", "exchange", "commit beat")


def _finished(world: ShardedWorld, worker: ShardedWorker, rules: ShardedRules) -> ShardedWorld:
    """It computed the microbatch or ran the update, as far as it knows."""
    if worker.activity == UPDATE:
        return updated(world, worker, rules)
    worker = replace(worker, dirty=worker.dirty or worker.spoiled, phase="ready")
    ledger = rules.hold(worker.ledger, worker.activity)
    added = worker.added if ledger.leaf is not None else tuple(sorted((*worker.added, worker.activity)))
    return _with(world, replace(worker, ledger=ledger, added=added))


def _break(
    world: ShardedWorld, worker: ShardedWorker, mates: Sequence[ShardedWorker | None], rules: ShardedRules
) -> Moves:
    """A worker of the replica is gone or ended its groups: this one ends its own, and waits for a generation."""
    if worker.phase not in ("ready", "beat", "work", "exchange", "commit beat"):
        return
    leader = mates[0]
    if worker.phase in ("beat", "commit beat"):
        here = (worker.ledger.generation, worker.beats)
        if leader is not None and leader.answer is not None and leader.answer[:2] == here:
            return
        lost = leader is None or _has_ended(leader, worker, rules)
    else:
        asks = worker.phase != "exchange" or worker.ledger.result is not None or any(news(world, worker))
        lost = asks and any(mate is None or _has_ended(mate, worker, rules) for mate in mates)
    lost = lost or any(rules.ends_replica(worker.ledger, generation) for generation in news(world, worker))
    if worker.updating and rules.echoes_updates:
        return
    if lost or (worker.tainted >= 0 and worker.phase == "work"):
        phase = worker.phase if worker.updating else "wait"
        yield (
            ("break", worker.name, worker.phase),
            _with(world, replace(worker, phase=phase, broken=True, message=None, tainted=-1)),
        )


def _has_ended(mate: ShardedWorker, worker: ShardedWorker, rules: ShardedRules) -> bool:
    """Whether it ended its groups of this generation: by a break, or because it went on to another one."""
    if mate.number > worker.ledger.generation:
        return rules.ends_groups or mate.acts
    return mate.broken and mate.ledger.generation == worker.ledger.generation


def _with(world: ShardedWorld, worker: ShardedWorker) -> ShardedWorld:
    return world.with_worker(worker)  # type: ignore[return-value]
