"""Everything that may happen to a simulated job. Each fault is one function: it strikes, and says whom, or that it could not.

To add one, write a function and give it a name in ``FAULTS``; ``scenario`` draws from there.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from craft.protocol.errors import MalformedMessage

from . import process_faults
from .disk import Killed
from .process_faults import Strike

if TYPE_CHECKING:
    from .world import World


# Disk and network


def _flip(world: World) -> str:
    """A bit flips in a file that the next lighthouse reads."""
    name = world.chance.choice(("generation.json", ".generation.json.spare", "journal.jsonl"))
    if not world.disk.flip(name):
        return ""
    return f"{name}, and {process_faults.kill_lighthouse(world) or 'nobody reads it yet'}"


def _fill_disk(world: World) -> str:
    world.disk.is_full = True
    world.undo_later(world.chance.uniform(0.5, 3.0), lambda: setattr(world.disk, "is_full", False))
    return "the lighthouse's"


def _fail_syncs(world: World) -> str:
    world.disk.syncs_fail = True
    world.undo_later(world.chance.uniform(0.5, 3.0), lambda: setattr(world.disk, "syncs_fail", False))
    return "the lighthouse's"


def _cut(world: World, pairs: Sequence[tuple[str, str]]) -> str:
    for one, other in pairs:
        world.network.cut(one, other)
    world.undo_later(world.chance.choice((0.5, 1.7, 4.0, 12.0)), world.heal)
    return ", ".join(f"{one} from {other}" for one, other in pairs)


def _cut_from_lighthouse(world: World) -> str:
    hosts = [host.name for host in process_faults.agents(world)]
    if world.plan.own_lighthouse or not hosts:
        return ""
    some = world.chance.sample(hosts, world.chance.randint(1, len(hosts)))
    return _cut(world, [(name, world.lighthouse_host) for name in some])


def _cut_hosts(world: World) -> str:
    """Workers of two hosts do not reach each other; both reach the lighthouse."""
    hosts = [host.name for host in process_faults.agents(world)]
    if len(hosts) < 2:
        return ""
    one, other = world.chance.sample(hosts, 2)
    return _cut(world, [(one, other)])


def _isolate(world: World) -> str:
    host = None if world.plan.own_lighthouse else world.pick(process_faults.agents(world))
    if host is None:
        return ""
    others = [*world.hosts, world.lighthouse_host]
    return _cut(world, [(host.name, other) for other in others if other != host.name])


def _disorder(world: World) -> str:
    world.network.disorder = 0.3
    world.undo_later(world.chance.uniform(0.5, 2.0), lambda: setattr(world.network, "disorder", 0.0))
    return "reports are lost, repeated and overtaken"


# Orders of people


def _order(action: str, **details: object) -> Strike:
    def strike(world: World) -> str:
        serving = process_faults.serving_now(world)
        if serving is None or serving.handlers is None:
            return ""
        whom: dict[str, object] = {}
        if action == "drain":
            worker = world.pick(worker for worker in process_faults.running(world) if worker.report.joined)
            if worker is None:
                return ""
            whom = {"worker_id": worker.worker_id} if world.chance.random() < 0.5 else {"host": worker.host}
        world.ordered.add(action)
        try:
            response = serving.order(action=action, **whom, **details)
        except MalformedMessage as error:
            world.violated(f"an order is refused that was well-formed: {error}")
            return ""
        except (OSError, Killed):
            # As an answer 500: it cannot be made durable, and the lighthouse ends.
            return ""
        if response.status != 200:
            return ""
        return " ".join(map(str, whom.values())) or "the job"

    return strike


def _declare_lost(world: World) -> str:
    """``craft fail``: a person says that a worker is lost, and it is not."""
    serving = process_faults.serving_now(world)
    worker = world.pick(worker for worker in process_faults.running(world) if worker.report.joined)
    if serving is None or serving.lighthouse is None or worker is None:
        return ""
    world.ordered.add("fail")
    with contextlib.suppress(OSError, Killed):
        serving.process.run(serving.lighthouse.loop.lose_worker, worker.worker_id, "a person says so", "api")
    return worker.worker_id


FAULTS: dict[str, Strike] = {
    "kill worker": process_faults.send_signal(signal.SIGKILL),
    "stop worker": process_faults.send_signal(signal.SIGSTOP),
    "stop worker briefly": process_faults.stop_briefly,
    "kill all workers": process_faults.kill_all,
    "kill all but one": process_faults.kill_with_state,
    "hang worker": process_faults.hang,
    "exit 0 early": process_faults.exit_early,
    "raise in worker": process_faults.raise_error,
    "break exchange": process_faults.break_exchange((1, 2)),
    "break exchange often": process_faults.break_exchange((6, 40)),
    "kill agent": process_faults.kill_agent,
    "stop agent": process_faults.stop_agent,
    "crash host": process_faults.crash_host,
    "terminate agent": process_faults.terminate_agent,
    "host joins": process_faults.join_host,
    "kill fork server": process_faults.kill_forks,
    "kill lighthouse": process_faults.kill_lighthouse,
    "stop lighthouse": process_faults.stop_lighthouse,
    "hang lighthouse": process_faults.hang_lighthouse,
    "kill keeper": process_faults.kill_keeper,
    "kill while writing": process_faults.kill_writing,
    "cut power": process_faults.cut_power,
    "flip bit": _flip,
    "disk full": _fill_disk,
    "syncs fail": _fail_syncs,
    "cut from lighthouse": _cut_from_lighthouse,
    "cut between hosts": _cut_hosts,
    "isolate host": _isolate,
    "disorder": _disorder,
    "drain": _order("drain"),
    "drain with deadline": _order("drain", deadline_s=0.5),
    "checkpoint": _order("checkpoint"),
    "preempt": _order("preempt", deadline_s=20.0),
    "stop job": _order("stop"),
    "abort": _order("abort"),
    "fail worker": _declare_lost,
}
