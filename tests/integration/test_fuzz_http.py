"""A short run of the fuzzer: whatever is sent, the lighthouse answers, lives on, and does nothing about it."""

from __future__ import annotations

import asyncio

from bench.fuzz_http import RULES, Found, fuzz

from craft.wire.auth import read_token

from .scene import Scene

REQUESTS = 800


def test_fuzzed_requests_lead_to_no_5xx_and_to_no_action_P6(scene: Scene) -> None:
    rules = scene.run.create().path / "craft.toml"
    rules.write_text(RULES)
    process = scene.light("--config", str(rules))
    found = Found()
    asyncio.run(fuzz(scene.run.read_address(), read_token(scene.run.token), REQUESTS, 1, found))
    assert found.failures == []
    assert (found.sent, found.silent) == (REQUESTS, 0)
    # All doors were knocked at: some requests were good, others bad in different ways.
    assert {200, 400, 401, 404, 405, 415} <= found.statuses.keys()
    assert process.poll() is None
    kinds = {line["kind"] for line in scene.client.events()}
    assert kinds == {"event"}
