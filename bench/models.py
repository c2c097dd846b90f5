"""The model, the data and the update that every system in these benchmarks trains with.

All systems build the same network from the same seed, read the same in-memory dataset, and run the same code in a
step. Only the amount of computation is calibrated, through the number of samples in a microbatch; the number of
parameters, and with it the traffic between workers, stays fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

NUM_FEATURES = 256
NUM_CLASSES = 16
WIDTH = 512
DEPTH = 3
NUM_SAMPLES = 16_384

Batch = tuple[torch.Tensor, torch.Tensor]


class Samples(Dataset[Batch]):
    """Random features and labels, held in memory, so that neither disk nor decoding enters a figure."""

    def __init__(self, size: int = NUM_SAMPLES, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._features = torch.randn(size, NUM_FEATURES, generator=generator)
        self._labels = torch.randint(0, NUM_CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Batch:
        return self._features[index], self._labels[index]


class Ballast(nn.Module):
    """State of a given size that nothing computes with, in tensors of 4 MB: as that of a larger model would be."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        for number in range(-(-megabytes // 4)):
            self.register_buffer(f"part{number}", torch.full((1_000_000,), float(number)))


def build_model(seed: int = 0, width: int = WIDTH, depth: int = DEPTH) -> nn.Module:
    """Return the network, by default of about 0.7 million parameters, with the same bits for the same seed."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in in (NUM_FEATURES, *[width] * (depth - 1)):
        layers += [nn.Linear(fan_in, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def backward(model: nn.Module, batch: Batch) -> None:
    features, labels = batch
    F.cross_entropy(model(features), labels).backward()


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def endless_batches(dataset: Dataset[Batch], batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
    """Yield this rank's batches in the way a plain script gets them: ``DistributedSampler`` and ``DataLoader``."""
    sampler: DistributedSampler[Batch] = DistributedSampler(dataset, world_size, rank, drop_last=True)
    loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def fit_samples(target_s: float, measure: Callable[[int], float], sizes: Sequence[int] = (16, 64, 256, 1024)) -> int:
    """Return how many samples, a multiple of 4, make ``measure(samples)`` take about ``target_s``.

    Growing sizes are measured until one takes too long; the answer lies on the line between the last two. A measurement
    there corrects it once, and not by much, so that a disturbed one cannot lead far astray.
    """
    points = [(0, 0.0)]
    for size in sizes:
        points.append((size, measure(size)))
        if points[-1][1] >= target_s:
            break
    (small, small_s), (large, large_s) = points[-2:]
    if small == 0 and large_s >= target_s:
        return large
    slope = max((large_s - small_s) / (large - small), 1e-6)
    guess = max(round((small + (target_s - small_s) / slope) / 4) * 4, 4)
    better = guess + (target_s - measure(guess)) / slope
    return round(min(max(better, 0.75 * guess), 1.25 * guess) / 4) * 4
