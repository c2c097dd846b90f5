from __future__ import annotations

import time

import pytest

from craft.worker.report.step_account import StepAccount
from craft.worker.report.step_log import Committed


def test_no_step_takes_less_than_no_time_where_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    account = StepAccount(None, "w0", lambda _: None, lambda step, microbatch: None, lambda trouble: None)
    account.begin()
    clock = time.time() - 3600.0
    monkeypatch.setattr(time, "time", lambda: clock)
    account.committed(
        Committed(step=0, branch=0, generation=1, members=("w0",), plan=("w0",), metrics={}),
    )
    assert 0.0 <= account.step_s < 60.0
