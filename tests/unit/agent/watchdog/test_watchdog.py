"""The watchdog over real processes that hang in real ways."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.system_calls import Rule, failing

from craft.agent.linux import procfs
from craft.agent.watchdog.watchdog import HangReport, KernelView, Suspect, Watchdog
from craft.decide.detect.hangs import HangLimits
from craft.protocol.values.activity import Phase
from craft.wire.activity import read

from ..victims import Victim, until

LIMITS = HangLimits(limit_s=0.6, update_limit_s=0.6, stop_limit_s=0.2)

Start = Callable[[str], Victim]


class Clock:
    """The real one, which a test can put forward."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> Watchdog:
    return Watchdog(LIMITS, clock)


@pytest.fixture
def start(tmp_path: Path, watchdog: Watchdog) -> Iterator[Start]:
    """Start a victim and have it watched."""
    with ExitStack() as stack:

        def start(kind: str) -> Victim:
            victim = stack.enter_context(Victim(tmp_path / f"{kind}", kind))
            victim.watched_by(watchdog)
            stack.callback(watchdog.remove, victim.name)
            return victim

        yield start


def suspect_of(look: Callable[[], tuple[Suspect, ...]]) -> Suspect:
    """Look until somebody is suspect, as the agent does."""
    found: tuple[Suspect, ...] = ()

    def looked() -> bool:
        nonlocal found
        found = look()
        return bool(found)

    until(looked)
    return found[0]


def examined(watchdog: Watchdog, suspect: Suspect) -> HangReport:
    hang = asyncio.run(watchdog.examine(suspect))
    assert hang is not None
    return hang


@pytest.mark.parametrize(
    ("kind", "doing", "kernel"),
    [
        ("sleep", "computing microbatch 3 of step 41", "asleep in the kernel (hrtimer_nanosleep), no CPU used"),
        ("loop", "computing microbatch 3 of step 41", " s of CPU used"),
        ("gil", "computing microbatch 3 of step 41", "asleep in the kernel (hrtimer_nanosleep), no CPU used"),
        ("deadlock", "in the script's code after the exchange of step 41", "asleep in the kernel (futex"),
        ("loader", "loading microbatch 3 of step 41", "asleep in the kernel ("),
    ],
)
def test_a_hang_is_named_by_what_the_worker_does_and_by_what_the_kernel_sees(
    watchdog: Watchdog, start: Start, kind: str, doing: str, kernel: str
) -> None:
    victim = start(kind)

    hang = examined(watchdog, suspect_of(watchdog.look))

    assert (hang.worker_id, hang.pid) == (victim.name, victim.pid)
    assert hang.sentence.startswith(f"{doing} for ")
    # The machine that runs this may hide where its processes sleep.
    if procfs.wchan(victim.pid) or kind == "loop":
        assert kernel in hang.sentence
    assert hang.overdue.elapsed_s > hang.overdue.limit_s >= LIMITS.limit_s
    assert "hang_here" in hang.stack
    log = victim.log.read_text()
    assert f"craft: {kind} hangs: {hang.sentence}\n" in log
    assert hang.stack in log


def test_a_data_loader_process_that_is_stopped_is_named(watchdog: Watchdog, start: Start) -> None:
    victim = start("loader")
    suspect = suspect_of(watchdog.look)
    (child,) = procfs.children(victim.pid)
    os.kill(child, signal.SIGSTOP)
    until(lambda: procfs.state(child) == "T")

    hang = examined(watchdog, suspect)

    assert hang.sentence.endswith(f"; its child process {child} is stopped by a signal")
    assert f"its child process {child}:\nno Python stack: the process is stopped by a signal" in hang.stack


def test_a_kept_gil_is_told_from_a_sleep(watchdog: Watchdog, start: Start) -> None:
    start("gil")
    until(lambda: suspect_of(watchdog.look).overdue.elapsed_s > 1.2)

    assert "keeps the GIL" in examined(watchdog, suspect_of(watchdog.look)).sentence


def test_a_sleeper_does_not_keep_the_gil(watchdog: Watchdog, start: Start) -> None:
    start("sleep")
    until(lambda: suspect_of(watchdog.look).overdue.elapsed_s > 1.2)

    assert "GIL" not in examined(watchdog, suspect_of(watchdog.look)).sentence


def test_a_gil_kept_by_another_thread_during_the_exchange_is_found(watchdog: Watchdog, start: Start) -> None:
    start("gil_in_exchange")

    suspect = suspect_of(watchdog.look)
    hang = examined(watchdog, suspect)

    assert suspect.overdue.phase == "gil"
    assert hang.sentence.startswith("in the exchange of step 41, but one of its threads has kept the GIL for")
    assert "hang_here" in hang.stack


def test_a_stopped_process_is_found_at_once_and_described_by_the_kernel(watchdog: Watchdog, start: Start) -> None:
    victim = start("steps")
    until(lambda: watchdog.look() == () and watchdog.activities() and victim.stacks.exists())
    victim.stop()

    suspect = suspect_of(watchdog.look)
    hang = examined(watchdog, suspect)

    assert (suspect.overdue.phase, suspect.overdue.limit_s) == ("stopped", LIMITS.stop_limit_s)
    assert hang.view.state == "T"
    assert hang.sentence.startswith("stopped by a signal for ")
    assert hang.stack.startswith("no Python stack: the process is stopped by a signal")
    assert victim.stacks.read_text() == ""


def test_a_process_that_is_stopped_again_and_again_is_slow_and_not_stopped(
    watchdog: Watchdog, start: Start, clock: Clock
) -> None:
    """Whoever looks at it may find it stopped every time, though it gets on in between."""
    victim = start("loop")
    used: list[float] = []
    files = procfs.ProcessFiles(victim.pid)

    def ran() -> bool:
        glance = files.glance()
        return glance is not None and glance.cpu_s > used[-1]

    for _ in range(4):
        victim.stop()
        glance = files.glance()
        assert glance is not None
        used.append(glance.cpu_s)
        assert watchdog.look() == ()
        clock.ahead_s += LIMITS.stop_limit_s * 0.75
        victim.process.send_signal(signal.SIGCONT)
        until(ran)
    files.close()


def test_a_process_that_goes_on_after_a_stop_is_left_alone(watchdog: Watchdog, start: Start) -> None:
    victim = start("steps")
    victim.stop()
    suspect = suspect_of(watchdog.look)
    victim.process.send_signal(signal.SIGCONT)
    until(lambda: procfs.state(victim.pid) != "T")

    assert asyncio.run(watchdog.examine(suspect)) is None
    until(lambda: watchdog.look() == ())
    assert "got on after all" in victim.log.read_text()


def test_a_stop_before_the_first_word_is_noticed_too(watchdog: Watchdog, start: Start) -> None:
    victim = start("silent")
    until(lambda: victim.stacks.exists() and not victim.activity.exists())
    watchdog.remove(victim.name)
    victim.watched_by(watchdog)
    victim.stop()

    assert suspect_of(watchdog.look).overdue.words.endswith("while starting")


TRACER = """
import ctypes, os, signal, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
pid = int(sys.argv[1])
if ptrace(16, pid, 0, 0) != 0:
    sys.exit(ctypes.get_errno())
os.waitpid(pid, 0)
print("attached", flush=True)
sys.stdin.read()
"""


def test_a_process_under_a_debugger_is_never_overdue(start: Start, clock: Clock) -> None:
    victim = start("sleep")
    watchdog = Watchdog(HangLimits(limit_s=20.0), clock)
    victim.watched_by(watchdog)
    until(lambda: (doing := read(victim.activity)) is not None and doing.phase is Phase.COMPUTING)
    with subprocess.Popen(
        [sys.executable, "-c", TRACER, str(victim.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as tracer:
        assert tracer.stdin is not None and tracer.stdout is not None
        if not tracer.stdout.readline():
            pytest.skip(f"no tracing here: {os.strerror(tracer.wait())}")
        assert procfs.state(victim.pid) == "t"
        for _ in range(100):
            clock.ahead_s += 0.5
            assert watchdog.look() == ()
        tracer.stdin.close()
    until(lambda: procfs.state(victim.pid) == "S")
    # What it spent there does not count afterwards.
    assert watchdog.look() == ()
    watchdog.remove(victim.name)


def test_who_pauses_is_never_overdue(watchdog: Watchdog, start: Start, clock: Clock) -> None:
    victim = start("paused")
    until(lambda: (doing := read(victim.activity)) is not None and doing.phase is Phase.PAUSED)

    for _ in range(100):
        clock.ahead_s += 0.9
        assert watchdog.look() == ()
    assert watchdog.activities()[victim.name].words == "paused (evaluation)"


def test_who_waits_for_long_can_be_asked_for(watchdog: Watchdog, start: Start) -> None:
    start("waiting")

    def look() -> tuple[Suspect, ...]:
        watchdog.look()
        return watchdog.held_up()

    assert suspect_of(look).overdue.words.startswith("in the exchange of step 41 for ")


def test_time_in_which_the_agent_itself_did_not_run_counts_against_nobody(start: Start, clock: Clock) -> None:
    """The machine was asleep, or everything on it was stopped and went on."""
    victim = start("sleep")
    until(lambda: (doing := read(victim.activity)) is not None and doing.phase is Phase.COMPUTING)
    generous = Watchdog(HangLimits(limit_s=5.0), clock)
    victim.watched_by(generous)
    generous.look()
    generous.look()

    clock.ahead_s += 1000.0
    assert generous.look() == ()
    generous.look()

    for _ in range(100):
        clock.ahead_s += 0.1
        generous.look()
    assert [suspect.worker_id for suspect in generous.look()] == [victim.name]
    generous.remove(victim.name)


def test_the_dead_are_not_suspect_and_keep_no_file_open(watchdog: Watchdog, start: Start) -> None:
    before = len(os.listdir("/proc/self/fd"))
    victim = start("sleep")
    suspect = suspect_of(watchdog.look)
    victim.process.kill()
    until(lambda: procfs.state(victim.pid) in ("Z", ""))

    assert watchdog.look() == ()
    assert asyncio.run(watchdog.examine(suspect)) is None
    victim.process.wait()
    assert watchdog.look() == ()
    watchdog.remove(victim.name)
    assert len(os.listdir("/proc/self/fd")) == before
    victim.watched_by(watchdog)
    assert watchdog.activities() == {}


def view(state: str, main_cpu_s: float, other_cpu_s: float = 0.0, wchan: str = "") -> str:
    return KernelView(
        state=state, wchan=wchan, elapsed_s=12.0, main_cpu_s=main_cpu_s, other_cpu_s=other_cpu_s, num_threads=3
    ).words


def test_the_kernels_view_reads_well() -> None:
    assert view("S", 0.0, wchan="hrtimer_nanosleep") == "asleep in the kernel (hrtimer_nanosleep), no CPU used"
    assert view("R", 11.8) == "running, busy: 11.8 s of CPU used"
    assert view("S", 0.9) == "asleep in the kernel, 0.9 s of CPU used"
    assert view("S", 0.0, 10.5) == "asleep in the kernel, no CPU used; its other threads used 10.5 s"
    assert view("D", 0.0, wchan="nfs_wait").startswith(
        "in a wait of the kernel's that nothing can interrupt (nfs_wait)"
    )


def test_a_worker_of_whom_the_system_gives_no_view_for_a_while_is_watched_later(
    watchdog: Watchdog, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with failing(tmp_path / "switch", Rule("open", "EMFILE", path="/proc/*")):
        victim = start("sleep")
        assert watchdog.look() == () and watchdog.worker_ids == ()
    assert "is not watched for hangs yet: Too many open files" in caplog.text
    watchdog.look()
    assert tuple(watchdog.worker_ids) == (victim.name,)
