"""Build the timeline of an incident: who saw, decided and did what, and when.

In: a run's files (``history``) and one of its incidents (``incidents``). Out: a ``Timeline``, for ``craft why``. Each host's
times are by its own clock.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from craft.protocol.generation_log import Entered
from craft.telemetry.explain.amounts import Line, cost_words, numbered
from craft.telemetry.explain.incidents import Incident, moment
from craft.telemetry.explain.sentences import deed
from craft.telemetry.history import Commit, Run, fault_costs

_COSTS = (
    "lost_ms", "step", "steps_retried", "steps_lost",
    "microbatches_redone", "samples_redone", "microbatches_dropped", "samples_dropped",
)  # fmt: skip
_SHOWN = 8
"""At most this many workers are listed one by one."""


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    at_ms: float
    """Since the incident began; negative before."""
    who: str
    what: str


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One incident."""

    number: int
    """From 1, in the order of the run."""
    worker_ids: tuple[str, ...]
    title: str
    began: float
    """In seconds since 1970."""
    generation: int
    """The generation that it hit."""
    moments: tuple[TimelineEntry, ...]
    cost: dict[str, float | int | None] | None
    """None while no step is committed again."""
    outcome: str
    """What it cost, in a sentence."""
    places: dict[str, str]
    """The replacement of each lost worker."""
    replicas: dict[int, tuple[str, ...]] | msgspec.UnsetType = msgspec.UNSET
    """The replicas of the generation that it hit, in the order of positions; unset where each is one worker."""


def timeline(run: Run, incident: Incident, number: int) -> Timeline:
    """Return the timeline of an incident."""
    builder = _TimelineBuilder(run, incident)
    moments = sorted(builder.moments(), key=lambda each: each.at_ms)
    cost = next((line for line in reversed(incident.lines) if line.get("outcome") == "Cost"), None)
    cost = {**cost, "steps_lost": 0} if cost is not None else _restore_cost(run, incident)
    return Timeline(
        number=number,
        worker_ids=incident.worker_ids,
        title=_title(incident),
        began=incident.began,
        generation=incident.generation,
        moments=tuple(moments),
        cost=None if cost is None else {name: cost[name] for name in _COSTS},
        outcome=_outcome(incident, cost),
        places=builder.places(),
        replicas=_replicas(run, incident.generation),
    )


def _replicas(run: Run, generation: int) -> dict[int, tuple[str, ...]] | msgspec.UnsetType:
    made = next((line for line in run.journal if line.get("slots") and line.get("generation") == generation), None)
    if made is None or "members" not in made:
        return msgspec.UNSET
    found: dict[int, dict[int, str]] = {}
    for worker_id, (replica, position) in zip(made["members"], made["slots"], strict=True):
        found.setdefault(replica, {})[position] = worker_id
    return {replica: tuple(there[each] for each in sorted(there)) for replica, there in sorted(found.items())}


def _named(fault: Line) -> str:
    """Return the workers of a fault, with replica and position where the model is sharded."""
    slots = fault.get("slots") or [None] * len(fault["worker_ids"])
    return ", ".join(
        worker_id if slot is None else f"{worker_id} (replica {slot[0]}, position {slot[1]})"
        for worker_id, slot in zip(fault["worker_ids"], slots, strict=True)
    )


def _restore_cost(run: Run, incident: Incident) -> Line | None:
    """Return the cost of losing all workers, from their commits: none was left to report it."""
    restore = next((line for line in incident.lines if line.get("action") == "Restore"), None)
    made = {int(line["generation"]) for line in incident.lines if line.get("action") == "Reconfigure"}
    cost = next((each for each in fault_costs(run) if each.generation in made), None)
    if restore is None or cost is None or cost.lost_s is None:
        return None
    none = {"steps_retried": 0, "samples_redone": None, "microbatches_dropped": 0, "samples_dropped": 0}
    again = {"steps_lost": cost.steps_lost, "microbatches_redone": cost.microbatches_lost, "step": int(restore["step"])}
    return {"lost_ms": round(1000 * cost.lost_s, 3), **again, **none}


def _title(incident: Incident) -> str:
    if not incident.faults:
        return "an exchange broke without a loss"
    return "; ".join(
        (f"host {fault['host']} with {_named(fault)}" if fault.get("host") else _named(fault))
        + f" was lost: {fault['reason']}"
        for fault in incident.faults
    )


def _outcome(incident: Incident, cost: Line | None) -> str:
    if not incident.missed:
        return "nothing: it had no slot"
    if cost is not None:
        return cost_words(cost, incident.recovered.retried if incident.recovered is not None else ())
    if incident.stop is not None:
        return f"no step was committed afterwards; the job ended: {incident.stop['reason']}"
    return "not known yet: no step is committed since"


def _heard(entry: Entered) -> str:
    aborted = "" if entry.aborted is None else f", aborts its exchange in {1000 * (entry.aborted - entry.told):.1f} ms"
    return f"hears of generation {entry.generation}{aborted}"


def _settled(entry: Entered, worker_id: str) -> str:
    """How a worker entered a generation, and what it does about the step in flight."""
    if entry.guest:
        return "has left the exchange; the step is up to its own loop"
    others = len(entry.members) - 1
    met = f"has met {'the other one' if others == 1 else f'{others} others'}" if others else "is alone"
    if worker_id in entry.joiners:
        return f"{met} and takes their state"
    commit = "commits what it has in hand" if entry.commits else ""
    if entry.dropped:
        next_step = f"step {entry.step} goes on without {numbered(entry.dropped)}"
    elif entry.given:
        own = f", and this one computes {', '.join(map(str, entry.mine))}" if entry.mine else ""
        next_step = f"step {entry.step} goes on, {numbered(entry.given)} missing{own}"
    elif entry.again:
        next_step = f"step {entry.step} is computed again"
    elif entry.retried:
        next_step = f"step {entry.step} goes on, all that was computed is still there"
    else:
        next_step = f"step {entry.step} begins"
    return f"{met} and settled: {' and '.join(filter(None, (commit, next_step)))}"


class _TimelineBuilder:
    """Collects the moments of one incident."""

    def __init__(self, run: Run, incident: Incident) -> None:
        self._run = run
        self._incident = incident
        self._joined = {
            line["member"]["worker_id"]: line for line in run.journal if line.get("event") == "WorkerJoined"
        }
        last = incident.recovered.generation if incident.recovered is not None else None
        self._generations = [
            int(line["generation"])
            for line in incident.lines
            if line.get("action") == "Reconfigure" and (last is None or int(line["generation"]) <= last)
        ]

    def moments(self) -> Iterator[TimelineEntry]:
        for line in (*self._incident.omens, *self._incident.lines):
            found = deed(line, self._agent(str(line.get("worker_id"))))
            if found is not None:
                yield self._moment(moment(line), *found)
        yield from self._last_commits()
        for generation in self._generations:
            yield from self._entries(generation)
        yield from self._first_commits()
        yield from self._arrivals()

    def _moment(self, time: float, who: str, what: str) -> TimelineEntry:
        return TimelineEntry(at_ms=round(1000 * (time - self._incident.began), 3), who=who, what=what)

    def _agent(self, worker_id: str) -> str:
        joined = self._joined.get(worker_id)
        return f"agent of {joined['member']['host']}" if joined is not None else "its agent"

    def _last_commits(self) -> Iterator[TimelineEntry]:
        for worker_id in self._incident.worker_ids:
            commits = [each for each in self._run.commits.get(worker_id, ()) if each.time <= self._incident.began + 1.0]
            if commits:
                yield self._moment(commits[-1].time, worker_id, f"commits step {commits[-1].step}, its last")

    def _entries(self, generation: int) -> Iterator[TimelineEntry]:
        found = [
            (worker_id, entry)
            for worker_id, entries in self._run.entries.items()
            for entry in entries
            if entry.generation == generation
        ]
        # Workers that took something over come first, if not all can be listed.
        shown = sorted(found, key=lambda each: (not each[1].mine, each[1].time))[:_SHOWN]
        for worker_id, entry in shown:
            yield self._moment(entry.told, worker_id, _heard(entry))
            yield self._moment(entry.time, worker_id, _settled(entry, worker_id))
        if len(found) > len(shown):
            times = [entry.time for _, entry in found]
            what = f"likewise, the last of them after {1000 * (max(times) - self._incident.began):.0f} ms"
            yield self._moment(max(times), f"{len(found) - len(shown)} other workers", what)

    def _first_commits(self) -> Iterator[TimelineEntry]:
        if not self._generations:
            return
        last = self._generations[-1]
        firsts: dict[str, Commit] = {}
        for worker_id, commits in self._run.commits.items():
            first = next((each for each in commits if each.generation >= last), None)
            if first is not None and self._was_there(worker_id):
                firsts[worker_id] = first
        redone = set(self._incident.recovered.redone) if self._incident.recovered is not None else set()
        for worker_id, first in sorted(firsts.items(), key=lambda each: each[1].time)[:_SHOWN]:
            mine = sorted(redone & set(first.microbatches))
            done = f", with {numbered(mine)} of lost workers" if mine else ""
            yield self._moment(first.time, worker_id, f"commits step {first.step}{done}")

    def _was_there(self, worker_id: str) -> bool:
        """Return whether the worker had to recover, rather than join later."""
        entries = [each for each in self._run.entries.get(worker_id, ()) if each.generation in self._generations]
        return any(worker_id not in entry.joiners for entry in entries)

    def places(self) -> dict[str, str]:
        """Return the replacement of each lost worker: with the same host and local rank, or a spare that took the slot."""
        found = dict(zip(self._incident.worker_ids, self._promoted(), strict=False))
        for worker_id in self._incident.worker_ids:
            lost = self._joined.get(worker_id)
            if lost is None or worker_id in found:
                continue
            for other_id, joined in self._joined.items():
                same = all(joined["member"].get(name) == lost["member"].get(name) for name in ("host", "local_rank"))
                if same and other_id not in found.values() and joined["time"] > lost["time"] and other_id != worker_id:
                    found[worker_id] = other_id
                    break
        return found

    def _promoted(self) -> list[str]:
        """Return earlier spares that are members from the first new generation on."""
        made = {int(line["generation"]): line["members"] for line in self._run.journal if "members" in line}
        before = made.get(self._incident.generation, ())
        first = made.get(self._generations[0], ()) if self._generations else ()
        return [worker_id for worker_id in first if before and worker_id not in before]

    def _arrivals(self) -> Iterator[TimelineEntry]:
        for lost, other in self.places().items():
            if self._joined[other] in self._incident.after or self._joined[other] in self._incident.lines:
                yield self._moment(moment(self._joined[other]), other, f"replaces {lost}")
            entries = [
                each
                for each in self._run.entries.get(other, ())
                if other in each.joiners and each.generation not in self._generations
            ]
            for entry in entries[:1]:
                yield self._moment(entry.time, other, f"joins in generation {entry.generation}, at step {entry.step}")
            computed = next((each for each in self._run.commits.get(other, ()) if each.microbatches), None)
            if computed is not None:
                what = f"keeps pace: commits step {computed.step}, with {numbered(computed.microbatches)}"
                yield self._moment(computed.time, other, what)
