"""An incident as a story: who saw, decided and did what, and when; from the journal and from what workers wrote down.

Enters: a run's files (``history``) and one incident of it (``incidents``). Leaves: a ``Timeline``, for ``craft why``. Times
of different hosts are those of their own clocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from craft.telemetry.explain.incidents import Incident, Line, moment
from craft.telemetry.explain.phrases import TELLINGS, cost_words, numbered, settled, told
from craft.telemetry.history import Commit, Run, fault_costs

_COSTS = (
    "lost_ms", "step", "steps_retried", "steps_lost",
    "microbatches_redone", "samples_redone", "microbatches_dropped", "samples_dropped",
)  # fmt: skip
_SHOWN = 8
"""So many workers are told of one by one."""


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    at_ms: float
    """Since the incident began; negative before."""
    who: str
    what: str


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One incident, told."""

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
    """Who came in the place of whom."""


def timeline(run: Run, incident: Incident, number: int) -> Timeline:
    """Return the story of an incident."""
    teller = _TimelineBuilder(run, incident)
    moments = sorted(teller.moments(), key=lambda each: each.at_ms)
    cost = next((line for line in reversed(incident.lines) if line.get("outcome") == "Cost"), None)
    cost = {**cost, "steps_lost": 0} if cost is not None else _begun_again(run, incident)
    return Timeline(
        number=number,
        worker_ids=incident.worker_ids,
        title=_title(incident),
        began=incident.began,
        generation=incident.generation,
        moments=tuple(moments),
        cost=None if cost is None else {name: cost[name] for name in _COSTS},
        outcome=_outcome(incident, cost),
        places=teller.places(),
    )


def _begun_again(run: Run, incident: Incident) -> Line | None:
    """What it cost that nobody was left: nobody could tell, so it is read from what they wrote down."""
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
        return "an exchange broke, and nobody was lost"
    return "; ".join(
        (f"host {fault['host']} with {', '.join(fault['worker_ids'])}" if fault.get("host") else fault["worker_ids"][0])
        + f" was lost: {fault['reason']}"
        for fault in incident.faults
    )


def _outcome(incident: Incident, cost: Line | None) -> str:
    if not incident.missed:
        return "nothing: it had no slot, and nobody missed it"
    if cost is not None:
        return cost_words(cost, incident.recovered.retried if incident.recovered is not None else ())
    if incident.stop is not None:
        return f"no step was committed afterwards; the job ended: {incident.stop['reason']}"
    return "not known yet: no step is committed since"


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
            for who, what in self._of(line):
                yield self._moment(moment(line), who, what)
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

    def _of(self, line: Line) -> Iterator[tuple[str, str]]:
        say = TELLINGS.get(line.get("event") or line.get("action") or "")
        if say is not None:
            yield say(line, self._agent(str(line.get("worker_id"))))

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
        # Those who took something over come first, if not all can be told of.
        shown = sorted(found, key=lambda each: (not each[1].mine, each[1].time))[:_SHOWN]
        for worker_id, entry in shown:
            yield self._moment(entry.told, worker_id, told(entry))
            yield self._moment(entry.time, worker_id, settled(entry, worker_id))
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
            done = f", with {numbered(mine)} in the place of others" if mine else ""
            yield self._moment(first.time, worker_id, f"commits step {first.step}{done}")

    def _was_there(self, worker_id: str) -> bool:
        """Whether it is one of those who had to recover, and not one that came later."""
        entries = [each for each in self._run.entries.get(worker_id, ()) if each.generation in self._generations]
        return any(worker_id not in entry.joiners for entry in entries)

    def places(self) -> dict[str, str]:
        """Who came in the place of whom: into the same place of the same host, or as a spare into the free slot."""
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
        """Spares that were there already, and are members from the first new generation on."""
        made = {int(line["generation"]): line["members"] for line in self._run.journal if "members" in line}
        before = made.get(self._incident.generation, ())
        first = made.get(self._generations[0], ()) if self._generations else ()
        return [worker_id for worker_id in first if before and worker_id not in before]

    def _arrivals(self) -> Iterator[TimelineEntry]:
        for lost, other in self.places().items():
            if self._joined[other] in self._incident.after or self._joined[other] in self._incident.lines:
                yield self._moment(moment(self._joined[other]), other, f"comes in the place of {lost}")
            entries = [
                each
                for each in self._run.entries.get(other, ())
                if other in each.joiners and each.generation not in self._generations
            ]
            for entry in entries[:1]:
                yield self._moment(entry.time, other, f"joins in generation {entry.generation}, at step {entry.step}")
            computed = next((each for each in self._run.commits.get(other, ()) if each.microbatches), None)
            if computed is not None:
                what = f"keeps pace: commits step {computed.step}, with {numbered(computed.microbatches)} of its own"
                yield self._moment(computed.time, other, what)
