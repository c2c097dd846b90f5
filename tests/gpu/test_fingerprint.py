"""The hash of a state on a GPU: the same as on the host, and fast enough for every step."""

from __future__ import annotations

import time

import pytest
import torch

from craft.snapshots.state.fingerprint import fingerprint
from craft.snapshots.state.leaves import Leaf, RotatingDigest, whole_digest

GPU = torch.device("cuda", 0)
STATE_BYTES = 12 << 30


def test_a_gpu_and_the_host_have_the_same_hash() -> None:
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 7, 8, 4096, (9 << 20) + 5)]
    on_gpu = [part.to(GPU) for part in parts]
    assert int(fingerprint(on_gpu, GPU)) == int(fingerprint(parts, torch.device("cpu")))
    on_gpu[4][9 << 20] ^= 1
    assert int(fingerprint(on_gpu, GPU)) != int(fingerprint(parts, torch.device("cpu")))


def test_a_slice_of_a_large_state_takes_less_than_a_hundredth_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """12 GB of state are about a billion parameters with Adam; a step of such a model takes 300 ms and more."""
    tensors = [torch.ones((1 << 20) + 17, device=GPU) for _ in range(STATE_BYTES // (4 << 20))]
    leaves = [Leaf(f"t{index}", tensor) for index, tensor in enumerate(tensors)]
    rotating = RotatingDigest(32768)
    rotating.refresh(leaves)
    assert rotating.period <= 1000
    costs = []
    for step in range(40):
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = rotating.take(step)
        found()
        costs.append(time.perf_counter() - began)
    began = time.perf_counter()
    whole_digest(leaves)()
    whole_s = time.perf_counter() - began
    median = sorted(costs)[20]
    with capsys.disabled():
        print(f"\n12 GB: a slice takes {1000 * median:.2f} ms, the whole state {1000 * whole_s:.0f} ms")
    assert median < 0.003
    assert whole_s < 3.0
