"""The lighthouse as a process: lock, listen, publish the address, serve until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from craft.control.http.connection_limits import ConnectionBounds, ConnectionLimits
from craft.control.http.request_log import RequestLog
from craft.control.http.server import make_app
from craft.control.lighthouse import Lighthouse, LighthouseSettings
from craft.protocol.errors import ConfigError, CraftError
from craft.settings.files.private_files import open_private, read_private, write_private
from craft.settings.rundir import RunDir
from craft.wire.accept_errors import AcceptErrors
from craft.wire.auth import own_token
from craft.wire.tls import own_certificate, server_context

SHUTDOWN_LIMIT_S = 0.5
KEEPALIVE_LIMIT_S = 15.0
BACKLOG = 1024
BEAT_S = 0.25
"""A kept lighthouse shows this often that its event loop runs."""
_ACCEPTED_AT_ONCE = 32
"""New connections accepted in a row: connected agents must not wait for a crowd of new ones."""
_HANDSHAKE_LIMIT_S = 5.0
_FILES = 65_536
_PR_SET_PDEATHSIG = 1
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


@dataclass(frozen=True)
class LighthouseAddress:
    """Where a lighthouse listens."""

    bind: str = "127.0.0.1"
    port: int = 0
    """0: the port of this run's earlier lighthouse if it is free, else any."""
    host_address: str | None = None
    """The name under which others reach it, if it differs from the bind address."""
    tls: tuple[Path, Path] | None = None
    """Files with its certificate and key; None: plain HTTP."""


def serve(
    run: RunDir,
    settings: LighthouseSettings,
    place: LighthouseAddress,
    token_file: Path | None,
    say: Callable[[str], None],
) -> None:
    """Run a lighthouse until SIGTERM or SIGINT; ``say`` gets the line that says where it listens."""
    with listen(run, place) as listener:
        serve_on(listener, run, settings, place, token_file, say)


def listen(run: RunDir, place: LighthouseAddress) -> socket.socket:
    """Return a socket for ``serve_on``; raise ConfigError if the run directory has a live lighthouse."""
    run.create()
    os.close(_lock(run))
    return _listen(place, run)


def serve_on(
    listener: socket.socket,
    run: RunDir,
    settings: LighthouseSettings,
    place: LighthouseAddress,
    token_file: Path | None,
    say: Callable[[str], None],
    beat: Callable[[], None] | None = None,
) -> None:
    """Like ``serve``, on a socket that may outlive this process; ``beat`` is called as long as the event loop runs."""
    lock = _lock(run)
    try:
        token = own_token(run, token_file)
        if token_file is not None:
            # A copy, so that the run directory is all that 'craft status' and others need.
            _write_again(run.token, token.encode() + b"\n")
        tls = None
        if place.tls is not None:
            tls = server_context(*place.tls)
            # Likewise: it identifies the lighthouse under any name.
            _write_again(run.certificate, own_certificate(place.tls[0]))
        asyncio.run(_serve(run, settings, token, listener, _url(place, listener), tls, say, beat))
    finally:
        os.close(lock)


async def _serve(
    run: RunDir,
    settings: LighthouseSettings,
    token: str,
    listener: socket.socket,
    url: str,
    tls: ssl.SSLContext | None,
    say: Callable[[str], None],
    beat: Callable[[], None] | None,
) -> None:
    asyncio.get_running_loop().set_exception_handler(AcceptErrors("the lighthouse"))
    requests = RequestLog()
    gate = ConnectionLimits(ConnectionBounds().within(_prepare()), requests)
    lighthouse = Lighthouse(run, settings, url)
    runner = web.AppRunner(
        make_app(lighthouse, token, gate.admit),
        access_log=None,
        logger=requests,
        shutdown_timeout=SHUTDOWN_LIMIT_S,
        handle_signals=False,
        keepalive_timeout=KEEPALIVE_LIMIT_S,
        # The body of a refused request is not read to its end.
        lingering_time=0.0,
    )
    await runner.setup()
    server: asyncio.Server | None = None
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        behind = runner.server
        assert behind is not None
        server = await asyncio.get_running_loop().create_server(
            lambda: gate.protocol(behind),
            sock=listener,
            backlog=_ACCEPTED_AT_ONCE,
            ssl=tls,
            ssl_handshake_timeout=_HANDSHAKE_LIMIT_S if tls is not None else None,
        )
        # asyncio uses one number for the kernel's backlog and for how many it accepts in a row.
        listener.listen(BACKLOG)
        _write_again(run.address, url.encode() + b"\n")
        say(f"lighthouse listening on {url}, run directory {run.path}")
        if beat is not None:
            _beat_on(asyncio.get_running_loop(), beat)
        waiting = asyncio.ensure_future(ended.wait())
        await asyncio.wait((waiting, lighthouse.broken), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    finally:
        if server is not None:
            server.close()
        gate.close()
        await lighthouse.disconnect()
        await runner.cleanup()
        requests.close()
        lighthouse.journal.close()
    if lighthouse.broken.done():
        raise CraftError(lighthouse.broken.result())


def _beat_on(loop: asyncio.AbstractEventLoop, beat: Callable[[], None]) -> None:
    """Call ``beat`` regularly, as long as ``loop`` runs."""
    beat()
    loop.call_later(BEAT_S, _beat_on, loop, beat)


def _prepare() -> int:
    """Prepare this process for thousands of connections; return how many files it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    # The garbage collector would walk a large job's state again and again, just when a loss makes many objects.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    return files


def _lock(run: RunDir) -> int:
    """Lock the run directory; the kernel releases the lock when the process ends."""
    fd = open_private(run.lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(
            f"the run directory {run.path} has a living lighthouse already (pid {pid or 'unknown'}):"
            " use that one, end it, or name another directory with --dir"
        ) from None
    # For people. Overwritten in place: the lock holds without it, also on a full disk.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, os.pwrite(fd, f"{os.getpid()}\n".encode(), 0))
    return fd


def _write_again(path: Path, data: bytes) -> None:
    """Write a file unless it already has this content: then a full disk does not end the lighthouse."""
    if os.path.lexists(path) and read_private(path) == data:
        path.chmod(0o600)
        # 'craft status' without --dir takes the run whose lighthouse was started last.
        os.utime(path)
    else:
        write_private(path, data)


def _listen(place: LighthouseAddress, run: RunDir) -> socket.socket:
    if place.port == 0:
        try:
            return _bind(place.bind, _earlier_port(run))
        except OSError:
            # Another process has it.
            pass
    try:
        return _bind(place.bind, place.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {place.port} of {place.bind} is in use: choose another one with --port, or 0 for any"
        else:
            message = f"cannot listen on {place.bind} port {place.port}: {error.strerror or error}"
        raise ConfigError(message) from None


def _bind(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def _earlier_port(run: RunDir) -> int:
    """Return the port that workers of this run may still use; 0 without one."""
    try:
        return urlsplit(run.read_address()).port or 0
    except (ConfigError, ValueError):
        return 0


def _url(place: LighthouseAddress, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    name = place.host_address or (socket.gethostname() if place.bind in _WILDCARDS else place.bind)
    scheme = "http" if place.tls is None else "https"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Make the kernel send a signal when the parent thread ends; end now if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise ConfigError(f"--with-parent does not work here: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise SystemExit(0)
