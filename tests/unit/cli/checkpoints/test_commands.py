"""``craft checkpoints`` on real stores in directories: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from tests.unit.snapshots.scene import crew, flip

from craft.cli.checkpoints.tables import age
from craft.cli.main import main
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.suspect import Suspicion, mark
from craft.snapshots.store.manifest import Manifest, chunk_path
from craft.snapshots.store.tiers import open_tiers

COMMANDS = ("ls", "verify", "gc", "rm", "diff", "export")


def craft(*args: str | Path) -> tuple[int, str]:
    """Exit code, and what was printed anywhere."""
    done = CliRunner().invoke(main, ["checkpoints", *map(str, args)], prog_name="craft")
    return done.exit_code, done.output


def newest_first(store: Path) -> list[Manifest]:
    return candidates(open_tiers(str(store)))


def only_in_newest(store: Path) -> Path:
    """A chunk that no other checkpoint has."""
    newest, *others = newest_first(store)
    shared = {ref.hash for manifest in others for ref in manifest.chunks}
    return next(store / chunk_path(ref.hash) for ref in newest.chunks if ref.hash not in shared)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Holds steps 10 (with a tag), 20 and 30."""
    with crew(tmp_path / "store", num_members=2, keep=9) as members:
        members.save(10, tag="best")
        members.save(20, 30)
    return tmp_path / "store"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, to be in."""
    before, place = Path.cwd(), tmp_path / "elsewhere"
    place.mkdir()
    os.chdir(place)
    yield place
    os.chdir(before)


def test_ls_says_what_there_is_newest_first(store: Path) -> None:
    code, text = craft("ls", store)
    head, columns, *rows = text.splitlines()
    assert code == 0 and head == f"3 checkpoints in {store}"
    assert columns.split() == ["name", "step", "branch", "tag", "taken", "size", "new", "kind"]
    assert [row.split()[1] for row in rows] == ["30", "20", "10"]
    assert [row.split()[3] for row in rows] == ["-", "-", "best"]
    assert all(row.endswith("job") for row in rows)


def test_ls_as_json_has_every_field_of_the_manifest_but_its_chunks(store: Path) -> None:
    code, text = craft("ls", store, "--json")
    records = json.loads(text)
    assert code == 0 and [record["step"] for record in records] == [30, 20, 10]
    newest = newest_first(store)[0]
    assert records[0] == {
        "kind": "job",
        "name": newest.name,
        "branch": 0,
        "step": 30,
        "generation": 1,
        "time": newest.time,
        "tag": None,
        "total_bytes": newest.total_bytes,
        "new_bytes": newest.new_bytes,
        "chunks": len(newest.chunks),
        "suspect": None,
    }


@pytest.mark.parametrize("command", [("ls",), ("verify",), ("gc",), ("diff",)])
def test_a_place_that_holds_no_checkpoints_says_so_and_stays_as_it_is(command: tuple[str], tmp_path: Path) -> None:
    words = ("1", "2") if command == ("diff",) else ()
    for place in (tmp_path, tmp_path / "nothing"):
        code, text = craft(*command, place, *words)
        assert code == 2 and f"craft: {place} holds no checkpoints: give the URL that the job writes to" in text
    assert not list(tmp_path.iterdir())


def test_a_url_of_an_unknown_kind_is_bad_input(elsewhere: Path) -> None:
    code, text = craft("ls", "nonsense://x")
    assert code == 2 and "nonsense" in text


def test_without_a_url_it_is_that_of_the_newest_run(store: Path, elsewhere: Path) -> None:
    assert craft("ls")[0] == 2
    run = elsewhere / "craft-run-1"
    run.mkdir()
    (run / "config.toml").write_text('[run]\nscript = "train.py"  # flag\n')
    code, text = craft("ls")
    assert code == 2 and "has written no checkpoints: give their URL" in text
    (run / "config.toml").write_text(f'[run]\ncheckpoints = "{store}"  # flag\n')
    assert craft("ls") == craft("ls", store)
    assert craft("verify", "20") == craft("verify", store, "20")
    assert craft("diff", "10", "20") == craft("diff", store, "10", "20")


def test_without_a_url_it_may_be_that_of_the_script_of_a_run(store: Path, elsewhere: Path) -> None:
    run = elsewhere / "craft-run-1"
    run.mkdir()
    (run / "config.toml").write_text("[run]\n")
    written = {"name": "0000-000000000010-x", "branch": 0, "step": 10, "url": str(store)}
    line = {"time": 1.0, "kind": "event", "event": "CheckpointWritten", **written}
    (run / "journal.jsonl").write_text(json.dumps(line) + "\n")
    assert craft("ls", "--dir", run) == craft("ls", store)


def test_checkpoints_that_may_hold_wrong_bits_are_shown_and_not_exported_unless_named(
    store: Path, elsewhere: Path
) -> None:
    mark([open_tiers(str(store)).durable], Suspicion(branch=0, after=20, step=33, reason="a bit flipped"))
    code, text = craft("ls", store)
    assert code == 0 and [line.endswith("job, suspect") for line in text.splitlines()[2:5]] == [True, False, False]
    assert "in step 33 bits differed between workers; the whole state was last known to be the same" in text
    code, text = craft("ls", store, "--json")
    assert [bool(each["suspect"]) for each in json.loads(text)] == [True, False, False]
    code, text = craft("verify", store)
    assert code == 1 and "it may hold wrong bits" in text
    assert craft("verify", store, "20")[0] == 0
    assert craft("export", store, "--format", "torch", "newest.pt")[0] == 0
    assert torch.load("newest.pt")["step"] == 20
    code, text = craft("export", store, "30", "--format", "torch", "named.pt")
    assert code == 0 and "warning: " in text and torch.load("named.pt")["step"] == 30


class Vanishing(MemoryFileSystem):  # type: ignore[misc]
    """A store that loses a checkpoint to a garbage collection when a chunk is read that no other one has."""

    protocol = "vanishing"
    going: tuple[str, frozenset[str]] = ("", frozenset())
    """Its name, and such chunks."""

    def cat_file(self, path: str, *args: Any, **settings: Any) -> bytes:
        root, _, chunk = path.partition("/chunks/")
        name, own = Vanishing.going
        if chunk[3:] in own:
            Vanishing.going = ("", frozenset())
            self.rm_file(f"{root}/manifests/{name}.json")
            self.rm_file(path)
        return bytes(super().cat_file(path, *args, **settings))


@pytest.fixture
def vanishing(tmp_path: Path) -> str:
    """Holds steps 10, 20 and 30, the last of which goes when something is read."""
    fsspec.register_implementation("vanishing", Vanishing, clobber=True)
    url = f"vanishing://{tmp_path.name}"
    with crew(url, num_members=1, keep=9) as members:
        members.save(10, 20, 30)
    newest, *others = candidates(members.tiers)
    shared = {ref.hash for manifest in others for ref in manifest.chunks}
    Vanishing.going = (newest.name, frozenset(ref.hash for ref in newest.chunks) - shared)
    return url


def test_verify_takes_it_that_one_is_removed_meanwhile(vanishing: str) -> None:
    code, text = craft("verify", vanishing, "--json")
    found = json.loads(text)
    assert (code, found["verified"], found["problems"], len(found["removed"])) == (0, 2, [], 1)


def test_export_takes_the_next_one_where_the_newest_is_removed_meanwhile(vanishing: str, elsewhere: Path) -> None:
    code, text = craft("export", vanishing, "--format", "torch", "out.pt")
    assert code == 0 and "was removed while it was read" in text, text
    assert torch.load("out.pt")["step"] == 20


def test_one_that_is_named_and_removed_meanwhile_is_said_to_be_gone(vanishing: str, elsewhere: Path) -> None:
    code, text = craft("export", vanishing, "30", "--format", "torch", "out.pt")
    assert code == 2 and "was removed while it was read" in text and "holds no checkpoint 30" in text, text


def test_verify_reads_all_of_them_or_one(store: Path) -> None:
    code, text = craft("verify", store)
    assert code == 0 and len(text.splitlines()) == 3 and "are as they were written" in text
    for which in ("10", "best", newest_first(store)[-1].name):
        code, text = craft("verify", store, which)
        assert code == 0 and text.startswith(newest_first(store)[-1].name) and len(text.splitlines()) == 1
    assert craft("verify", store, "11") == (
        2,
        f"craft: {store} holds no checkpoint 11: it has those of steps 30, 20, 10; give a step or a name\n",
    )


def test_a_flipped_bit_is_found_with_its_file_and_its_tensor(store: Path) -> None:
    damaged = only_in_newest(store)
    flip(damaged, damaged.stat().st_size // 2)
    code, text = craft("verify", store)
    (problem,) = [line for line in text.splitlines() if "as they were written" not in line]
    assert code == 1 and str(damaged) in problem and "model." in problem
    assert craft("verify", store, "20")[0] == 0
    code, text = craft("verify", store, "30", "--json")
    assert code == 1 and json.loads(text)["problems"] == [problem]


def test_a_missing_chunk_and_a_damaged_manifest_are_found(store: Path) -> None:
    newest, second, _ = newest_first(store)
    flip(store / "manifests" / f"{second.name}.json", 30)
    only_in_newest(store).unlink()
    code, text = craft("verify", store)
    assert code == 1
    assert any(newest.name in line and "there is no" in line for line in text.splitlines())
    assert any(f"{second.name}.json is damaged" in line for line in text.splitlines())
    code, text = craft("ls", store)
    assert code == 0 and text.startswith("2 checkpoints") and f"craft: {store}/manifests/{second.name}.json" in text


def test_on_a_terminal_verify_shows_how_far_it_is(store: Path) -> None:
    ours, theirs = pty.openpty()
    command = (sys.executable, "-m", "craft.cli.main", "checkpoints", "verify", str(store))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        command, stderr=theirs, stdout=subprocess.PIPE, text=True, env=environment, timeout=60, check=True
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "reading" in shown and len(done.stdout.splitlines()) == 3


def test_gc_says_what_goes_and_then_removes_it_and_nothing_else(store: Path) -> None:
    names = [manifest.name for manifest in newest_first(store)]
    files = sorted(store.rglob("*"))
    code, text = craft("gc", store, "--keep", "1", "--dry-run")
    assert code == 0 and f"checkpoint {names[1]} would be removed" in text and "would be removed, " in text
    assert sorted(store.rglob("*")) == files
    code, text = craft("gc", store, "--keep", "1")
    assert code == 0 and f"checkpoint {names[1]} removed" in text
    # The one with a tag stays.
    assert [manifest.name for manifest in newest_first(store)] == [names[0], names[2]]
    assert craft("verify", store)[0] == 0
    assert craft("gc", store, "--keep", "1")[1] == "0 chunks removed, 0 bytes\n"


def test_gc_without_a_number_keeps_every_checkpoint_and_removes_what_none_needs(store: Path) -> None:
    garbage = store / chunk_path("ab" * 32)
    garbage.parent.mkdir(exist_ok=True)
    garbage.write_bytes(b"x" * 1000)
    code, text = craft("gc", store, "--json")
    assert code == 0 and not garbage.exists()
    found = json.loads(text)
    assert found["manifests"] == [] and found["freed_bytes"] == 1000
    assert len(newest_first(store)) == 3


def test_gc_refuses_while_somebody_writes(store: Path) -> None:
    with open_tiers(str(store)).durable.writing("w0"):
        code, text = craft("gc", store)
    assert code == 1 and "another process writes a checkpoint or collects garbage; try again later" in text


def test_rm_removes_what_is_named_by_step_or_tag_and_what_only_that_needs(store: Path) -> None:
    newest, second, tagged = newest_first(store)
    files = sorted(store.rglob("*"))
    code, text = craft("rm", store, "best", "30", "--dry-run")
    assert code == 0 and f"checkpoint {tagged.name} would be removed" in text
    assert sorted(store.rglob("*")) == files
    code, text = craft("rm", store, "best", "30", "--json")
    found = json.loads(text)
    assert code == 0 and set(found["manifests"]) == {tagged.name, newest.name} and found["freed_bytes"] > 0
    assert [manifest.name for manifest in newest_first(store)] == [second.name]
    # What the one that is left shares with the others is still there, and nothing else is.
    assert craft("verify", store)[0] == 0
    assert craft("gc", store)[1] == "0 chunks removed, 0 bytes\n"
    code, text = craft("rm", store, second.name)
    assert code == 0 and f"checkpoint {second.name} removed" in text and not list(store.glob("chunks/*/*"))


def test_rm_removes_nothing_if_one_of_several_is_not_there(store: Path) -> None:
    code, text = craft("rm", store, "20", "worst")
    assert code == 2 and "holds no checkpoint worst" in text
    assert len(newest_first(store)) == 3
    assert craft("rm", store)[0] == 2 and "say which ones" in craft("rm")[1]


def test_rm_refuses_while_somebody_writes(store: Path) -> None:
    with open_tiers(str(store)).durable.writing("w0"):
        code, text = craft("rm", store, "20")
    assert code == 1 and "another process writes" in text and len(newest_first(store)) == 3


def test_diff_names_the_tensors_that_differ_and_what_is_shared(store: Path) -> None:
    code, text = craft("diff", store, "20", "30")
    lines = text.splitlines()
    assert code == 0
    # The first layer is frozen.
    assert any(line.startswith("model.1.weight ") and "float32[96, 256]" in line for line in lines)
    assert not any(line.startswith("model.0.") for line in lines)
    assert "tensors differ" in lines[-2] and lines[-1].endswith("are stored once for both")
    assert "hold the same bits" in craft("diff", store, "20", "20")[1]


def test_diff_names_what_only_one_has(store: Path) -> None:
    with crew(store, keep=9) as members:
        members.trained.model.register_buffer("scale", torch.ones(96, 256))
        members.save(40)
    code, text = craft("diff", store, "30", "40", "--json")
    found = json.loads(text)
    (extra,) = [each for each in found["tensors"] if each["before"] is None]
    assert code == 0 and extra["name"] == "model.scale" and extra["after"] == {"dtype": "float32", "shape": [96, 256]}
    assert f"only in {newest_first(store)[0].name}" in craft("diff", store, "30", "40")[1]


def test_too_many_or_too_few_words_are_bad_input(store: Path) -> None:
    assert craft("diff", store)[0] == 2
    assert craft("verify", store, "1", "2")[0] == 2
    assert craft("gc", store, "--keep", "0")[0] == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    code, text = craft(command, "--help")
    assert code == 0 and f"craft checkpoints {command}" in text.partition("Example:")[2]


@pytest.mark.parametrize("words", [("ls",), ("verify",), ("gc", "--dry-run"), ("diff", "20", "30")])
def test_all_but_export_do_without_torch(words: tuple[str, ...], store: Path) -> None:
    command, *more = words
    program = (
        "import sys; from craft.cli.main import main\n"
        f"try: main({['checkpoints', command, str(store), *more]!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('torch', 'numpy')]"
    )
    subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, timeout=60, check=True)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "1 s"), (59.0, "59 s"), (150.0, "2 min"), (4000.0, "67 min")])
def test_ages_are_in_a_unit_of_which_there_are_two(seconds: float, text: str) -> None:
    assert age(seconds) == text
