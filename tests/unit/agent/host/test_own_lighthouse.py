"""The lighthouse that ``craft run`` starts: what becomes of what it says."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from urllib.parse import urlsplit

from craft.agent.host.own_lighthouse import OwnLighthouse
from craft.settings.run import resolve, write_effective
from craft.settings.rundir import HeldRunDir, RunDir
from craft.wire.auth import read_token

LIMIT_S = 20.0


def ask(url: str, request: bytes) -> bytes:
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port or 0), LIMIT_S) as connection:
        connection.sendall(request)
        return connection.recv(65536)


def test_strangers_can_neither_fill_its_log_nor_read_it_nor_put_the_token_there_P6(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    run = RunDir(tmp_path / "run").create()
    resolved = resolve({"script": str(script), "workers": 1}, None)
    write_effective(run.config, resolved)

    async def story() -> str:
        lighthouse = OwnLighthouse(resolved.settings, run, HeldRunDir(run))
        await lighthouse.start()
        token = read_token(run.token)
        for number in range(200):
            request = f"GET / HTTP/1.1\r\nHost: {number}\r\nAuthorization: Bearer {token}\x00\r\n\r\n"
            answer = await asyncio.to_thread(ask, run.read_address(), request.encode())
            assert answer.startswith(b"HTTP/1.0 400")
        await lighthouse.end()
        return token

    token = asyncio.run(story())
    log = run.lighthouse_log.read_text()
    assert run.lighthouse_log.stat().st_mode & 0o777 == 0o600
    assert "a request from 127.0.0.1 cannot be read and was refused (BadHttpMessage)" in log
    assert "more such messages about requests were left out" in log
    assert log.count("\n") < 60
    assert token not in log
