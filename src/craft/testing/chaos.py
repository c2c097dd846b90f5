"""Choose the next fault: the pure part of ``craft chaos``.

In: a seed or a schedule, then the job's status with the time, again and again. Out: faults with their victims, or the reason
to wait. No clock, no I/O: ``cli/chaos.py`` asks, and makes the lighthouse inject them.

The training state must survive. A *holder* is a member that has committed a step and has been seen so for ``SETTLE_S``, on a
host whose agent is connected, with no fault under way against it. A fault is chosen only if at least one holder is left that
it cannot hit; where the model is sharded, a complete replica of them, from which the others can take what they lack. A fault
is under way until its victims are gone, every member has entered the current generation, and the job has committed a step
since. So a worker has the state at all times, however the recoveries overlap.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from craft.protocol.errors import ConfigError
from craft.protocol.values.injections import KINDS, OF_A_WORKER

SETTLE_S = 1.0
"""How long a member must have been seen to commit before it counts as a holder: its reports may be late."""
PATIENCE_S = 20.0
"""A fault that could not be injected by then is dropped."""
FORGET_S = 120.0
"""How long to wait for a fault to take effect."""

LIVING = ("starting", "waiting", "member")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that is to come."""

    at_s: float
    """When, in seconds since the start."""
    kind: str
    victim: str | None = None
    """The worker or host it hits; None: any that fits."""


class ChaosFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that can be injected now."""

    kind: str
    worker_id: str | None = None
    host: str | None = None

    @property
    def victim(self) -> str:
        return self.worker_id or self.host or "the lighthouse"


class NotNow(msgspec.Struct, frozen=True, kw_only=True):
    """Why a fault must wait."""

    reason: str


def parse_duration(text: str) -> float:
    """Return the seconds in ``5s``, ``500ms``, ``2m``, ``1h`` or a plain number."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a time: write for example 5s, 500ms, 2m or 1h")
    return float(match[1]) * _UNITS[match[2] or "s"]


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return kinds separated by commas; one that is listed twice comes twice as often."""
    kinds = tuple(part.strip() for part in text.split(",") if part.strip())
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"there is no fault {kind!r}: there are {', '.join(KINDS)}")
    if not kinds:
        raise ConfigError(f"no kind of fault is named: there are {', '.join(KINDS)}")
    return kinds


def parse_schedule(text: str) -> tuple[Planned, ...]:
    """Return the faults of ``10s:kill w1, 20s:stop, ...`` in the order of time."""
    found = []
    for part in text.split(","):
        moment, colon, what = part.strip().partition(":")
        words = what.split()
        if not colon or not 1 <= len(words) <= 2:
            raise ConfigError(f"{part.strip()!r} is not a fault of a schedule: write TIME:KIND or TIME:KIND VICTIM")
        (kind,) = parse_kinds(words[0])
        if len(words) == 2 and kind == "kill-lighthouse":
            raise ConfigError("kill-lighthouse takes no victim: there is one lighthouse")
        found.append(Planned(at_s=parse_duration(moment), kind=kind, victim=words[1] if len(words) == 2 else None))
    return tuple(sorted(found, key=lambda planned: planned.at_s))


def possible(kinds: Sequence[str], *, slots: int, hosts: int, replica_size: int = 1) -> tuple[str, ...]:
    """Return those of ``kinds`` that a job of this size can survive."""
    alone = slots < 2 * replica_size
    return tuple(
        kind
        for kind in kinds
        if not (alone and kind in (*OF_A_WORKER, "kill-agent")) and not (hosts < 2 and kind == "kill-agent")
    )


def draw_plan(kinds: Sequence[str], mean_s: float, seed: int) -> Iterator[Planned]:
    """Yield faults without end at exponential intervals; the same seed and kinds give the same ones."""
    draw = random.Random(f"plan {seed}")
    at_s = 0.0
    while kinds:
        at_s += draw.expovariate(1.0 / mean_s)
        yield Planned(at_s=at_s, kind=draw.choice(kinds))


class _UnderWay:
    """A fault that was injected, until the job has recovered from it."""

    def __init__(
        self, fault: ChaosFault, workers: frozenset[str], until: float, now: float, lighthouse_pid: int
    ) -> None:
        self.fault = fault
        self.workers = workers
        self.until = until
        self.began = now
        self.lighthouse_pid = lighthouse_pid
        self.gone_at_step: int | None = None

    def over(self, status: Mapping[str, Any], living: frozenset[str], now: float) -> bool:
        if now > self.began + FORGET_S:
            return True
        if now < self.until or not status["settled"]:
            return False
        if self.fault.kind == "kill-lighthouse":
            return bool(status["lighthouse"]["pid"] != self.lighthouse_pid)
        if self.fault.kind in ("slow", "cut"):
            return True
        if self.workers & living:
            return False
        if self.gone_at_step is None:
            self.gone_at_step = int(status["step"])
        # An exception in the same microbatch on another worker would count as a bug: that step must be over.
        return bool(status["step"] > self.gone_at_step + (1 if self.fault.kind == "raise" else 0))


class Chooser:
    """Chooses victims; remembers what it has seen and done. One per job."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"victims {seed}")
        self._now = 0.0
        self._status: Mapping[str, Any] = {}
        self._committing_since: dict[str, float] = {}
        self._under_way: list[_UnderWay] = []

    def see(self, status: Mapping[str, Any], now: float) -> None:
        """Take in the job's status (``GET /v1/status``); ``now`` is in seconds on a monotonic clock."""
        self._status, self._now = status, now
        living = frozenset(worker["worker_id"] for worker in status["workers"] if worker["state"] in LIVING)
        committing = {
            worker["worker_id"]
            for worker in status["workers"]
            if worker["state"] == "member" and worker["step"] > 0 and worker["host"] in self._heard_hosts()
        }
        self._committing_since = {each: self._committing_since.get(each, now) for each in committing}
        self._under_way = [each for each in self._under_way if not each.over(status, living, now)]

    def choose(self, kind: str, victim: str | None = None) -> ChaosFault | NotNow:
        """Return the fault of this kind that can be injected now, against ``victim`` or any that fits."""
        if not self._status or self._status["state"] != "running":
            return NotNow(reason="the job is not running")
        if kind == "kill-lighthouse":
            return self._lighthouse()
        candidates = self._hosts() if kind == "kill-agent" else self._workers(kind)
        if victim is not None and victim not in candidates:
            return NotNow(reason=f"{victim} cannot be hit by {kind} now")
        allowed = [each for each in ([victim] if victim else candidates) if self._survives(kind, each)]
        if not allowed:
            return NotNow(reason="no other worker has the training state for certain")
        if kind == "raise" and any(each.fault.kind == "raise" for each in self._under_way):
            return NotNow(reason="the step in which an exception was injected is not over")
        chosen = self._draw.choice(allowed)
        return ChaosFault(kind=kind, host=chosen) if kind == "kill-agent" else ChaosFault(kind=kind, worker_id=chosen)

    def injected(self, fault: ChaosFault, lasts_s: float = 0.0) -> None:
        """Record that ``fault`` is under way, for at least ``lasts_s``."""
        # A fault that removes no worker may still get one declared lost, so that it counts all the same.
        workers = self._hit(fault.kind, fault.victim)
        pid = int(self._status["lighthouse"]["pid"])
        self._under_way.append(_UnderWay(fault, workers, self._now + lasts_s, self._now, pid))

    @property
    def recovered(self) -> bool:
        """Whether no fault is under way."""
        return not self._under_way

    def _lighthouse(self) -> ChaosFault | NotNow:
        if any(each.fault.kind == "kill-lighthouse" for each in self._under_way):
            return NotNow(reason="the last one was killed just now")
        return ChaosFault(kind="kill-lighthouse")

    def _heard_hosts(self) -> list[str]:
        return sorted(agent["host"] for agent in self._status["agents"] if agent["connected"])

    def _hosts(self) -> list[str]:
        """Return connected hosts that have a worker of the job."""
        having = {worker["host"] for worker in self._status["workers"] if worker["state"] in LIVING}
        return [host for host in self._heard_hosts() if host in having]

    def _workers(self, kind: str) -> list[str]:
        """Return workers that a fault of this kind can hit: signals any, the others a member that computes."""
        if kind not in ("kill", "stop"):
            return sorted(self._holders())
        hit = self._hit_already()
        return sorted(
            worker["worker_id"]
            for worker in self._status["workers"]
            if worker["state"] in LIVING and worker["worker_id"] not in hit and worker["host"] in self._heard_hosts()
        )

    def _hit(self, kind: str, victim: str) -> frozenset[str]:
        if kind != "kill-agent":
            return frozenset({victim})
        return frozenset(worker["worker_id"] for worker in self._status["workers"] if worker["host"] == victim)

    def _hit_already(self) -> frozenset[str]:
        return frozenset[str]().union(*(each.workers for each in self._under_way))

    def _holders(self) -> frozenset[str]:
        """Return members that have the training state for certain, with no fault under way."""
        settled = {each for each, since in self._committing_since.items() if self._now - since >= SETTLE_S}
        return frozenset(settled) - self._hit_already()

    def _survives(self, kind: str, victim: str) -> bool:
        left = self._holders() - self._hit(kind, victim)
        size = int(self._status.get("replica_size", 1))
        # A drained worker is not replaced: keep at least half of the slots filled.
        needed = max(2, -(-int(self._status["slots"]) // size // 2)) if kind == "drain" else 1
        if size == 1:
            return len(left) >= needed
        there = Counter(each.get("replica") for each in self._status["workers"] if each["worker_id"] in left)
        return sum(number == size for number in there.values()) >= needed
