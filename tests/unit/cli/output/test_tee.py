"""Whose output ``craft run`` shows: the leader's, then the next leader's, each line once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from craft.cli.output.tee import LeaderOrder, Tee
from craft.protocol.generation_log import Entered
from craft.settings.run import TeeMode
from craft.settings.rundir import RunDir
from craft.worker.report.step_log import StepLog

_ENTERED = Entered(
    generation=0,
    time=0.0,
    told=0.0,
    aborted=None,
    met=0.0,
    entered=0.0,
    agreed=True,
    members=(),
    lost=(),
    joiners=(),
    idle=(),
    step=0,
    commits=False,
    retried=False,
    given=(),
    mine=(),
    dropped=(),
)


class Host:
    """The files of some workers, as these would write them."""

    def __init__(self, path: Path, mode: TeeMode, *, alone: bool = True) -> None:
        self.run_dir = RunDir(path).create()
        self.tee = Tee(self.run_dir, mode, alone=alone, colours=False)
        self.started: list[str] = []
        self.ended: set[str] = set()
        self.first_generation: int | None = None
        self.now = 0.0

    def start(self, *worker_ids: str) -> None:
        self.started += worker_ids
        for worker_id in worker_ids:
            self.run_dir.worker(worker_id).mkdir()

    def write(self, worker_id: str, text: str) -> None:
        with self.run_dir.log(worker_id).open("a") as file:
            file.write(text)

    def enter(self, generation: int, *members: str, leader: str | None = None) -> None:
        """All of them who are on this host enter a generation; ``leader``: after a loop."""
        self.first_generation = self.first_generation or generation
        for worker_id in set(members) & set(self.started):
            entered = msgspec.structs.replace(_ENTERED, generation=generation, members=members, leader=leader)
            StepLog(self.run_dir.path, worker_id).entered(entered)

    def shown(self, *, final: bool = False) -> list[str]:
        self.now += 0.1
        crowd = LeaderOrder(
            started=tuple(self.started), ended=frozenset(self.ended), first_generation=self.first_generation
        )
        return self.tee.new_lines(crowd, self.now, final=final)


def test_the_leader_is_shown_from_its_first_line_on(tmp_path: Path) -> None:
    host = Host(tmp_path / "run", "leader")
    host.start("w0", "w1")
    host.write("w0", "loading\n")
    host.write("w1", "loading\n")
    assert host.shown() == ["[w0] loading"]
    host.enter(1, "w0", "w1")
    host.write("w0", "step 1\n")
    assert host.shown() == ["[w0] step 1"]


def test_the_next_leader_goes_on_where_it_became_the_leader(tmp_path: Path) -> None:
    host = Host(tmp_path / "run", "leader")
    host.start("w0", "w1", "w2")
    host.enter(1, "w0", "w1", "w2")
    host.write("w0", "step 1\n")
    host.write("w1", "step 1\n")
    assert host.shown() == ["[w0] step 1"]
    # All of this between two looks.
    host.write("w0", "last words\nTraceback")
    host.ended.add("w0")
    host.enter(2, "w1", "w2")
    host.write("w1", "step 2\n")
    host.ended.add("w1")
    host.enter(3, "w2")
    host.write("w2", "step 3\n")
    assert host.shown() == ["[w0] last words", "[w0] Traceback", "[w1] step 2", "[w2] step 3"]
    host.write("w2", "after the loop")
    assert host.shown() == [] and host.shown(final=True) == ["[w2] after the loop"]


def test_after_the_loop_the_replacement_of_the_leader_is_shown(tmp_path: Path) -> None:
    """The members there keep their ranks, and the newcomer takes that of the lost leader."""
    host = Host(tmp_path / "run", "leader")
    host.start("w0", "w1")
    host.enter(1, "w0", "w1")
    host.write("w0", "saving\n")
    assert host.shown() == ["[w0] saving"]
    host.ended.add("w0")
    host.start("w2")
    host.write("w2", "loading\n")
    host.enter(2, "w1", "w2", leader="w2")
    host.write("w2", "saving\n")
    host.write("w1", "waiting\n")
    assert host.shown() == ["[w2] saving"]


def test_a_lost_leader_is_shown_to_its_end_before_there_is_another(tmp_path: Path) -> None:
    host = Host(tmp_path / "run", "leader")
    host.start("w0", "w1")
    host.enter(1, "w0", "w1")
    host.write("w0", "half a li")
    assert host.shown() == []
    host.ended.add("w0")
    assert host.shown() == ["[w0] half a li"]


def test_the_first_leader_may_be_another_worker_than_the_first(tmp_path: Path) -> None:
    host = Host(tmp_path / "run", "leader")
    host.start("w0", "w1")
    host.write("w0", "loading\n")
    host.write("w1", "loading\nthe model has 5 parameters\n")
    assert host.shown() == ["[w0] loading"]
    host.ended.add("w0")
    host.enter(1, "w1")
    assert host.shown() == ["[w1] loading", "[w1] the model has 5 parameters"]


def test_a_host_without_the_leader_shows_nothing_until_it_has_the_leader(tmp_path: Path) -> None:
    host = Host(tmp_path / "run", "leader", alone=False)
    host.start("b-w0", "b-w1")
    host.write("b-w0", "loading\n")
    host.enter(1, "a-w0", "b-w0", "b-w1")
    assert host.shown() == []
    host.enter(2, "b-w0", "b-w1")
    host.write("b-w0", "step 2\n")
    assert host.shown() == ["[b-w0] step 2"]


@pytest.mark.parametrize(("mode", "shown"), [("all", ["[w0] a", "[w1] b", "[w2] c"]), ("none", [])])
def test_all_workers_or_none(tmp_path: Path, mode: TeeMode, shown: list[str]) -> None:
    host = Host(tmp_path / "run", mode)
    host.start("w0", "w1")
    host.write("w0", "a\n")
    host.write("w1", "b")
    host.ended.add("w1")
    host.enter(1, "w0", "w1")
    host.start("w2")
    host.write("w2", "c\n")
    assert host.shown() == shown
    assert host.shown(final=True) == []
