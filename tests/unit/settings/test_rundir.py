from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.small_disk import fill, mounted

from craft.protocol.errors import ConfigError
from craft.settings.files.private_files import write_private
from craft.settings.rundir import HeldRunDir, RunDir, claim_new, find_run


def test_a_run_directory_is_private(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "deep" / "run").create()
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.create() == run
    assert run.steps("w0").parent == run.log("w0").parent == run.worker("w0")


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the run directory"):
        RunDir(tmp_path / "file" / "run").create()


def test_the_newest_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("craft-run-b", "craft-run-a", "other")):
        address = RunDir(tmp_path / name).create().address
        address.write_text("http://x:1\n")
        os.utime(address, (1000 + age, 1000 + age))
    assert find_run().path.name == "craft-run-a"
    assert find_run().read_address() == "http://x:1"
    assert find_run(tmp_path / "other").path == tmp_path / "other"


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        write_private(disk / "address", b"old")
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            write_private(disk / "address", b"new")
        assert (disk / "address").read_bytes() == b"old"
        assert {path.name for path in disk.iterdir()} == {"address", "filler"}


def test_without_a_run_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="craft run"):
        find_run()
    with pytest.raises(ConfigError, match="no run directory"):
        find_run(tmp_path / "gone")
    with pytest.raises(ConfigError, match="names no lighthouse"):
        RunDir(tmp_path).read_address()


def test_a_private_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_jobs_of_the_same_second_have_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({claim_new().path for _ in range(5)}) == len(list(tmp_path.glob("craft-run-*"))) == 5


def test_what_a_killed_process_of_the_same_id_left_half_written_is_not_in_the_file(tmp_path: Path) -> None:
    (tmp_path / f".address.{os.getpid()}").write_bytes(b"http://127.0.0.1:65535 and more")
    write_private(tmp_path / "address", b"short\n")
    assert (tmp_path / "address").read_bytes() == b"short\n"


def test_a_run_directory_that_is_taken_away_or_replaced_is_noticed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").create()
    held = HeldRunDir(run)
    assert held.trouble() == ""
    run.path.rename(tmp_path / "elsewhere")
    assert held.trouble() == f"the run directory {run.path} was removed or moved away while the job ran"
    run.create()
    assert held.trouble() == f"the run directory {run.path} was replaced by another one while the job ran"
    shutil.rmtree(run.path)
    (tmp_path / "elsewhere").rename(run.path)
    assert held.trouble() == ""
    # Also where the number of the one that was removed could be used again.
    shutil.rmtree(run.path)
    run.create()
    assert "replaced" in held.trouble()
