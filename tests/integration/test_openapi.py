"""The description of the HTTP interface holds: schemathesis makes requests from it, good and bad ones, for a real lighthouse."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from craft.wire.auth import bearer, read_token

from .scene import Scene

MODES = (GenerationMode("positive"), GenerationMode("negative"))
RULES = """
[hooks.pager]
host = "host"
value = "state"
answers = { down = "fail", up = "resolved" }
"""


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_every_answer_is_as_the_description_says_P6(scene: Scene, examples: int) -> None:
    rules = scene.run.create().path / "craft.toml"
    rules.write_text(RULES)
    process = scene.light("--config", str(rules))
    url = scene.run.read_address()
    headers = bearer(read_token(scene.run.token))
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    tried = [
        _try(operation, mode, examples, headers)
        for operation in operations
        for mode in MODES
        # Of what takes nothing there is nothing bad to send; and the feed does not end unless asked to.
        if operation.path != "/v1/events" and (mode == MODES[0] or operation.method == "post")
    ]
    assert len(tried) == 4 + 2 * 5
    assert process.poll() is None


def _try(
    operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, examples: int, headers: dict[str, str]
) -> str:
    """Make requests of one kind and mode, and check every answer."""

    @seed(0)
    @settings(
        max_examples=examples if operation.method == "post" else 1,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case[Any]) -> None:
        # What a description cannot say is refused as well, such as a body that names a worker and a host.
        case.call_and_validate(headers=headers, timeout=10, excluded_checks=[positive_data_acceptance])

    ask()
    return f"{mode} {operation.path}"
