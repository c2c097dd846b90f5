from __future__ import annotations

import pytest
from click.testing import CliRunner

from craft.cli.main import main


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-1", "soon"])
@pytest.mark.parametrize(
    "command", [("drain", "w0", "--deadline"), ("preempt", "--deadline"), ("lighthouse", "--heartbeat-limit")]
)
def test_what_is_no_number_of_seconds_is_refused(command: tuple[str, ...], number: str) -> None:
    done = CliRunner().invoke(main, [*command, number])
    assert done.exit_code == 2
    assert f"Invalid value for '{command[-1]}'" in done.output
