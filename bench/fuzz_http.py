"""Sends a million fuzzed requests to the lighthouse of a running job: no 5xx, no crash, no growth, no effect on training.

Requests are bytes, so that also what is no HTTP can be sent. All come from one seed. Nothing that is sent is a valid order:
workers and hosts that are named do not exist, and alerts ask for nothing. Example, a quick try:

    python bench/fuzz_http.py --requests 20000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from bench.conduct import conduct
from bench.jobs import BENCH, CraftJob
from bench.recovery import wait_until

CONNECTIONS = 8
ANSWER_LIMIT_S = 30.0
WARM_UP = 0.2
"""The part of the requests after which memory is looked at for the first time."""
RULES = """
[hooks.pager]
worker = "who.id"
host = "who.host"
value = "state"
answers = { up = "resolved" }

[hooks.tickets]
id = "number"
"""
PATHS = (
    "/", "/healthz", "/openapi.json", "/metrics", "/v1/status", "/v1/events?follow=x", "/v1/agent",
    "/v1/failures", "/v1/actions", "/v1/alerts", "/v1/cloudevents", "/v1/hooks/pager", "/v1/hooks/tickets", "/v1/hooks/x",
)  # fmt: skip
_ALERT = {
    "status": "firing", "labels": {"alertname": "Fuzz", "host": "nowhere"}, "annotations": {"summary": "s"},
    "startsAt": "2026-01-01T00:00:00Z", "endsAt": "0001-01-01T00:00:00Z", "fingerprint": "f",
}  # fmt: skip
BODIES: dict[str, Any] = {
    "/v1/failures": {"worker_id": "nobody", "reason": "fuzz"},
    "/v1/actions": {"action": "drain", "worker_id": "nobody", "reason": "fuzz", "deadline_s": 1.0},
    "/v1/alerts": {"version": "4", "groupKey": "g", "status": "firing", "alerts": [_ALERT, _ALERT]},
    "/v1/cloudevents": {"specversion": "1.0", "id": "i", "source": "/s", "type": "t", "data": {"host": "nowhere"}},
    "/v1/hooks/pager": {"who": {"id": "nobody", "host": "nowhere"}, "state": "down"},
    "/v1/hooks/tickets": {"number": 1, "summary": "s"},
}
METHODS = ("GET", "POST", "POST", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "get", "X" * 50)
TYPES = (
    "application/json",
    "application/cloudevents+json",
    "text/plain",
    "",
    "application/x-www-form-urlencoded",
    "\xff",
)
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, 2**63, 2**70, 0.1, "", "x", "nobody", "\0", "é😀", "~(", "../..", "x" * 5000, [], {}, [[]],
    {"": ""}, "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "2026-02-30T00:00:00Z", "report", "inject",
)  # fmt: skip


class Fuzz:
    """Makes requests, each from the one before and chance."""

    def __init__(self, seed: int, token: str, limit_bytes: int = 20_000) -> None:
        self._draw = random.Random(seed)
        self._token = token
        self._limit = limit_bytes

    def request(self) -> tuple[bytes, bool]:
        """Return the next request, and whether it is one: of what is none, nobody knows where it ends."""
        draw = self._draw
        # The whole journal, which grows meanwhile: not too often.
        path = draw.choice(PATHS) if draw.random() > 0.001 else "/v1/events?follow=0"
        method = draw.choice(METHODS) if draw.random() < 0.3 else ("POST" if path in BODIES else "GET")
        body = self._body(path) if method != "GET" or draw.random() < 0.1 else b""
        if draw.random() < 0.1:
            path = self._mutated(path.encode()).decode("latin-1").replace(" ", "").replace("\r", "").replace("\n", "")
        lines = [f"{method} {path or '/'} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
        lines += self._headers()
        request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        # Now and then what is no HTTP at all.
        return (self._mutated(request), False) if draw.random() < 0.03 else (request, True)

    def _headers(self) -> Iterator[str]:
        draw = self._draw
        if draw.random() < 0.9:
            yield f"Authorization: Bearer {self._token}"
        elif draw.random() < 0.5:
            yield f"Authorization: {draw.choice(('Bearer x', 'Basic eDp4', 'Bearer', chr(255)))}"
        yield f"Content-Type: {draw.choice(TYPES) if draw.random() < 0.4 else 'application/json'}"
        if draw.random() < 0.2:
            for name in ("specversion", "id", "source", "type", "time"):
                yield f"ce-{name}: {draw.choice(('1.0', 'x', '%ff', '2026-01-01T00:00:00Z', '', 'x' * 300))}"
        if draw.random() < 0.05:
            yield draw.choice(("Expect: 100-continue", "Connection: close", "Last-Event-ID: -1", "Upgrade: websocket"))

    def _body(self, path: str) -> bytes:
        draw = self._draw
        chance = draw.random()
        if chance < 0.05:
            return draw.randbytes(draw.randrange(200))
        if chance < 0.08:
            return draw.choice(
                (b"[" * 5000, b'{"a":' * 3000, b"\xff\xfe", b'"\\ud800"', b"NaN", b'{"reason":"\\ud800"}')
            )
        value = json.loads(json.dumps(BODIES.get(path, {"a": 1})))
        for _ in range(draw.randrange(4)):
            self._change(value)
        data = json.dumps(value).encode()[: self._limit]
        return self._mutated(data) if chance > 0.9 else data

    def _change(self, value: Any) -> None:
        """Put something odd somewhere into ``value``."""
        draw = self._draw
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return
            key = draw.choice(keys)
            if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.8:
                value = value[key]
                continue
            if isinstance(value, dict) and draw.random() < 0.3:
                value.pop(key)
                if draw.random() < 0.5:
                    value[draw.choice(("", "host", "worker_id", "kind", "sure", "x" * 300))] = self._odd()
            else:
                value[key] = self._odd() if draw.random() < 0.8 else str(draw.randrange(10**9))
            return

    def _odd(self) -> Any:
        return copy.deepcopy(self._draw.choice(ODD))

    def _mutated(self, data: bytes) -> bytes:
        draw, changed = self._draw, bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(changed) + 1)
            changed[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        return bytes(changed)


@dataclass
class Found:
    """What came back."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    closed: int = 0
    """Connections that the lighthouse ended, with or without an answer."""
    silent: int = 0
    """Requests that got no answer within the limit, though the connection stayed."""
    failures: list[str] = field(default_factory=list)
    """Requests that were answered with a 5xx."""


async def fuzz(url: str, token: str, requests: int, seed: int, found: Found) -> None:
    """Send ``requests`` over a few connections at once."""
    place = urlsplit(url)
    each = -(-requests // CONNECTIONS)
    await asyncio.gather(
        *(
            _connection(place.hostname or "", place.port or 0, Fuzz(seed * 1000 + number, token), each, found)
            for number in range(CONNECTIONS)
        )
    )


async def _connection(host: str, port: int, source: Fuzz, requests: int, found: Found) -> None:
    writer: asyncio.StreamWriter | None = None
    for _ in range(requests):
        request, whole = source.request()
        found.sent += 1
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection(host, port)
            writer.write(request)
            if not whole:
                writer.write_eof()
            status, keeps = await asyncio.wait_for(_answer(reader, request), ANSWER_LIMIT_S)
            found.statuses[status] += 1
            if status >= 500:
                found.failures.append(repr(request[:600]))
            keeps = keeps and whole
        except (OSError, EOFError, ValueError):
            found.closed += 1
            keeps = False
        except asyncio.TimeoutError:
            found.silent += 1
            keeps = False
        if not keeps and writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            writer = None
    if writer is not None:
        writer.close()


async def _answer(reader: asyncio.StreamReader, request: bytes) -> tuple[int, bool]:
    """Read one answer to its end; returns its status, and whether the connection can be used again."""
    status = 100
    while status == 100:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if status == 101 or "content-length" not in fields:
        return status, False
    if not request.startswith((b"HEAD ", b"head ")):
        await reader.readexactly(int(fields["content-length"]))
    # Of a request with an odd length the rest would be taken for the next one.
    return status, status < 300 and fields.get("connection", "") != "close"


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rules = folder / "craft.toml"
    rules.write_text(RULES)
    script = ["--samples", "8", "--microbatches", "4", "--steps", "10000000"]
    with CraftJob(folder / "job", "recovery_craft.py", script, 2, ["--config", str(rules)]) as job:
        assert isinstance(job, CraftJob)
        wait_until(job, lambda: len(job.commits()) == 2, "steps", 90.0)
        before = job.status()
        lighthouse = psutil.Process(before["lighthouse"]["pid"])
        token, url = job.token, job.address
        found = Found()
        began = time.monotonic()
        asyncio.run(fuzz(url, token, int(args.requests * WARM_UP), args.seed, found))
        warm = lighthouse.memory_info().rss
        asyncio.run(fuzz(url, token, args.requests - found.sent, args.seed + 1, found))
        after = job.status()
        grown = lighthouse.memory_info().rss - warm
        actions = Counter(line["action"] for line in job.journal() if line["kind"] == "action")
    return {
        "sent": found.sent,
        "seconds": time.monotonic() - began,
        "statuses": {str(status): count for status, count in sorted(found.statuses.items())},
        "closed": found.closed,
        "silent": found.silent,
        "failures": found.failures[:20],
        "grown_bytes": grown,
        "same_lighthouse": before["lighthouse"]["pid"] == after["lighthouse"]["pid"],
        "steps": after["step"] - before["step"],
        "faults": after["faults"],
        "generation": after["generation"],
        "actions": dict(actions),
        "failed": [],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(conduct("fuzz_http", parse(), run))
