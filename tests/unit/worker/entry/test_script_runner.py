"""What is reported of a script that ends by an exception, and the exit code of its process."""

from __future__ import annotations

from typing import Any, cast

import pytest

from craft.protocol.errors import BitsDiffer, CallsDiffer, CraftError, NewcomerDiffers, Refused, ScriptLeft, StateLost
from craft.protocol.events import WorkerFailed
from craft.worker.entry.script_end import report_failure
from craft.worker.entry.script_runner import _exit_code
from craft.worker.report.channel import Channel


class Reports:
    """Stands in for the channel."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}

    def report(self, *, urgent: bool = True, **changes: Any) -> None:
        self.latest |= changes


def failure(error: BaseException) -> WorkerFailed:
    reports = Reports()
    report_failure(cast(Channel, reports), error, "w1")
    found = reports.latest["failed"]
    assert isinstance(found, WorkerFailed)
    return found


def test_an_error_is_reported_with_its_sentence_and_traceback() -> None:
    found = failure(ValueError("the learning rate is negative"))
    assert (found.worker_id, found.error) == ("w1", "ValueError: the learning rate is negative")
    assert "ValueError" in found.traceback
    assert not (found.refused or found.everywhere or found.late or found.hardware)


@pytest.mark.parametrize(
    ("error", "refused", "everywhere", "late"),
    [
        (Refused("no data"), True, False, False),
        (NewcomerDiffers("other bits"), True, False, True),
        (CallsDiffer("job.barrier"), False, True, False),
        (ScriptLeft("in step 3"), False, False, False),
    ],
)
def test_errors_of_craft_say_what_they_mean_for_the_job(
    error: CraftError, refused: bool, everywhere: bool, late: bool
) -> None:
    found = failure(error)
    assert (found.refused, found.everywhere, found.late, found.microbatch) == (refused, everywhere, late, None)


def test_a_long_error_is_cut_at_its_beginning() -> None:
    found = failure(ValueError("x" * 10_000 + "the end"))
    assert len(found.error) == 2000 and found.error.endswith("the end")


@pytest.mark.parametrize("error", [BitsDiffer("w0 | w1"), StateLost("all are gone")])
def test_what_every_worker_has_reported_already_is_not_reported_again(error: CraftError) -> None:
    reports = Reports()
    report_failure(cast(Channel, reports), error, "w1")
    report_failure(None, ValueError("outside of a job"), "w1")
    assert reports.latest == {}


@pytest.mark.parametrize(("code", "expected", "printed"), [(None, 0, ""), (0, 0, ""), (7, 7, ""), ("no", 1, "no\n")])
def test_exit_codes_are_those_of_the_interpreter(
    code: Any, expected: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(SystemExit(code)) == expected
    assert capsys.readouterr().err == printed
