"""Simulated processes that run the real lighthouse: the one that serves, and the keeper that follows it up.

``Serving`` does what ``craft.control.process`` does, without HTTP; ``Keeper`` what ``craft.control.respawn`` does, without
forks, and with its real ``Pulse``.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from craft.control.http.actions import ActionRequest
from craft.control.http.server import Handlers
from craft.control.lighthouse import Lighthouse
from craft.control.process import BEAT_S
from craft.control.respawn import EXIT_BAD_INPUT, FIRST_DELAY_S, LONGEST_DELAY_S, YOUNG_S, Pulse
from craft.protocol.errors import ConfigError, CraftError, Unreachable
from craft.settings.files.private_files import write_private

from .clock import Process
from .disk import Killed
from .network import End
from .streams import Far

if TYPE_CHECKING:
    from .world import World

_START_S = 0.05


class Serving:
    """One serving process."""

    def __init__(self, world: World, keeper: Keeper) -> None:
        self._world = world
        self._keeper = keeper
        self.process = Process(world.machine, "lighthouse", keeper.process.host, keeper.process)
        self.process.on_exit.append(lambda: keeper.process.soon(keeper.child_ended, self))
        self.lighthouse: Lighthouse | None = None
        self.handlers: Handlers | None = None
        self.began = world.machine.now
        self.is_a_restart = world.serving is not None
        self._tasks: set[asyncio.Task[None]] = set()
        self.process.later(_START_S, self._serve)

    def _serve(self) -> None:
        try:
            lighthouse = Lighthouse(self._world.lighthouse_dir, self._world.lighthouse_settings, self._world.url)
        except OSError as error:
            self._world.note(f"the lighthouse does not start: {error}")
            self.process.end(1)
            return
        except Exception as error:  # noqa: BLE001  (the edge of a process)
            self._world.checks.did_not_start(error)
            self.process.end(EXIT_BAD_INPUT if isinstance(error, ConfigError) else 1)
            return
        self.lighthouse, self.handlers = lighthouse, Handlers(lighthouse)
        self._world.serving = self
        self._world.checks.begin(lighthouse)
        self._world.network.listeners[self.process.host] = (self.process, self._accept)
        lighthouse.broken.add_done_callback(lambda _: self.process.end(1))
        address = self._world.lighthouse_dir.address
        if not address.exists():
            write_private(address, self._world.url.encode() + b"\n")
        self._keeper.serves()
        self._beat()

    def _beat(self) -> None:
        self._keeper.beats += 1
        self.process.later(BEAT_S, self._beat)

    def _accept(self, end: End) -> None:
        assert self.lighthouse is not None
        task = asyncio.ensure_future(self.lighthouse.sessions.serve(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def order(self, **wanted: Any) -> web.Response:
        """``POST /v1/actions``."""
        assert self.handlers is not None
        return self.process.run(self.handlers._actions.take, ActionRequest(**wanted))


class Keeper:
    """``craft lighthouse --keep``: what an agent starts as its own lighthouse, or a person on a host for it alone."""

    def __init__(self, world: World, words: Sequence[str], parent: Process | None, host: str) -> None:
        self._world = world
        self.process = Process(world.machine, "keeper", host, parent)
        self.beats = 0
        self._say: Callable[[bytes], None] = lambda _: None
        self._has_served = False
        self._delay_s = 0.0
        self._child: Serving | None = None
        self._pulse: Pulse | None = None

    def begin(self, say: Callable[[bytes], None]) -> None:
        self._say = say
        self.process.soon(self._fork)
        self.process.later(BEAT_S, self._look)

    def attach(self, channel: Far) -> None:
        """It has none."""

    def hear(self, data: bytes) -> None:
        """Nothing is said to it."""

    def serves(self) -> None:
        if not self._has_served:
            self._has_served = True
            self._say(b"lighthouse listening\n")

    def _fork(self) -> None:
        self._child = Serving(self._world, self)
        self._pulse = Pulse(self._child.process.pid, self.beats, self._world.machine.state_of)

    def _look(self) -> None:
        if self._pulse is not None and self._child is not None and self._pulse.look(self.beats) is not None:
            self._child.process.kill(signal.SIGKILL)
        self.process.later(BEAT_S, self._look)

    def child_ended(self, child: Serving) -> None:
        code, self._pulse = child.process.code or 0, None
        if code in (0, EXIT_BAD_INPUT, -signal.SIGTERM, -signal.SIGINT) or not self._has_served:
            self.process.end(code if code >= 0 else 0)
            return
        young = self._world.machine.now - child.began < YOUNG_S
        delay_s = self._delay_s if young else 0.0
        self._delay_s = min(max(2 * self._delay_s, FIRST_DELAY_S), LONGEST_DELAY_S) if young else 0.0
        self.process.later(delay_s, self._fork)


class Client:
    """In the place of ``craft.wire.client.Client``: what an agent asks the lighthouse about."""

    def __init__(self, world: World, host: str) -> None:
        self._world = world
        self._host = host

    def _lighthouse(self) -> Serving:
        serving = self._world.serving
        if (
            serving is None
            or serving.process.state != "running"
            or not self._world.network.carries(self._host, serving.process.host)
        ):
            raise Unreachable("no lighthouse answers")
        return serving

    def get_status(self) -> dict[str, Any]:
        serving = self._lighthouse()
        assert serving.lighthouse is not None
        answer: dict[str, Any] = msgspec.json.decode(
            msgspec.json.encode(serving.process.run(serving.lighthouse.status))
        )
        return answer

    def stop(self, reason: str = "requested") -> dict[str, Any]:
        try:
            self._lighthouse().order(action="stop", reason=reason)
        except (OSError, Killed) as error:
            # An answer 500, or none: it could not be made durable.
            raise CraftError(f"the lighthouse failed: {error}") from None
        return {}
