"""Trains on data of one kind or another, and says which samples each microbatch had."""

import argparse
import io
import random
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--workers", type=int, default=1, help="steps are slow while there are fewer")
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--every", default="7 steps")
parser.add_argument("--shards", type=Path, help="a directory of tar files")
options = parser.parse_args()
testing.arm()

Sample = tuple[int, torch.Tensor]


def sample(number: int) -> Sample:
    return number, torch.randn(4) + random.random()


class Reads(IterableDataset[Sample]):
    """Shuffles a buffer, as readers of shards do; says how much it reads."""

    def __init__(self) -> None:
        self.epoch = 0
        self.next = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        assert info is None or info.num_workers == 1
        while self.next < 58:
            self.next += 1
            yield sample((self.next * 7 + self.epoch) % 58)
        self.next = 0


class Plain(Reads):
    def __iter__(self) -> Iterator[Sample]:
        buffer: list[int] = []
        for number in range(58):
            buffer.append(number)
            if len(buffer) > 9:
                yield sample(buffer.pop(random.randrange(len(buffer))))
        for number in buffer:
            yield sample(number)


class Stateful(Reads):
    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Shards(IterableDataset[Sample]):
    """Samples out of tar files, the shards in another order in each pass."""

    def __init__(self, folder: Path) -> None:
        self.shards = sorted(folder.glob("*.tar"))
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        for shard in random.Random(self.epoch).sample(self.shards, len(self.shards)):
            yield from read_shard(shard)


def read_shard(shard: Path) -> Iterator[Sample]:
    with tarfile.open(shard) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            yield int(member.name.removesuffix(".pt")), torch.load(io.BytesIO(file.read()))


def lanes(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[list[Sample]]:
    """Each microbatch reads its own shards, two samples a step."""
    shards = sorted(options.shards.glob("*.tar"))[microbatch::num_microbatches] * 4
    skip = 2 * start_step
    batch: list[Sample] = []
    for shard in shards:
        for each in read_shard(shard):
            if skip:
                skip -= 1
                continue
            batch.append(each)
            if len(batch) == 2:
                yield batch
                batch = []


class Numbers(torch.utils.data.Dataset[Sample]):
    def __len__(self) -> int:
        return 58

    def __getitem__(self, index: int) -> Sample:
        return sample(index)


class Buckets(Sampler[list[int]]):
    """Batches by length; how many there are differs from pass to pass."""

    def __iter__(self) -> Iterator[list[int]]:
        numbers = random.sample(range(58), 58)
        while numbers:
            size = random.randint(2, 9)
            yield numbers[:size]
            numbers = numbers[size:]


def data() -> tuple[Any, dict[str, Any]]:
    """What ``job.steps`` is given."""
    if options.kind == "iterable":
        return Plain(), {"global_batch": 8}
    if options.kind == "loader":
        return DataLoader(Plain(), batch_size=8, drop_last=True, num_workers=2), {}
    if options.kind == "stateful":
        return StatefulDataLoader(Stateful(), batch_size=8, snapshot_every_n_steps=3), {}
    if options.kind == "weighted":
        weights = [1.0 + number for number in range(58)]
        return StatefulDataLoader(Numbers(), batch_size=8, sampler=WeightedRandomSampler(weights, 58)), {}
    if options.kind == "buckets":
        return DataLoader(Numbers(), batch_sampler=Buckets(), num_workers=1), {}
    if options.kind == "shards":
        return Shards(options.shards), {"global_batch": 8}
    assert options.kind == "lanes"
    return (lambda *place: map(torch.utils.data.default_collate, lanes(*place))), {}


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)
if options.checkpoints:
    job.checkpoints(options.checkpoints, every=options.every, keep=100)
given, more = data()
epochs = None if options.kind == "lanes" else 4
for step in job.steps(given, microbatches=4, seed=5, epochs=epochs, **more):
    optimizer.zero_grad()
    for numbers, x in step:
        print(f"used {step.number} {step.microbatch} {numbers.tolist()}")
        loss = model(x).square().mean()
        loss.backward()
        step.log(loss=loss, epoch=job.epoch)
        # A worker that joins finds the job still going on.
        time.sleep(0.05 if job.world_size < options.workers else 0.002)
    testing.reach("update", step.number)
    optimizer.step()
print(f"ended after {job.step} steps in epoch {job.epoch}")
