"""Faults that strike processes: workers, agents with their hosts, and the lighthouse."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lighthouse import Serving
    from .workers import Worker
    from .world import Host, World

Strike = Callable[["World"], str]
"""Returns what was done to whom; empty: there was nothing to do it to."""


# Workers


def running(world: World) -> list[Worker]:
    return [worker for worker in world.living if worker.process.state == "running"]


def send_signal(number: signal.Signals) -> Strike:
    def strike(world: World) -> str:
        worker = world.pick(running(world))
        if worker is None:
            return ""
        worker.process.kill(number)
        return worker.worker_id

    return strike


def stop_briefly(world: World) -> str:
    """SIGSTOP, and SIGCONT before or after it counts as lost."""
    worker = world.pick(running(world))
    if worker is None:
        return ""
    worker.process.kill(signal.SIGSTOP)
    world.undo_later(world.chance.choice((0.2, 1.0, 4.0)), lambda: worker.process.kill(signal.SIGCONT))
    return worker.worker_id


def kill_all(world: World) -> str:
    """Total loss: no worker is left."""
    killed = [worker.worker_id for worker in world.living]
    for worker in world.living:
        worker.process.kill(signal.SIGKILL)
    return ", ".join(killed)


def kill_with_state(world: World) -> str:
    """All members but one die."""
    members = [worker for worker in running(world) if worker.is_inside]
    for worker in members[1:]:
        worker.process.kill(signal.SIGKILL)
    return ", ".join(worker.worker_id for worker in members[1:])


def hang(world: World) -> str:
    worker = world.pick(running(world))
    if worker is None:
        return ""
    worker.training.hangs = True
    return worker.worker_id


def exit_early(world: World) -> str:
    """``os._exit(0)`` in the middle of the script."""
    worker = world.pick(worker for worker in running(world) if not worker.report.script_ended)
    if worker is None:
        return ""
    worker.exit(0)
    return worker.worker_id


def raise_error(world: World) -> str:
    worker = world.pick(worker for worker in running(world) if worker.is_inside)
    if worker is None:
        return ""
    worker.process.soon(worker.fail, "RuntimeError: a bug that comes now and then")
    return worker.worker_id


def break_exchange(times: Sequence[int]) -> Strike:
    def strike(world: World) -> str:
        worker = world.pick(worker for worker in running(world) if worker.is_inside)
        if worker is None or worker.current is None:
            return ""
        worker.training.breaks_left = world.chance.choice(times) - 1
        worker.process.soon(worker.break_off, worker.current)
        return worker.worker_id

    return strike


# Hosts


def agents(world: World) -> list[Host]:
    return [host for host in world.hosts.values() if host.agent is not None and host.agent.state == "running"]


def kill_agent(world: World) -> str:
    """The kernel ends its workers, too; somebody starts ``craft run`` again, or nobody does."""
    host = None if world.plan.own_lighthouse else world.pick(agents(world))
    if host is None or host.agent is None:
        return ""
    host.agent.kill(signal.SIGKILL)
    if world.chance.random() < 0.7:
        world.undo_later(world.chance.uniform(0.1, 3.0), lambda: world.start_agent(host.name))
        return f"{host.name}, and starts it again"
    world.lost_hosts.add(host.name)
    return host.name


def stop_agent(world: World) -> str:
    """Its workers go on; nothing is heard of them."""
    host = world.pick(agents(world))
    if host is None or host.agent is None:
        return ""
    agent = host.agent
    agent.kill(signal.SIGSTOP)
    world.undo_later(world.chance.choice((0.3, 1.5, 5.0)), lambda: agent.kill(signal.SIGCONT))
    return host.name


def crash_host(world: World) -> str:
    """Power off: nobody says good-bye."""
    host = None if world.plan.own_lighthouse else world.pick(agents(world))
    if host is None or host.agent is None:
        return ""
    for other in (*world.hosts, world.lighthouse_host):
        if other != host.name:
            world.network.cut(host.name, other)
    host.agent.kill(signal.SIGKILL)
    world.lost_hosts.add(host.name)
    return host.name


def terminate_agent(world: World) -> str:
    """SIGTERM: its workers leave in order."""
    host = world.pick(agents(world))
    if host is None or host.agent is None:
        return ""
    world.ordered.add("terminate")
    host.agent.kill(signal.SIGTERM)
    return host.name


def join_host(world: World) -> str:
    host = world.pick(host for host in world.hosts.values() if host.agent is None)
    if host is None:
        return ""
    world.start_agent(host.name)
    return host.name


def kill_forks(world: World) -> str:
    """The fork server, and with it all workers of its host."""
    host = world.pick(agents(world))
    forks = [each for each in (host.agent.children if host and host.agent else ()) if each.name.startswith("forks")]
    living = [each for each in forks if each.state == "running"]
    if not living:
        return ""
    living[-1].kill(signal.SIGKILL)
    return living[-1].host


# The lighthouse


def serving_now(world: World) -> Serving | None:
    serving = world.serving
    return serving if serving is not None and serving.process.state == "running" else None


def kill_lighthouse(world: World) -> str:
    serving = serving_now(world)
    if serving is None:
        return ""
    serving.process.kill(signal.SIGKILL)
    return "the serving process"


def stop_lighthouse(world: World) -> str:
    """SIGSTOP: the keeper replaces it."""
    serving = serving_now(world)
    if serving is None:
        return ""
    serving.process.kill(signal.SIGSTOP)
    return "the serving process"


def hang_lighthouse(world: World) -> str:
    """Its event loop stands still, as on a file system that does not answer; the keeper replaces it."""
    serving = serving_now(world)
    if serving is None:
        return ""
    serving.process.hang()
    return "the serving process"


def kill_keeper(world: World) -> str:
    """All of the lighthouse: the agent starts its own again, a person one on a host for it alone."""
    keeper = world.keeper
    if keeper is None or keeper.process.state != "running":
        return ""
    keeper.process.kill(signal.SIGKILL)
    return "keeper and serving process"


def kill_writing(world: World) -> str:
    """The serving process is killed in the middle of one of its next writes."""
    serving = serving_now(world)
    if serving is None:
        return ""
    world.disk.kill_after = world.chance.randrange(40)
    return "the serving process, at one of its next writes"


def cut_power(world: World) -> str:
    """The host of the lighthouse loses what was not synced, and comes back."""
    if world.plan.own_lighthouse or world.keeper is None or world.keeper.process.state != "running":
        return ""
    world.keeper.process.kill(signal.SIGKILL)
    world.disk.cut_power()
    return "the lighthouse's host"
