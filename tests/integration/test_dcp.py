"""Models that FSDP2 shards over real processes, saved through craft.dcp and loaded by another number of them (P7)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from craft import dcp
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.verify import verify
from craft.snapshots.interop.named_values import contents_of, tensors_of
from craft.snapshots.state.raw_memory import same_bits
from craft.snapshots.store.manifest import Manifest
from craft.snapshots.store.tiers import open_tiers

from .jobs import SCRIPTS
from .scripts.sharded import build, state_of, train

NEWEST = 4
LIMIT_S = 150.0
"""Each rank imports what torch has for sharding, which takes a slow machine a while."""


def launch(action: str, size: int, store: Path, scratch: Path) -> tuple[list[int], str]:
    """Run all ranks to their end; exit codes, and what they said."""
    membership = scratch / f"meeting-{action}-{size}"
    command = [sys.executable, SCRIPTS / "sharded.py", action, store, membership]
    ranks = [
        subprocess.Popen(
            [*map(str, command), str(rank), str(size), str(scratch / f"{action}-{size}.pt")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks], "\n".join(said)


def assert_same(found: Any, wanted: Any, name: str = "") -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), name
        for key in wanted:
            assert_same(found[key], wanted[key], f"{name}.{key}")
    elif isinstance(wanted, torch.Tensor):
        assert same_bits(found, wanted), name
    else:
        assert found == wanted, name


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def store(scratch: Path) -> Path:
    """What three ranks have saved."""
    codes, said = launch("save", 3, scratch / "store", scratch)
    assert codes == [0, 0, 0], said
    return scratch / "store"


def listed(store: Path) -> dict[int, Manifest]:
    return {manifest.step: manifest for manifest in candidates(open_tiers(str(store)))}


def test_every_step_is_listed_and_good_and_what_has_not_changed_was_not_written_again(store: Path) -> None:
    found = listed(store)
    assert sorted(found) == [1, 2, 3, NEWEST] and {manifest.kind for manifest in found.values()} == {"dcp"}
    assert all(not verify(open_tiers(str(store)), manifest) for manifest in found.values())
    assert found[1].new_bytes >= found[1].total_bytes
    assert found[2].new_bytes == 0
    # Of three layers the first was frozen: what is written is the second, and the small tensors.
    assert found[3].total_bytes / 3 < found[3].new_bytes < found[3].total_bytes * 2 / 3


@pytest.mark.parametrize("size", [2, pytest.param(5, marks=pytest.mark.long)])
def test_another_number_of_ranks_loads_the_same_bits(store: Path, scratch: Path, size: int) -> None:
    codes, said = launch("load", size, store, scratch)
    assert codes == [0] * size, said
    assert_same(torch.load(scratch / f"load-{size}.pt"), torch.load(scratch / "save-3.pt"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_that_is_not_sharded_loads_the_same_bits(store: Path, scratch: Path) -> None:
    model, optimizer = build(1)
    train(model, optimizer)
    found = state_of(model, optimizer)
    load(found, storage_reader=dcp.StorageReader(store), no_dist=True)
    assert_same(found, torch.load(scratch / "save-3.pt"))


def test_whole_tensors_can_be_taken_out_of_the_store(store: Path, scratch: Path) -> None:
    wanted = torch.load(scratch / "save-3.pt")
    tiers = open_tiers(str(store))
    assert_same(contents_of(tiers, listed(store)[NEWEST])["model"], wanted["model"])
    found = tensors_of(tiers, listed(store)[NEWEST])
    assert all(same_bits(found[f"model.{name}"], tensor) for name, tensor in wanted["model"].items())


def test_a_rank_that_dies_in_the_middle_leaves_nothing_listed_and_nothing_in_the_way(scratch: Path) -> None:
    place = scratch / "died"
    codes, said = launch("die", 2, place, scratch)
    assert codes[1] == -9 and codes[0] not in (0, -9), said
    assert not listed(place)
    # The one that lived had written its share.
    assert list((place / "chunks").rglob("*"))
    with pytest.warns(UserWarning, match="single process"):
        save({"x": torch.ones(3)}, storage_writer=dcp.StorageWriter(place, 9), no_dist=True)
    assert list(listed(place)) == [9] and not list((place / "parts").rglob("*.json"))
