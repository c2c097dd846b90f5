"""Each durable writer, with each of its system calls failing once: what is read is old or new, and never half of either."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.system_calls import Rule, each_failure, failing

from craft.control.core.persistence import Durable
from craft.control.core.persistence_file import DurableFile
from craft.protocol.errors import ConfigError, SnapshotError
from craft.protocol.membership import Generation, Member
from craft.settings.files.effective_file import undamaged, write_sealed
from craft.settings.files.private_files import read_private, write_private
from craft.settings.rundir import RunDir
from craft.snapshots.store.local import LocalStore
from craft.telemetry.explain import bundle
from craft.telemetry.records.journal import Journal, read_lines
from craft.telemetry.records.journal_reader import damaged_file, quarantine, read_journal
from craft.telemetry.records.metric_lines import read_metrics
from craft.wire.auth import ensure_token, read_token
from craft.worker.report.step_log import Committed, StepLog

ERRORS = ["ENOSPC", "EIO", "EMFILE", "EDQUOT", "EROFS"]
OLD = Durable(generation=Generation(number=4, nonce="x", members=(Member(worker_id="w0", host="a"),)), highest=6)
NEW = replace(OLD, highest=7)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


@pytest.fixture
def switch(tmp_path: Path) -> Path:
    return tmp_path / "switch"


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("error", ERRORS)
def test_generation_json_is_the_old_one_or_the_new_one(run: RunDir, switch: Path, error: str) -> None:
    file = DurableFile(run.generation)
    file.save(OLD)
    for raised in each_failure(switch, lambda: file.save(NEW), error, f"{run.path}*"):
        assert raised is None or isinstance(raised, OSError)
        assert DurableFile(run.generation).load() in ((NEW,) if raised is None else (OLD, NEW))
        file.save(OLD)
        assert DurableFile(run.generation).load() == OLD


def test_generation_json_is_read_from_its_other_copy_where_one_cannot_be(run: RunDir, switch: Path) -> None:
    DurableFile(run.generation).save(NEW)
    found: list[Durable | None] = []
    for raised in each_failure(switch, lambda: found.append(DurableFile(run.generation).load()), "EIO", f"{run.path}*"):
        assert raised is None
    assert set(found) == {NEW}


@pytest.mark.parametrize("error", ERRORS)
def test_small_files_are_the_old_ones_or_the_new_ones(run: RunDir, switch: Path, error: str) -> None:
    write_private(run.address, b"old")
    for raised in each_failure(switch, lambda: write_private(run.address, b"new"), error, f"{run.path}*"):
        assert isinstance(raised, OSError)
        assert read_private(run.address) in (b"old", b"new")
        assert sorted(path.name for path in run.path.iterdir()) == ["address", "workers"], "nothing is left behind"
        write_private(run.address, b"old")


@pytest.mark.parametrize("error", ERRORS)
def test_settings_are_the_old_ones_or_the_new_ones(run: RunDir, switch: Path, error: str) -> None:
    write_sealed(run.config, "a = 1\n")
    for raised in each_failure(switch, lambda: write_sealed(run.config, "a = 2\n"), error, f"{run.path}*"):
        assert isinstance(raised, ConfigError) and "config.toml" in str(raised)
        assert undamaged(run.config).read_text().startswith(("a = 1\n", "a = 2\n"))
        write_sealed(run.config, "a = 1\n")


@pytest.mark.parametrize("error", ERRORS)
def test_a_token_is_made_whole_or_not_at_all(run: RunDir, switch: Path, error: str) -> None:
    for raised in each_failure(switch, lambda: ensure_token(run.token, named=False), error, f"{run.path}*"):
        assert isinstance(raised, ConfigError) and "token file" in str(raised)
        assert not run.token.exists() or len(read_token(run.token, named=False)) > 40
        run.token.unlink(missing_ok=True)


def test_short_writes_change_nothing(run: RunDir, switch: Path) -> None:
    file = DurableFile(run.generation)
    with failing(switch, Rule("write", short=True, path=f"{run.path}*")):
        file.save(NEW)
        write_sealed(run.config, "a = 1\n")
        token = ensure_token(run.token, named=False)
        journal = Journal(run.journal)
        for number in range(3):
            journal.write("event", {"event": "X", "number": number})
        journal.close()
        LocalStore(run.path / "store").put("manifests/a.json", b"x" * 1000)
    assert DurableFile(run.generation).load() == NEW
    assert undamaged(run.config) == run.config
    assert read_token(run.token, named=False) == token
    assert [line["number"] for line in read_journal(run.journal)] == [0, 1, 2]
    assert LocalStore(run.path / "store").get("manifests/a.json") == b"x" * 1000


@pytest.mark.parametrize("error", ERRORS)
def test_a_journal_misses_no_line_once_it_can_be_written(
    run: RunDir, switch: Path, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        run.journal.unlink(missing_ok=True)
        journal = Journal(run.journal)
        for number in range(3):
            journal.write("event", {"event": "X", "number": number})
        journal.close()

    for raised in each_failure(switch, work, error, f"{run.path}*"):
        assert raised is None
        numbers = [line["number"] for line in read_journal(run.journal)]
        assert numbers == [0, 1, 2] or (numbers == [0, 1] and "cannot be written" in words(caplog)[-1])


def commit(chronicle: StepLog, step: int) -> None:
    plan: tuple[str | None, ...] = ("w0", "w0")
    metrics = {"loss": step / 2}
    chronicle.committed(Committed(step=step, branch=0, generation=1, members=("w0",), plan=plan, metrics=metrics))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("short", [False, True])
def test_records_of_a_worker_wait_and_the_trouble_is_said_once(
    run: RunDir, switch: Path, error: str, short: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    chronicle = StepLog(run.path, "w0", told.append)
    commit(chronicle, 0)
    bad = [Rule("write", error, path="*.jsonl", after=int(short))]
    with failing(switch, *([Rule("write", path="*.jsonl", short=True, times=1)] if short else []), *bad) as control:
        for step in range(1, 10):
            commit(chronicle, step)
        assert control.struck("write")
    assert len(told) == 1 and len(words(caplog)) == 2, "one for each file"
    commit(chronicle, 10)
    chronicle.complete()
    assert len(told) == 2 and told[-1] == ""
    for path in (run.metrics, run.steps("w0")):
        assert [line["step"] for line in read_lines(path)] == list(range(11)), path


def test_a_step_does_not_take_as_long_as_a_slow_disk_and_that_is_said_P4(run: RunDir, switch: Path) -> None:
    told: list[str] = []
    chronicle = StepLog(run.path, "w0", told.append)
    commit(chronicle, 0)
    longest = 0.0
    with failing(switch, Rule("write", delay_s=2.0, path="*.jsonl")) as control:
        for step in range(1, 80):
            began = time.monotonic()
            commit(chronicle, step)
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.1)
        assert control.struck("write")
    assert longest < 1.9
    assert told == [f"{run.path} cannot be written: its disk has taken nothing for 5 s"]
    chronicle.complete()
    assert told[1:] == [""]
    for path in (run.metrics, run.steps("w0")):
        assert [line["step"] for line in read_lines(path)] == list(range(80)), path


@pytest.mark.parametrize("last", [b"7", b"[1]", b'{"time": 1.0}', b'{"step": "x"}', b'{"step":9000,"checksum":"00"}'])
def test_a_damaged_last_line_of_metrics_misleads_no_leader(run: RunDir, last: bytes) -> None:
    lost = StepLog(run.path, "w0")
    commit(lost, 0)
    lost.flush()
    with run.metrics.open("ab") as file:
        file.write(last + b"\n")
    heir = StepLog(run.path, "w0")
    commit(heir, 1)
    heir.complete()
    assert [line["step"] for line in read_metrics(run.metrics)] == [0, 1]


def test_damaged_lines_of_a_journal_are_kept_under_short_writes(run: RunDir, switch: Path) -> None:
    run.journal.write_bytes(b'{"time": 1.0, "kind": "even\n' + b'{"rubbish": 1}\n')
    damaged = run.journal.read_bytes()
    with failing(switch, Rule("write", short=True, path=f"{run.path}*")):
        assert quarantine(run.journal) == 2
    assert damaged_file(run.journal).read_bytes() == damaged
    assert run.journal.read_bytes().split() == []


@pytest.mark.parametrize("error", ERRORS)
def test_a_bundle_without_a_summary_is_none(run: RunDir, switch: Path, error: str) -> None:
    def write() -> Path:
        return bundle.write(run.diagnosis / "a", "a title", ())

    for raised in each_failure(switch, write, error, f"{run.path}*"):
        assert isinstance(raised, OSError)
        assert (
            not (run.diagnosis / "a" / "summary.txt").exists()
            or "a title" in write().joinpath("summary.txt").read_text()
        )
        (run.diagnosis / "a" / "summary.txt").unlink(missing_ok=True)


@pytest.mark.parametrize("error", ERRORS)
def test_a_store_has_a_file_whole_or_not_at_all(tmp_path: Path, switch: Path, error: str) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("manifests/b.json", b"")
    for raised in each_failure(switch, lambda: store.put("manifests/a.json", b"x" * 1000), error, f"{tmp_path}/store*"):
        assert isinstance(raised, SnapshotError) and "store/" in str(raised)
        assert not (tmp_path / "store/manifests/a.json").exists() or store.get("manifests/a.json") == b"x" * 1000
        assert list((tmp_path / "store/unfinished").iterdir()) == []
        (tmp_path / "store/manifests/a.json").unlink(missing_ok=True)
