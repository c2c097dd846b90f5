"""Storage for torch.distributed.checkpoint, in one process: what is written again, what is found damaged, what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from craft.cli.main import main
from craft.dcp import StorageReader, StorageWriter
from craft.protocol.errors import ConfigError
from craft.snapshots.checkpoint.catalog import candidates, select
from craft.snapshots.checkpoint.gc import collect
from craft.snapshots.interop.named_values import contents_of
from craft.snapshots.state.raw_memory import same_bits
from craft.snapshots.store.manifest import Manifest, chunk_path, manifest_path, seal
from craft.snapshots.store.tiers import open_store, open_tiers

from ..scene import crew, flip, s3_server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZE = (1300, 1000)
"""A tensor of this size is two chunks, the second smaller."""


def state(seed: int) -> dict[str, Any]:
    """Tensors of many forms, and values that are none."""
    made = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "large": torch.randn(SIZE, generator=made),
            "turned": torch.randn(200, 300, generator=made).t(),
            "short": torch.randn(30, generator=made).bfloat16(),
            "number": torch.tensor(seed),
            "nothing": torch.empty(0, 4),
            "flags": torch.randn(70, generator=made) > 0,
        },
        "groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.99)}],
        "seed": seed,
    }


def put(store: Path, step: int | None, content: dict[str, Any], planner: SavePlanner | None = None) -> None:
    save(content, storage_writer=StorageWriter(store, step), planner=planner, no_dist=True)


def get(store: Path, which: int | str | None = None) -> dict[str, Any]:
    found = state(0)
    load(found, storage_reader=StorageReader(store, which), no_dist=True)
    return found


def listed(store: Path) -> list[Manifest]:
    return candidates(open_tiers(str(store)))


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["groups"] == wanted["groups"] and found["seed"] == wanted["seed"]
    assert all(same_bits(found["model"][name], tensor) for name, tensor in wanted["model"].items())


def reason(error: CheckpointException) -> str:
    return str(next(iter(error.failures.values()))[0])


def test_what_was_saved_is_loaded_bit_for_bit_and_listed_as_such(tmp_path: Path) -> None:
    put(tmp_path, 5, state(5))
    put(tmp_path, 6, state(6))
    assert_same(get(tmp_path), state(6))
    assert_same(get(tmp_path, 5), state(5))
    assert_same(get(tmp_path, listed(tmp_path)[1].name), state(5))
    assert [(each.kind, each.step, each.tag) for each in listed(tmp_path)] == [("dcp", 6, None), ("dcp", 5, None)]
    assert not list((tmp_path / "parts").rglob("*.json"))


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    put(tmp_path, 1, state(1))
    put(tmp_path, 2, state(1))
    second, first = listed(tmp_path)
    assert first.new_bytes > first.total_bytes and second.new_bytes == 0
    changed = state(1)
    changed["model"]["large"][-1, -1] += 1
    put(tmp_path, 3, changed)
    # The second chunk of the large tensor.
    assert listed(tmp_path)[0].new_bytes == SIZE[0] * SIZE[1] * 4 - (4 << 20)
    assert_same(get(tmp_path), changed)


def test_a_step_may_be_the_id_of_a_checkpoint_or_be_counted(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    for each in range(2):
        save(state(each), storage_writer=writer, no_dist=True)
    save(state(7), storage_writer=writer, checkpoint_id="7", no_dist=True)
    assert [each.step for each in listed(tmp_path)] == [7, 1, 0]
    found = state(0)
    load(found, storage_reader=StorageReader(tmp_path), checkpoint_id="1", no_dist=True)
    assert_same(found, state(1))
    with pytest.raises(ConfigError, match="'latest' is not a step: name a checkpoint by a whole number"):
        save(state(7), storage_writer=writer, checkpoint_id="latest", no_dist=True)


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    put(tmp_path, 1, state(1))
    put(tmp_path, 1, state(2))
    assert len(listed(tmp_path)) == 1
    assert_same(get(tmp_path, 1), state(2))


def test_a_step_that_must_not_be_replaced_is_refused_and_stays(tmp_path: Path) -> None:
    save(state(1), storage_writer=StorageWriter(tmp_path, 3, overwrite=False), no_dist=True)
    with pytest.raises(CheckpointException, match="Checkpoint already exists") as caught:
        save(state(2), storage_writer=StorageWriter(tmp_path, 3, overwrite=False), no_dist=True)
    assert isinstance(next(iter(caught.value.failures.values()))[0], ConfigError)
    assert_same(get(tmp_path), state(1))
    save(state(2), storage_writer=StorageWriter(tmp_path, 4, overwrite=False), no_dist=True)
    assert_same(get(tmp_path), state(2))


def test_a_checkpoint_names_the_save_that_wrote_it_and_the_load_that_reads_it(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path), StorageReader(tmp_path)
    save(state(1), storage_writer=writer, no_dist=True)
    first = reader.read_metadata().storage_meta
    assert first is not None
    assert (first.checkpoint_id, first.save_id, first.load_id) == (str(tmp_path), writer.save_id, reader.load_id)
    saved_before, loaded_before = writer.save_id, reader.load_id
    save(state(2), checkpoint_id="7", storage_writer=writer, no_dist=True)
    reader.reset("7")
    second = reader.read_metadata().storage_meta
    assert second is not None
    assert (second.checkpoint_id, second.save_id, second.load_id) == ("7", writer.save_id, reader.load_id)
    assert saved_before != writer.save_id and loaded_before != reader.load_id


def test_planners_are_told_the_same_version_as_with_torchs_own_writer(tmp_path: Path) -> None:
    save(state(1), checkpoint_id=str(tmp_path / "own"), no_dist=True)
    put(tmp_path / "store", 1, state(1))
    own, ours = FileSystemReader(tmp_path / "own").read_metadata(), StorageReader(tmp_path / "store").read_metadata()
    assert ours.version == own.version is not None


def test_a_manifest_of_an_earlier_version_is_read_and_names_no_save(tmp_path: Path) -> None:
    put(tmp_path, 1, state(1))
    path = manifest_path(listed(tmp_path)[0].name)
    earlier = seal(msgspec.structs.replace(listed(tmp_path)[0], save=msgspec.UNSET))
    assert b"save" not in earlier
    open_store(str(tmp_path)).put(path, earlier)
    meta = StorageReader(tmp_path).read_metadata().storage_meta
    assert meta is not None and meta.save_id is None and meta.checkpoint_id is None
    assert_same(get(tmp_path), state(1))


def test_a_planner_that_caches_its_plans_saves_every_step_under_its_own_name(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step, state(step), DefaultSavePlanner(enable_plan_caching=True))
    assert [each.step for each in listed(tmp_path)] == [3, 2, 1]
    assert_same(get(tmp_path, 2), state(2))
    with pytest.raises(CheckpointException) as caught:
        put(tmp_path, None, state(4), DefaultSavePlanner(enable_plan_caching=True))
    assert "give it, as StorageWriter(url, step)" in reason(caught.value)


def test_tags_and_old_ones(tmp_path: Path) -> None:
    save(state(1), storage_writer=StorageWriter(tmp_path, 1, tag="best"), no_dist=True)
    for step in (2, 3, 4):
        save(state(step), storage_writer=StorageWriter(tmp_path, step, keep=2), no_dist=True)
    assert [each.step for each in listed(tmp_path)] == [4, 3, 1]
    assert_same(get(tmp_path, "best"), state(1))


def test_a_flipped_chunk_is_named_and_refused(tmp_path: Path) -> None:
    put(tmp_path, 1, state(1))
    damaged = tmp_path / chunk_path(listed(tmp_path)[0].chunks[0].hash)
    flip(damaged, 1000)
    with pytest.raises(CheckpointException) as caught:
        get(tmp_path)
    assert str(damaged) in reason(caught.value) and "model.large of checkpoint" in reason(caught.value)


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    put(tmp_path, 1, state(1))
    header = tmp_path / chunk_path(listed(tmp_path)[0].header.hash)
    flip(header, 50)
    with pytest.raises(CheckpointException, match=str(header)):
        get(tmp_path)


def test_the_command_line_knows_them(tmp_path: Path) -> None:
    put(tmp_path, 1, state(1))
    changed = state(1)
    changed["model"]["flags"].logical_not_()
    put(tmp_path, 2, changed)

    def craft(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["checkpoints", words[0], str(tmp_path), *words[1:]])
        return done.exit_code, done.output

    assert "dcp" in craft("ls")[1]
    assert craft("verify")[0] == 0
    differences = json.loads(craft("diff", "1", "2", "--json")[1])
    assert [each["name"] for each in differences["tensors"]] == ["model.flags"]
    flip(tmp_path / chunk_path(listed(tmp_path)[0].chunks[0].hash), 9)
    code, text = craft("verify")
    assert code == 1 and "model.large" in text


def exported(store: Path, form: str, out: Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["checkpoints", "export", str(store), "--format", form, str(out)])
    return done.exit_code, done.output


def test_they_can_be_taken_out_of_the_store_as_well(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    store = tmp_path / "store"
    put(store, 1, state(1))
    assert [exported(store, form, tmp_path / form)[0] for form in ("safetensors", "torch", "dcp")] == [0, 0, 0]
    assert_same(torch.load(tmp_path / "torch", weights_only=True), state(1))
    flat = load_file(tmp_path / "safetensors")
    assert all(same_bits(flat.pop(f"model.{name}"), tensor) for name, tensor in state(1)["model"].items()) and not flat
    found = state(0)
    load(found, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert_same(found, state(1))


def test_an_object_that_could_run_code_is_not_unpickled_by_export(tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, 1, {"model": {"x": torch.ones(3)}, "where": Path("x")})
    code, text = exported(store, "torch", tmp_path / "out")
    assert code == 2 and text.startswith("craft: where is an object that only torch.distributed.checkpoint.load reads")
    assert exported(store, "safetensors", tmp_path / "out")[0] == 0


@pytest.mark.long
def test_an_object_store_does_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def craft(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["checkpoints", *words])
        return done.exit_code, done.output

    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        url = "s3://bucket/job"
        for step in (1, 2):
            save(state(step), storage_writer=StorageWriter(url, step), no_dist=True)
        found = state(0)
        load(found, storage_reader=StorageReader(url, 1), no_dist=True)
        assert_same(found, state(1))
        assert craft("ls", url)[1].startswith(f"2 checkpoints in {url}\n")
        assert craft("verify", url)[0] == 0
        assert "model.large" in craft("diff", url, "1", "2")[1]
        code, text = craft("gc", url, "--keep", "1")
        assert code == 0 and "0000-000000000001-dcp removed" in text
        assert craft("export", url, "--format", "torch", str(tmp_path / "out"))[0] == 0
        assert_same(torch.load(tmp_path / "out", weights_only=True), state(2))
        for empty in ("s3://bucket/other", "s3://nobodys/job"):
            code, text = craft("gc", empty)
            assert code == 2 and f"{empty} holds no checkpoints" in text


def test_garbage_collection_leaves_what_is_being_saved_alone_also_if_that_step_is_there_already(tmp_path: Path) -> None:
    class Tidied(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            collect(open_store(str(tmp_path)), 1, time.time())
            super().finish(metadata, results)

    for seed in (1, 2):
        save(state(seed), storage_writer=Tidied(tmp_path, 5), no_dist=True)
        assert_same(get(tmp_path, 5), state(seed))


def test_parts_that_are_gone_when_it_is_to_be_listed_are_noticed(tmp_path: Path) -> None:
    class Hindered(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            for part in (tmp_path / "parts").rglob("*.json"):
                part.unlink()
            super().finish(metadata, results)

    with pytest.raises(CheckpointException) as caught:
        save(state(1), storage_writer=Hindered(tmp_path, 1), no_dist=True)
    assert "save it again" in reason(caught.value) and not listed(tmp_path)


def test_ranks_that_found_different_newest_ones_do_not_load_a_mixture(tmp_path: Path) -> None:
    put(tmp_path, 1, state(1))
    one, other = StorageReader(tmp_path), StorageReader(tmp_path)
    one.read_metadata()
    put(tmp_path, 2, state(2))
    other.read_metadata()
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in (one, other)]
    with pytest.raises(ConfigError, match="not all found the same: load again, or say which step is meant"):
        one.prepare_global_plan(plans)


def test_a_save_in_which_ranks_do_not_meet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save with use_collectives=True"):
        save(state(1), storage_writer=StorageWriter(tmp_path, 1), no_dist=True, use_collectives=False)


def test_a_jobs_own_checkpoints_are_read_as_what_their_export_holds(tmp_path: Path) -> None:
    with crew(tmp_path) as members:
        members.save(1)
        members.save(2)
    tiers = open_tiers(str(tmp_path))
    wanted = contents_of(tiers, select(candidates(tiers), tiers.url, 1))
    found = _zeros(wanted)
    load(found, storage_reader=StorageReader(tmp_path, 1), no_dist=True)
    assert _flat(found) == _flat(wanted)


def _zeros(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _zeros(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_zeros(each) for each in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _flat(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_flat(each) for each in value]
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def test_saves_come_before_a_jobs_own_checkpoints_in_one_store(tmp_path: Path) -> None:
    with crew(tmp_path) as members:
        members.save(3)
    put(tmp_path, 2, state(2))
    assert get(tmp_path)["seed"] == 2


def test_an_empty_place_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="holds no checkpoints"):
        get(tmp_path)
