"""Faults strike where they are placed: at their point, step, worker and occurrence, and once in a job."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from craft.protocol.errors import ConfigError
from craft.settings.environ import FAULTS
from craft.telemetry import fault_points
from craft.testing import Fault, InjectedError, arm, reach
from craft.testing.faults import encode, struck


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    fault_points.listen(None)


def strikes(point: str, step: int, rank: int | None = None) -> bool:
    try:
        reach(point, step, rank)
    except InjectedError:
        return True
    return False


def test_a_fault_strikes_at_its_point_and_step_and_only_once() -> None:
    arm([Fault(point="batch", step=3, kind="raise")])
    assert not strikes("batch", 2)
    assert not strikes("update", 3)
    assert strikes("batch", 3)
    assert not strikes("batch", 3)


def test_a_fault_without_a_step_strikes_at_any() -> None:
    arm([Fault(point="batch", kind="raise")])
    assert strikes("batch", 17)


def test_the_occurrence_counts_how_often_the_point_was_reached() -> None:
    arm([Fault(point="result_sent", step=3, kind="raise", occurrence=3)])
    assert [strikes("result_sent", step) for step in (2, 3, 3, 3, 3)] == [False, False, False, True, False]


def test_a_fault_is_for_one_worker_or_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAFT_WORKER_ID", "w2")
    arm([Fault(point="batch", worker="w1", kind="raise")])
    assert not strikes("batch", 0)
    arm([Fault(point="batch", worker="w2", kind="raise")])
    assert strikes("batch", 0)
    arm([Fault(point="opening", rank=1, kind="raise")])
    assert not strikes("opening", 0, rank=0)
    assert strikes("opening", 0, rank=1)


def test_a_system_call_fails_for_as_long_as_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAFT_RUN_DIR", str(tmp_path))
    arm([Fault(point="store.accept", kind="error", errno="EMFILE", seconds=0.5)])
    began = time.monotonic()
    failures = 0
    while time.monotonic() < began + 0.4:
        with pytest.raises(OSError, match="Too many open files") as found:
            reach("store.accept")
        failures += found.value.errno == errno.EMFILE
    assert failures > 1
    while time.monotonic() <= began + 0.6:
        pass
    reach("store.accept")
    reach("donor.accept")
    assert struck(tmp_path) == {0: "w0"}


def test_a_system_call_fails_once_where_no_time_is_given() -> None:
    arm([Fault(point="store.accept", kind="error", errno="ENOSPC")])
    with pytest.raises(OSError, match="No space left"):
        reach("store.accept")
    reach("store.accept")


def test_an_error_that_no_system_call_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="errno must be a name"):
        arm([Fault(point="store.accept", kind="error", errno="EVIL")])


def test_a_worker_that_has_not_joined_has_no_rank() -> None:
    arm([Fault(point="batch", rank=0, kind="raise")])
    assert not strikes("batch", 0)


def test_a_fault_strikes_one_worker_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CRAFT_RUN_DIR", str(tmp_path))
    hit = []
    for worker in ("w0", "w1"):
        monkeypatch.setenv("CRAFT_WORKER_ID", worker)
        arm([Fault(point="update", kind="raise"), Fault(point="batch", kind="raise")])
        hit.append(strikes("batch", 0))
    assert hit == [True, False]
    assert struck(tmp_path) == {1: "w0"}


def test_a_fault_can_wait_for_a_point_of_another_thread() -> None:
    arm([Fault(point="flushed", kind="raise", after="result_sent")])
    outcome: list[bool] = []
    waiting = threading.Thread(target=lambda: outcome.append(strikes("flushed", 3)))
    waiting.start()
    assert not strikes("result_sent", 2)
    assert outcome == []
    assert not strikes("result_sent", 3)
    waiting.join(10)
    assert outcome == [True]


def test_a_sleep_delays_and_goes_on() -> None:
    arm([Fault(point="batch", kind="sleep", seconds=0.05)])
    began = time.monotonic()
    reach("batch", 0)
    assert time.monotonic() - began >= 0.05


def test_what_is_in_the_environment_is_armed_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in encode([Fault(point="batch", step=1, kind="raise")]).items():
        monkeypatch.setenv(name, value)
    arm()
    assert strikes("batch", 1)
    monkeypatch.delenv(FAULTS)
    arm()
    assert not strikes("batch", 1)


@pytest.mark.parametrize("text", ["{", "[{}]", '[{"point": "batch", "kind": "burn"}]', '[{"point": "x", "stp": 1}]'])
def test_what_is_not_a_list_of_faults_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(FAULTS, text)
    with pytest.raises(ConfigError, match=f"{FAULTS} is not a JSON list of faults"):
        arm()


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_the_process_that_is_struck_gets_a_real_signal_after_it_has_said_so(kind: str, number: signal.Signals) -> None:
    code = "from craft import testing; testing.arm(); testing.reach('batch', 0)"
    environment = {**os.environ, **encode([Fault(point="batch", kind=kind)])}  # type: ignore[arg-type]
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert (os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)) == number
    finally:
        process.kill()
    assert "craft.testing: struck by " in process.communicate(timeout=10)[1]
