"""A proxy in front of torchft's lighthouse, through which CRAFT reports lost workers.

    python -m craft.adapters.torchft.lighthouse --min_replicas 1 --bind 0.0.0.0:29510

takes the flags of ``torchft_lighthouse`` and replaces it. torchft's lighthouse still decides, unchanged. It detects a dead
replica by silence alone, and makes no smaller quorum before its heartbeat limit. So when CRAFT reports a loss, a fresh
lighthouse takes over: it receives the heartbeats of the survivors of the last quorum, and their pending requests; it makes
their quorum as soon as all of them ask, without waiting for a limit. Quorum numbers keep growing.

Like torchft's lighthouse, the proxy has no authentication: run it on a private network of the job.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from craft.adapters.requirements import check_torchft
from craft.adapters.torchft import messages
from craft.adapters.torchft.messages import Attends, Gone
from craft.protocol.errors import ConfigError, MalformedMessage
from craft.telemetry.text import logs

logger = logging.getLogger(__name__)

_ABORT_LIMIT_S = 2.0
"""How long to wait for an abort: a replica hears of a loss within milliseconds, or is lost itself."""


class InnerLighthouse:
    """One lighthouse of torchft."""

    def __init__(self, server: Any, channel: Any, known: frozenset[str] | None, generation: int) -> None:
        """``known``: replicas whose heartbeats count until the first quorum is made; None: all.

        ``generation``: CRAFT's generation for which it took over; 0: the first one.
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
    """Lives on one event loop. Forwards calls, as bytes, to the current lighthouse."""

    def __init__(self, start: Callable[[], Any], connect: Callable[[str], Any]) -> None:
        """``start()`` starts a lighthouse of torchft; ``connect(address)`` opens a channel to it."""
        self._start = start
        self._connect = connect
        self._ready: asyncio.Queue[Any] = asyncio.Queue()
        self._inner: InnerLighthouse | None = None
        self._replicas: dict[str, str] = {}
        """The replica of torchft, by worker of CRAFT."""
        self._aborted: dict[str, int] = {}
        """The newest generation for which each replica has aborted its group."""
        self._said = asyncio.Condition()
        self._gone: set[str] = set()
        """Replicas that CRAFT has declared lost: their calls are ignored."""
        self._last = messages.Quorum(number=0, replica_ids=())
        self._passed = 0
        """Offset added to the quorum numbers of the current lighthouse."""
        # Guards the reaction to a loss: there may be more before a fresh lighthouse has taken over.
        self._taking_over = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self._prepare()
        self._inner = await self._next(None, 0)
        self._spawn(self._prepare())

    async def close(self) -> None:
        """End the current lighthouse, and the one that is kept ready."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._inner is not None:
            await self._inner.close()
        while not self._ready.empty():
            await asyncio.to_thread(self._ready.get_nowait().shutdown)

    async def _prepare(self) -> None:
        """Keep a lighthouse ready, so that none has to be started after a loss."""
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
        """Return torchft's answer; None if this replica is lost."""
        replica_id = messages.asking(request)
        while replica_id not in self._gone:
            inner = self._inner
            assert inner is not None
            await self._has_aborted(replica_id, inner.generation)
            response = await _ask(inner, inner.quorum, request, limit_s)
            # With a lighthouse that was replaced, others may not have got the same answer.
            if response is not None and inner is self._inner:
                return self._made(inner, response)
        return None

    async def _has_aborted(self, replica_id: str, generation: int) -> None:
        """Wait until a replica has aborted its old group: a later abort would hit the new one."""
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
        # A replaced one needs no heartbeats: its successor was told who counts.
        return await _ask(inner, inner.heartbeat, request, limit_s) or b""

    # What CRAFT's workers say.

    def attends(self, said: Attends) -> None:
        self._replicas[said.worker_id] = said.replica_id
        # It joined after everything that was aborted until now.
        self._aborted[said.replica_id] = self._inner.generation if self._inner is not None else 0

    async def goes_on_without(self, said: Gone) -> None:
        """On the first report, let a fresh lighthouse take over, unless a quorum without them was made already."""
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
        """Let a fresh lighthouse make the next quorum, of the survivors of the last one."""
        fresh = await self._next(left, generation)
        # All heartbeats before any request: an unknown replica would be left out.
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
    """Return its answer; None if another one takes over before it has answered."""
    if inner.over.is_set():
        return None
    call = asyncio.ensure_future(method(request, timeout=limit_s))
    over = asyncio.ensure_future(inner.over.wait())
    await asyncio.wait({call, over}, return_when=asyncio.FIRST_COMPLETED)
    over.cancel()
    if inner.over.is_set():
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return None
    response: bytes = await call
    return response


async def serve(door: LighthouseProxy, bind: str) -> Any:
    """Open the proxy at an address; return the server and its port."""
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
    """Return the answer of torchft's lighthouse, errors included."""
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
    parser.add_argument("--bind", default="[::]:29510", help="address of the proxy (default: %(default)s)")
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
        # It listens on this host only, whatever name it reports.
        return grpc.aio.insecure_channel(f"127.0.0.1:{address.rpartition(':')[2]}")

    door = LighthouseProxy(start, connect)
    await door.open()
    server, port = await serve(door, args.bind)
    logger.info("the proxy of torchft's lighthouse listens on port %d", port)
    await server.wait_for_termination()


def main() -> None:
    logs.begin(logging.INFO, logs.IN_FILES)
    args = parse()
    try:
        check_torchft()
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
