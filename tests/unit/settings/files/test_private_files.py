from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.users import STRANGER, as_user, needs_root, reachable_folder

from craft.protocol.errors import ConfigError
from craft.settings.files.private_files import (
    append_private,
    make_folder,
    open_private,
    read_private,
    write_over,
    write_private,
)
from craft.settings.rundir import RunDir, claim, find_run
from craft.telemetry.explain import bundle
from craft.telemetry.records.jsonl_file import JsonlFile
from craft.wire.auth import ensure_token, make_token, read_token
from craft.wire.client import Client


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: everybody writes to it, and removes only what is theirs."""
    with reachable_folder(0o1777) as folder:
        yield folder


def _no_secret(folder: Path) -> bool:
    return not any(path.is_file() and path.stat().st_uid == os.geteuid() for path in folder.rglob("*"))


@needs_root
def test_a_run_directory_that_another_user_made_is_refused(shared: Path) -> None:
    def plant() -> None:
        (shared / "run").mkdir(mode=0o777)
        (shared / "run").chmod(0o777)
        (shared / "run" / "token").write_text(make_token())

    as_user(STRANGER, plant)
    for take in (claim, lambda path: RunDir(path).create()):
        with pytest.raises(ConfigError, match=rf"belongs to user {STRANGER}, and you are root .user 0.\. .* --dir"):
            take(shared / "run")
    assert _no_secret(shared)


@needs_root
def test_a_run_directory_of_root_is_refused_to_another_user(shared: Path) -> None:
    (shared / "run").mkdir()
    (shared / "run").chmod(0o777)

    def take() -> None:
        with pytest.raises(ConfigError, match=rf"belongs to root .user 0., and you are user {STRANGER}"):
            claim(shared / "run")
        claim(shared / "own")
        claim(shared / "own")
        assert (shared / "own").stat().st_mode & 0o7777 == 0o700

    as_user(STRANGER, take)


@needs_root
def test_a_link_that_another_user_put_in_the_place_of_the_run_directory_is_refused(
    shared: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    as_user(STRANGER, lambda: (shared / "run").symlink_to(home))
    with pytest.raises(ConfigError, match=rf"a link that user {STRANGER} made"):
        claim(shared / "run")
    assert not list(home.iterdir())
    assert home.stat().st_mode & 0o777 == 0o755


def test_a_link_of_ones_own_to_a_run_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run = claim(tmp_path / "run")
    ensure_token(run.token, named=False)
    assert (tmp_path / "disk" / "token").exists()


@pytest.mark.parametrize("mode", [0o770, 0o722, 0o1777])
def test_a_run_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(
        ConfigError, match=f"mode {mode:04o} lets other users write to it.*does not exist yet with --dir"
    ):
        claim(tmp_path / "run")


@pytest.mark.parametrize("inside", ["run", "run/workers"])
def test_a_run_directory_that_others_can_read_is_closed_to_them(
    tmp_path: Path, inside: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / inside).mkdir(exist_ok=True)
    (tmp_path / inside).chmod(0o755)
    with caplog.at_level(logging.WARNING):
        run = claim(tmp_path / "run")
    assert {path.stat().st_mode & 0o777 for path in (run.path, run.path / "workers")} == {0o700}
    assert ("had mode 0755, and has mode 0700 now" in caplog.text) == (inside == "run")


_WRITERS: dict[str, Callable[[Path], object]] = {
    "append": append_private,
    "over": lambda path: write_over(path, b"x"),
    "record": lambda path: _add(JsonlFile(path)),
}


def _add(record: JsonlFile) -> None:
    record.add(b"x")
    record.close()
    if record.trouble:
        raise OSError(1, record.trouble)


@pytest.mark.parametrize("write", _WRITERS.values(), ids=_WRITERS)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_what_was_planted_under_the_name_of_a_file_is_not_written_to(
    tmp_path: Path, write: Callable[[Path], object], kind: str
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "run" / "journal.jsonl"
    path.parent.mkdir(mode=0o700)
    if kind == "link":
        victim.write_text("precious")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    with pytest.raises(OSError, match=r"it is a link|not a plain file|No such device"):
        write(path)
    assert (victim.read_text() if victim.exists() else "") == ("precious" if kind == "link" else "")


def test_a_file_that_is_replaced_takes_the_place_of_a_link_and_leaves_what_it_names_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for place in (tmp_path / "address", tmp_path / f".address.{os.getpid()}"):
        place.symlink_to(victim)
    write_private(tmp_path / "address", b"new")
    assert (victim.read_text(), (tmp_path / "address").read_bytes()) == ("precious", b"new")
    assert not (tmp_path / "address").is_symlink()


def test_the_files_of_a_bundle_follow_no_links(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    folder.mkdir()
    for name in ("summary.txt", ".summary.txt.part"):
        (folder / name).symlink_to(victim)
    bundle.write(folder, "title", ())
    assert victim.read_text() == "precious"
    assert (folder / "summary.txt").read_text().startswith("title")


@needs_root
def test_a_file_that_another_user_left_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "run" / "token"
    path.parent.mkdir(mode=0o700)
    path.write_text(make_token())
    path.chmod(0o666)
    os.chown(path, STRANGER, STRANGER)
    for use in (read_private, append_private, lambda path: read_token(path, named=False), read_token):
        with pytest.raises((OSError, ConfigError), match=f"belongs to user {STRANGER}"):
            use(path)


@needs_root
def test_a_folder_that_took_the_place_of_the_run_directory_gets_no_secret(shared: Path) -> None:
    run = claim(shared / "run")
    run.path.rename(shared / "moved")

    def plant() -> None:
        (shared / "run").mkdir(mode=0o777)
        (shared / "run").chmod(0o777)

    as_user(STRANGER, plant)
    with pytest.raises(ConfigError, match="cannot write the token file"):
        ensure_token(run.token, named=False)
    with pytest.raises(OSError, match="belongs to"):
        open_private(run.lock, os.O_RDWR | os.O_CREAT)
    assert _no_secret(shared / "run")


@needs_root
def test_the_commands_do_not_send_a_token_where_another_users_directory_says(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = shared / "own-token"
    ensure_token(secret)

    def plant() -> None:
        run = shared / "craft-run-99999999-999999"
        run.mkdir(mode=0o755)
        (run / "address").write_text("http://127.0.0.1:9")
        (run / "token").symlink_to(secret)

    as_user(STRANGER, plant)
    with pytest.raises(ConfigError, match=f"cannot be trusted: it belongs to user {STRANGER}"):
        Client.of_run(find_run(shared / "craft-run-99999999-999999"))
    monkeypatch.chdir(shared)
    with pytest.raises(ConfigError, match="no run directory here"):
        find_run()
    own = claim(shared / "craft-run-1")
    assert find_run().path.resolve() == own.path.resolve()


def test_the_token_of_a_run_directory_is_not_read_through_a_link(tmp_path: Path) -> None:
    run = claim(tmp_path / "run")
    ensure_token(tmp_path / "elsewhere")
    run.token.symlink_to(tmp_path / "elsewhere")
    write_private(run.address, b"http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="it is a link"):
        Client.of_run(run)


@needs_root
def test_a_token_that_another_user_put_where_one_is_to_be_made_is_refused(shared: Path) -> None:
    as_user(STRANGER, lambda: (shared / "token").write_text(make_token()))
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}, who knows it"):
        ensure_token(shared / "token")


def test_a_token_file_that_others_can_change_is_refused_and_one_behind_a_link_is_not(tmp_path: Path) -> None:
    token = ensure_token(tmp_path / "..data")
    (tmp_path / "token").symlink_to("..data")
    assert read_token(tmp_path / "token") == token
    (tmp_path / "..data").chmod(0o620)
    with pytest.raises(ConfigError, match="mode 0620 lets other users change it"):
        read_token(tmp_path / "token")


def test_a_folder_that_is_made_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert make_folder(tmp_path / "run") == 0o700
        os.close(append_private(tmp_path / "run" / "log"))
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("run", "run/log")] == [0o700, 0o600]
