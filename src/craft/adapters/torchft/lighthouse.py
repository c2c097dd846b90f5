"""torchft's lighthouse behind a door by which CRAFT tells it who is gone.

    python -m craft.adapters.torchft.lighthouse --min_replicas 1 --bind 0.0.0.0:29510

takes the flags of ``torchft_lighthouse`` and runs in its place. What decides is torchft's own lighthouse, unchanged. It knows a
dead replica by its silence alone, and makes no smaller quorum before its heartbeat limit. So when CRAFT says who is gone, a
fresh one takes over: it is told the heartbeats of those who are left of the last quorum, and is asked again what they were
asking; it makes their quorum as soon as all of them ask, without any limit. Numbers of quorums go on growing.

Like torchft's own, this door knows no authentication: it belongs on a network of the job's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from craft.adapters.torchft import messages, requirements
from craft.adapters.torchft.messages import Attends, Gone
from craft.protocol.errors import ConfigError, MalformedMessage
from craft.telemetry.text import logs

logger = logging.getLogger(__name__)

_ABORT_LIMIT_S = 2.0
"""Longer nobody's abort is waited for: it hears of a loss within milliseconds, or is lost itself."""


class InnerLighthouse:
    """One lighthouse of torchft's own."""

    def __init__(self, server: Any, channel: Any, known: frozenset[str] | None, generation: int) -> None:
        """``known``: whose heartbeats count until the first quorum is made; None: everybody's.

        ``generation``: that of CRAFT's for which it took over; 0: the first one.
        """
        self._server = server
        self._channel = channel
        self.quorum = channel.unary_unary(messages.QUORUM)
        self.heartbeat = channel.unary_unary(messages.HEARTBEAT)
        self.known = known
        self.generation = generation
        self.over = asyncio.Event()
        """Set when another one has taken over."""

    async def close(self) -> None:
        await self._channel.close()
        await asyncio.to_thread(self._server.shutdown)


class LighthouseProxy:
    """Lives on one event loop. Calls come in as bytes, and go on to whichever lighthouse is the current one."""

    def __init__(self, start: Callable[[], Any], connect: Callable[[str], Any]) -> None:
        """``start()`` starts a lighthouse of torchft's; ``connect(address)`` opens a channel to it."""
        self._start = start
        self._connect = connect
        self._ready: asyncio.Queue[Any] = asyncio.Queue()
        self._inner: InnerLighthouse | None = None
        self._replicas: dict[str, str] = {}
        """By worker of CRAFT's, which replica of torchft's it is."""
        self._aborted: dict[str, int] = {}
        """By replica, the newest generation for which it has aborted its group."""
        self._said = asyncio.Condition()
        self._gone: set[str] = set()
        """Replicas that CRAFT goes on without: not heard any more, whatever they say."""
        self._last = messages.Quorum(number=0, replica_ids=())
        self._passed = 0
        """What is added to the numbers of the current lighthouse's quorums."""
        # Guards what follows when somebody is gone: others may be gone, too, before a fresh lighthouse has taken over.
        self._taking_over = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self._prepare()
        self._inner = await self._next(None, 0)
        self._spawn(self._prepare())

    async def _prepare(self) -> None:
        """Have a lighthouse ready, so that none has to be started when somebody is gone."""
        await self._ready.put(await asyncio.to_thread(self._start))

    async def _next(self, known: frozenset[str] | None, generation: int) -> InnerLighthouse:
        server = await self._ready.get()
        return InnerLighthouse(server, self._connect(server.address()), known, generation)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What torchft's managers ask.

    async def quorum(self, request: bytes, limit_s: float | None) -> bytes | None:
        """Return torchft's answer; None if this replica is gone."""
        replica_id = messages.asking(request)
        while replica_id not in self._gone:
            inner = self._inner
            assert inner is not None
            await self._has_aborted(replica_id, inner.generation)
            response = await _ask(inner, inner.quorum, request, limit_s)
            # Of a lighthouse that is not asked any more, the others may not have got the same answer.
            if response is not None and inner is self._inner:
                return self._made(inner, response)
        return None

    async def _has_aborted(self, replica_id: str, generation: int) -> None:
        """Wait until a replica has aborted its old group. If it did so later, it would meet the new one, as it opens."""
        if replica_id not in self._replicas.values():
            return

        def done() -> bool:
            return self._aborted.get(replica_id, 0) >= generation or replica_id in self._gone

        async with self._said:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._said.wait_for(done), _ABORT_LIMIT_S)

    def _made(self, inner: InnerLighthouse, response: bytes) -> bytes:
        made = messages.quorum_in(response)
        inner.known = None
        number = made.number + self._passed
        self._last = messages.Quorum(number=number, replica_ids=made.replica_ids)
        return messages.renumbered(response, number) if self._passed else response

    async def heartbeat(self, request: bytes, limit_s: float | None) -> bytes:
        replica_id, inner = messages.beating(request), self._inner
        if replica_id in self._gone or inner is None or (inner.known is not None and replica_id not in inner.known):
            return b""
        # Of one that is over nobody needs to be heard: the next one was told of those who count.
        return await _ask(inner, inner.heartbeat, request, limit_s) or b""

    # What CRAFT's workers say.

    def attends(self, said: Attends) -> None:
        self._replicas[said.worker_id] = said.replica_id
        # It came after whatever was aborted until now.
        self._aborted[said.replica_id] = self._inner.generation if self._inner is not None else 0

    async def goes_on_without(self, said: Gone) -> None:
        """The first who says it has a fresh lighthouse take over, unless a quorum without them was made already."""
        async with self._said:
            self._aborted[self._replicas.get(said.worker_id, "")] = said.generation
            self._said.notify_all()
        gone = {self._replicas[each] for each in said.worker_ids if each in self._replicas} - self._gone
        self._gone |= gone
        async with self._taking_over:
            if gone & set(self._last.replica_ids):
                logger.info("generation %d goes on without %s", said.generation, ", ".join(said.worker_ids))
                await self._take_over(frozenset(self._last.replica_ids) - self._gone, said.generation)

    async def _take_over(self, left: frozenset[str], generation: int) -> None:
        """Let a fresh lighthouse make the next quorum, of those who are left of the last one."""
        fresh = await self._next(left, generation)
        # All of them before anybody asks: who is not known yet would be left out.
        await asyncio.gather(*(fresh.heartbeat(messages.heartbeat_of(each)) for each in left))
        before, self._inner = self._inner, fresh
        self._passed = self._last.number
        self._last = messages.Quorum(number=self._last.number, replica_ids=tuple(left))
        assert before is not None
        before.over.set()
        self._spawn(before.close())
        self._spawn(self._prepare())


async def _ask(
    inner: InnerLighthouse, method: Callable[..., Any], request: bytes, limit_s: float | None
) -> bytes | None:
    """Return its answer; None if another one takes over before it has answered, or has already."""
    if inner.over.is_set():
        return None
    call = asyncio.ensure_future(_result(method(request, timeout=limit_s)))
    over = asyncio.ensure_future(inner.over.wait())
    await asyncio.wait({call, over}, return_when=asyncio.FIRST_COMPLETED)
    over.cancel()
    if inner.over.is_set():
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return None
    return await call


async def _result(call: Any) -> bytes:
    response: bytes = await call
    return response


async def serve(door: LighthouseProxy, bind: str) -> Any:
    """Open the door at an address; returns the server and its port."""
    import grpc

    async def quorum(request: bytes, context: Any) -> bytes:
        response = await _asked(door.quorum(request, context.time_remaining()), context)
        if response is None:
            await context.abort(grpc.StatusCode.ABORTED, "CRAFT goes on without this replica: it must end")
        return response or b""

    async def heartbeat(request: bytes, context: Any) -> bytes:
        return await _asked(door.heartbeat(request, context.time_remaining()), context) or b""

    async def attends(request: bytes, context: Any) -> bytes:
        door.attends(msgspec.json.decode(request, type=Attends))
        return b""

    async def gone(request: bytes, context: Any) -> bytes:
        await door.goes_on_without(msgspec.json.decode(request, type=Gone))
        return b""

    handlers = {messages.QUORUM: quorum, messages.HEARTBEAT: heartbeat, messages.ATTEND: attends, messages.GONE: gone}

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            found = handlers.get(details.method)
            return None if found is None else grpc.unary_unary_rpc_method_handler(found)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port(bind)
    await server.start()
    return server, port


async def _asked(answer: Any, context: Any) -> bytes | None:
    """What torchft's lighthouse says, errors included."""
    import grpc

    try:
        response: bytes | None = await answer
        return response
    except MalformedMessage as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except grpc.aio.AioRpcError as error:
        await context.abort(error.code(), error.details() or "")
    return None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bind", default="[::]:29510", help="address of the door (default: %(default)s)")
    parser.add_argument(
        "--min_replicas", type=int, required=True, help="as of torchft_lighthouse, and those that follow"
    )
    parser.add_argument("--join_timeout_ms", type=int, default=60000)
    parser.add_argument("--quorum_tick_ms", type=int, default=100)
    parser.add_argument("--heartbeat_timeout_ms", type=int, default=5000)
    return parser.parse_args(arguments)


async def run(args: argparse.Namespace) -> None:
    import grpc
    from torchft.coordination import LighthouseServer

    def start() -> Any:
        return LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=args.min_replicas,
            join_timeout_ms=args.join_timeout_ms,
            quorum_tick_ms=args.quorum_tick_ms,
            heartbeat_timeout_ms=args.heartbeat_timeout_ms,
        )

    def connect(address: str) -> Any:
        # It listens on this host alone, whatever name it gives to that.
        return grpc.aio.insecure_channel(f"127.0.0.1:{address.rpartition(':')[2]}")

    door = LighthouseProxy(start, connect)
    await door.open()
    server, port = await serve(door, args.bind)
    logger.info("the door to torchft's lighthouse is open on port %d", port)
    await server.wait_for_termination()


def main() -> None:
    logs.begin(logging.INFO, logs.IN_FILES)
    args = parse()
    try:
        requirements.check()
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
