"""Slowing a process down by pulses."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from craft.testing.cpu_throttle import CpuThrottle


def test_a_pulsed_process_gets_its_share_of_a_core_and_no_more() -> None:
    """Also where the pulses come late, because others have the cores: what counts is how running and stopped compare."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        seen = psutil.Process(process.pid)
        with CpuThrottle(process.pid, stopped_s=0.008, running_s=0.002):
            before, began = sum(seen.cpu_times()[:2]), time.monotonic()
            time.sleep(1.5)
            used_s, passed_s = sum(seen.cpu_times()[:2]) - before, time.monotonic() - began
        assert used_s < 0.35 * passed_s
        assert seen.status() in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING)
    finally:
        process.kill()
        process.wait()


def test_a_process_that_ends_meanwhile_is_no_fault() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    with CpuThrottle(process.pid, stopped_s=0.001, running_s=0.001):
        pass
