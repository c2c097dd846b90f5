"""Checkpoints of sharded models: saved by every position of a mesh, restored at another one, and as whole tensors.

The workers of a mesh are made one after the other in this process, over torch's fake process group: their shards are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import debug
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from craft.dcp import StorageReader
from craft.protocol.errors import ConfigError, SnapshotCorrupt, SnapshotMissing
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.gc import collect
from craft.snapshots.checkpoint.sharded.reshard import Target, restore_into, restore_whole
from craft.snapshots.checkpoint.verify import diff, verify
from craft.snapshots.checkpoint.writer import CheckpointShare, CheckpointWriter
from craft.snapshots.interop.export import export
from craft.snapshots.interop.named_values import contents_of, tensors_of
from craft.snapshots.state.raw_memory import same_bits
from craft.snapshots.state.serialized import State, load
from craft.snapshots.state.shards import is_sharded, local_of, placement_of
from craft.snapshots.store.manifest import Manifest, PartOfPosition, chunk_path, name_of
from craft.snapshots.store.tiers import Tiers, open_tiers

WIDTH = 12


class Layout(NamedTuple):
    """How a model is spread: FSDP2 over ``shard`` workers, tensor parallel over ``tp``; one worker without a mesh: 1, 1."""

    shard: int = 1
    tp: int = 1
    mesh: bool = True

    @property
    def size(self) -> int:
        return self.shard * self.tp


PLAIN = Layout(mesh=False)


class Net(nn.Module):
    """Sizes that do not divide: 10 rows over 4 workers, 7 over 2."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)
        self.head = nn.Linear(WIDTH, 7)
        self.norm = nn.BatchNorm1d(7)


class Counter:
    """Something registered that is the same on all positions, or not."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seen": torch.full((3,), float(self.value))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Worker:
    """One worker of a mesh, with its shards of a model and of its optimizer's state, all a function of ``seed``."""

    def __init__(self, layout: Layout, position: int, seed: int, kind: type[nn.Module] = Net) -> None:
        torch.manual_seed(seed)
        self.layout, self.position = layout, position
        self.model = kind()
        if layout.mesh:
            mesh = init_device_mesh("cpu", (layout.shard, layout.tp), mesh_dim_names=("shard", "tp"))
            if layout.tp > 1:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(self.model, mesh["tp"], plan, src_data_rank=None)
            fully_shard(self.model, mesh=mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.counter = Counter()
        self.whole: dict[str, torch.Tensor] = {}

    @property
    def registered(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "counter": self.counter}

    @property
    def target(self) -> Target:
        return Target({"model": self.model}, self.registered, self.position, self.layout.size)

    @torch.no_grad()
    def train(self, seed: int) -> Worker:
        """Give every tensor the values of ``seed``, each worker its region of them."""
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        self.optimizer.step()
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.model.named_parameters():
            state = self.optimizer.state[param]
            for key, tensor in ((name, param), *((f"{name}.{k}", state[k]) for k in ("exp_avg", "exp_avg_sq"))):
                whole = self.whole[key] = torch.rand(param.shape, generator=generator)
                local_of(tensor).copy_(mine(whole, tensor))
            state["step"].fill_(seed)
        self.counter.value = seed
        return self

    def state(self) -> State:
        return State({"model": self.model}, self.registered, b"conditions")


def mine(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that a worker has, by torch's own arithmetic."""
    if not is_sharded(like):
        return whole
    region = placement_of(like).region
    assert region is not None
    for axis, ranges in enumerate(region):
        indices = [index for begin, end in ranges for index in range(begin, end)]
        whole = whole.index_select(axis, torch.tensor(indices, dtype=torch.long))
    return whole


@contextmanager
def position(layout: Layout, number: int) -> Iterator[None]:
    """Be the worker at one position of a mesh."""
    if not layout.mesh:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=layout.size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Else the next worker's tensors would get this one's mesh: torch takes equal meshes for the same.
        for name in (
            "_clear_sharding_prop_cache",
            "_clear_fast_path_sharding_prop_cache",
            "_clear_dtensor_dispatch_cache",
        ):
            getattr(debug, name, lambda: None)()


def save(
    tiers: Tiers,
    layout: Layout,
    seed: int = 1,
    twins: int = 1,
    *,
    alter: Any = lambda worker: None,
    skip: tuple[int, ...] = (),
) -> dict[str, torch.Tensor]:
    """Save the state of ``seed`` by ``twins`` replicas; return its whole tensors."""
    wholes: dict[str, torch.Tensor] = {}
    of = layout.size * twins
    for number in range(layout.size):
        with position(layout, number):
            worker = Worker(layout, number, seed).train(seed)
            alter(worker)
            wholes |= worker.whole
            for twin in range(twins):
                part = twin * layout.size + number
                if part in skip:
                    continue
                place = PartOfPosition(number, layout.size, twin, twins) if layout.size > 1 else msgspec.UNSET
                writer = CheckpointWriter(tiers, f"w{part}", 3, lambda _: None)
                writer.take(worker.state(), CheckpointShare(name_of(0, seed, "n"), 0, seed, 1, None, part, of, place))
                assert writer.wait(60.0)
                writer.close()
    return wholes


def restored(tiers: Tiers, manifest: Manifest, layout: Layout, *, in_place: bool = True) -> list[Worker]:
    """Restore at every position of a mesh, into freshly built objects."""
    workers = []
    for number in range(layout.size):
        with position(layout, number):
            worker = Worker(layout, number, seed=99)
            found = restore_into(tiers, manifest, worker.target, in_place=in_place)
            load(found.header, found.tensors, {"model": worker.model}, worker.registered)
            workers.append(worker)
    return workers


def assert_holds(worker: Worker, wholes: dict[str, torch.Tensor], seed: int) -> None:
    for name, param in worker.model.named_parameters():
        state = worker.optimizer.state[param]
        assert torch.equal(local_of(param), mine(wholes[name], param)), name
        assert is_sharded(param) == worker.layout.mesh
        for key in ("exp_avg", "exp_avg_sq"):
            assert is_sharded(state[key]) == is_sharded(param)
            assert torch.equal(local_of(state[key]), mine(wholes[f"{name}.{key}"], param)), (name, key)
        assert state["step"].item() == seed
    assert worker.counter.value == seed


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return open_tiers(str(tmp_path / "store"))


def only(tiers: Tiers) -> Manifest:
    (manifest,) = candidates(tiers)
    return manifest


LAYOUTS = [PLAIN, Layout(1), Layout(2), Layout(3), Layout(4), Layout(1, 2), Layout(2, 2), Layout(3, 2)]


@pytest.mark.parametrize("to", LAYOUTS, ids=str)
@pytest.mark.parametrize("saved", [PLAIN, Layout(2), Layout(4), Layout(2, 2), Layout(3, 2)], ids=str)
def test_what_one_mesh_saved_is_restored_at_any_other(tiers: Tiers, saved: Layout, to: Layout) -> None:
    wholes = save(tiers, saved)
    for worker in restored(tiers, only(tiers), to):
        assert_holds(worker, wholes, 1)


def test_twins_divide_the_state_of_their_position(tiers: Tiers) -> None:
    wholes = save(tiers, Layout(2), twins=3)
    manifest = only(tiers)
    assert manifest.version == 2 and manifest.num_positions == 2
    assert verify(tiers, manifest) == []
    for worker in restored(tiers, manifest, Layout(2), in_place=False):
        assert_holds(worker, wholes, 1)


def test_shares_of_all_positions_are_copied_to_the_durable_store(tmp_path: Path) -> None:
    wholes = save(open_tiers(str(tmp_path / "durable"), str(tmp_path / "fast")), Layout(2), twins=2)
    tiers = open_tiers(str(tmp_path / "durable"))
    assert verify(tiers, only(tiers)) == []
    (worker,) = restored(tiers, only(tiers), PLAIN)
    assert_holds(worker, wholes, 1)


@pytest.mark.parametrize("skip", [(0,), (3,)])
def test_a_checkpoint_without_a_part_of_one_position_is_not_listed_P7(tiers: Tiers, skip: tuple[int, ...]) -> None:
    save(tiers, Layout(2), seed=1, twins=2)
    save(tiers, Layout(2), seed=2, twins=2, skip=skip)
    assert [each.step for each in candidates(tiers)] == [1]


def test_twins_with_different_states_are_found(tiers: Tiers) -> None:
    failed = Queue[Any]()
    for part, (number, seed) in enumerate([(0, 1), (1, 1), (0, 1), (1, 2)]):
        with position(Layout(2), number):
            state = Worker(Layout(2), number, 1).train(seed).state()
        writer = CheckpointWriter(tiers, f"w{part}", 3, failed.put)
        place = PartOfPosition(number, 2, part // 2, 2)
        writer.take(state, CheckpointShare(name_of(0, 1, "n"), 0, 1, 1, None, part, 4, place))
        if part < 3:
            assert writer.wait_free(60.0)
        else:
            assert "members 1 and 3 " in failed.get(timeout=60.0).error
        writer.close()
    assert candidates(tiers) == []


def test_an_unchanged_position_is_not_written_again_and_is_kept_by_the_collector(tiers: Tiers) -> None:
    save(tiers, Layout(2), seed=1)
    save(tiers, Layout(2), seed=2, alter=lambda worker: worker.train(1) if worker.position else None)
    newest, before = candidates(tiers)
    assert newest.chunks[1] == before.chunks[1] and newest.chunks[0] != before.chunks[0]
    assert newest.positions and before.positions
    headers = sum(each.header.size for each in newest.positions if each not in before.positions)
    assert newest.new_bytes == newest.chunks[0].size + headers
    collect(tiers.durable, 1, now=0.0)
    assert verify(tiers, only(tiers)) == []


def test_a_damaged_chunk_of_one_position_is_named_P7(tiers: Tiers, tmp_path: Path) -> None:
    save(tiers, Layout(2))
    manifest = only(tiers)
    chunk = tmp_path / "store" / chunk_path(manifest.chunks[-1].hash)
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    (problem,) = verify(tiers, manifest)
    assert problem.startswith("position 1: ") and chunk.name in problem
    with position(Layout(2), 0):
        worker = Worker(Layout(2), 0, 5)
        restore_into(tiers, manifest, worker.target, in_place=False)
    for layout, number in ((Layout(2), 1), (PLAIN, 0)):
        with position(layout, number), pytest.raises(SnapshotCorrupt, match=chunk.name):
            restore_into(tiers, manifest, Worker(layout, number, 5).target, in_place=False)


def test_a_missing_header_of_one_position_is_named_P7(tiers: Tiers, tmp_path: Path) -> None:
    save(tiers, Layout(2))
    manifest = only(tiers)
    assert manifest.positions
    (tmp_path / "store" / chunk_path(manifest.positions[1].header.hash)).unlink()
    assert "position 1" in verify(tiers, manifest)[0]
    with pytest.raises(SnapshotMissing):
        restore_whole(tiers, manifest)


def test_differences_name_positions(tiers: Tiers) -> None:
    save(tiers, Layout(2), seed=1)
    save(tiers, Layout(2), seed=2, alter=lambda worker: worker.train(1) if worker.position else None)
    new, old = candidates(tiers)
    changed = diff(tiers, old, new)
    assert {each.name.rpartition(" ")[2] for each in changed.tensors} == {"0"}
    assert changed.values == ("counter at position 0",)


# Whole tensors.


@pytest.mark.parametrize("saved", [Layout(1), Layout(3), Layout(2, 2), Layout(3, 2)], ids=str)
def test_a_sharded_model_is_exported_as_one(tiers: Tiers, saved: Layout) -> None:
    wholes = save(tiers, saved)
    manifest = only(tiers)
    model = Net()
    model.load_state_dict(tensors_of(tiers, manifest))
    assert all(torch.equal(param, wholes[name]) for name, param in model.named_parameters())
    found = contents_of(tiers, manifest)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(found["registered"]["optimizer"])
    for name, param in model.named_parameters():
        assert torch.equal(optimizer.state[param]["exp_avg"], wholes[f"{name}.exp_avg"])
    assert found["registered"]["counter"]["value"] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", [PLAIN, Layout(3), Layout(2, 2)], ids=str)
@pytest.mark.parametrize("exported", [False, True], ids=["craft.dcp", "exported"])
def test_torchs_own_load_reads_it_at_another_mesh(tiers: Tiers, tmp_path: Path, to: Layout, exported: bool) -> None:
    """Through ``craft.dcp`` as it is, and from an export by torch's own reader."""
    wholes = save(tiers, Layout(4))
    reader: Any = StorageReader(tmp_path / "store")
    if exported:
        export(tiers, only(tiers), "dcp", tmp_path / "exported")
        reader = FileSystemReader(tmp_path / "exported")
    for number in range(to.size):
        with position(to, number):
            worker = Worker(to, number, seed=5).train(5)
            registered = {"optimizer": worker.optimizer.state_dict(), "counter": {"value": 0}}
            state = {"model": worker.model.state_dict(), "registered": registered, "step": 0}
            torch_load(state, storage_reader=reader, no_dist=True)
            worker.model.load_state_dict(state["model"])  # type: ignore[arg-type]
            worker.optimizer.load_state_dict(registered["optimizer"])
            worker.counter.value = registered["counter"]["value"]
            assert_holds(worker, wholes, 1)
            assert state["step"] == 1


# What belongs to one position.


def set_counter(worker: Worker) -> None:
    worker.counter.value = 10 + worker.position


def set_buffer(worker: Worker) -> None:
    norm = worker.model.norm
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
    norm.running_mean.fill_(worker.position)


def test_what_differs_between_positions_stays_with_them_and_goes_to_no_other_mesh(tiers: Tiers) -> None:
    save(tiers, Layout(2), alter=set_counter)
    manifest = only(tiers)
    assert [worker.counter.value for worker in restored(tiers, manifest, Layout(2))] == [10, 11]
    for layout in (Layout(3), PLAIN):
        with pytest.raises(ConfigError, match=r"counter.value of position 1 is not that of position 0.*same mesh"):
            restored(tiers, manifest, layout)
    # The model alone does not depend on it.
    assert tensors_of(tiers, manifest)
    with pytest.raises(ConfigError, match=r"counter.value of position 1"):
        contents_of(tiers, manifest)


def test_a_buffer_that_differs_is_that_of_position_0_at_another_mesh(
    tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    save(tiers, Layout(2), alter=set_buffer)
    manifest = only(tiers)
    means = [dict(worker.model.named_buffers())["norm.running_mean"] for worker in restored(tiers, manifest, Layout(2))]
    assert [mean[0].item() for mean in means] == [0.0, 1.0]
    assert "differs between the positions" not in caplog.text
    (worker,) = restored(tiers, manifest, PLAIN)
    assert dict(worker.model.named_buffers())["norm.running_mean"][0].item() == 0.0
    assert "buffer model.norm.running_mean differs between the positions of a replica" in caplog.text


# What cannot be.


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 8)


class Longer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 3)


@pytest.mark.parametrize("to", [Layout(2), Layout(4), PLAIN], ids=str)
@pytest.mark.parametrize(("kind", "said"), [(Wider, "model.head.weight"), (Longer, "model.more.weight")])
def test_a_checkpoint_of_another_model_is_refused(tiers: Tiers, to: Layout, kind: type[Net], said: str) -> None:
    save(tiers, Layout(2))
    with position(to, 0):
        worker = Worker(to, 0, 5, kind)
        with pytest.raises(ConfigError, match=said):
            restore_into(tiers, only(tiers), worker.target, in_place=False)


def test_an_optimizer_state_of_another_form_is_refused_by_name_at_another_mesh(tiers: Tiers) -> None:
    def factor(worker: Worker) -> None:
        param = next(iter(worker.model.parameters()))
        worker.optimizer.state[param]["row"] = worker.optimizer.state[param]["exp_avg"].sum(1, keepdim=True)

    save(tiers, Layout(2), alter=factor)
    restored(tiers, only(tiers), Layout(2))
    with pytest.raises(ConfigError, match=r"optimizer.state.0.row .* nothing here says how"):
        restored(tiers, only(tiers), Layout(4))
    restored(tiers, only(tiers), PLAIN)


def test_options_of_kernels_stay_those_of_the_script_at_another_mesh(tiers: Tiers) -> None:
    def use_foreach(worker: Worker) -> None:
        worker.optimizer.param_groups[0]["foreach"] = True

    save(tiers, Layout(2), alter=use_foreach)
    (same, _) = restored(tiers, only(tiers), Layout(2))
    assert same.optimizer.param_groups[0]["foreach"] is True
    (other, _) = restored(tiers, only(tiers), Layout(1, 2))
    assert other.optimizer.param_groups[0]["foreach"] is False


def test_a_state_is_read_as_shards_after_a_forward_without_a_backward(tiers: Tiers) -> None:
    with position(Layout(2), 0):
        worker = Worker(Layout(2), 0, 1).train(1)
        before = worker.state()
        worker.model.unshard()  # type: ignore[operator]
        after = worker.state()
        assert after.header == before.header
        assert all(map(same_bits, after.tensors, before.tensors))
