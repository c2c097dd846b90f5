"""Checkpoints taken out of the store: plain torch, safetensors and torch.distributed.checkpoint read them, bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from craft.cli.main import main
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.writer import CheckpointWriter
from craft.snapshots.state.leaves import Stateful
from craft.snapshots.state.raw_memory import same_bits
from craft.snapshots.state.serialized import State
from craft.snapshots.store.manifest import chunk_path
from craft.snapshots.store.tiers import open_tiers

from ..scene import LIMIT_S, flip, place

STEP = 7


class Net(torch.nn.Module):
    """Has all that makes ``state_dict`` differ from the list of tensors: a tied weight, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 48)
        self.body = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.BatchNorm1d(48), torch.nn.Conv2d(3, 4, 3))
        self.head = torch.nn.Linear(48, 64, bias=False, dtype=torch.float32)
        self.head.weight = self.embedding.weight
        self.short = torch.nn.Parameter(torch.randn(40, 40).bfloat16())
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.rand(5, 5), persistent=False)
        self.body[2].to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Odds:
    """State of every kind that can be registered."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "random": random.Random(3).getstate(),
            "numpy": numpy.random.RandomState(3).get_state(),
            "scalar": numpy.float32(0.5),
            "words": numpy.array(["a", "bc"]),
            "counter": Counter("aab"),
            "ordered": OrderedDict(x=1),
            "lists": defaultdict(list, {"k": [1, 2.5, None, True]}),
            "set": {1, 2},
            "size": torch.Size([2, 3]),
            "function": len,
            "bytes": b"\x00\xff",
            "nan": -0.0,
        }

    def load_state_dict(self, state: Any) -> None: ...


def trained() -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return net, optimizer


def write(store: Path, modules: dict[str, torch.nn.Module], registered: dict[str, Stateful]) -> None:
    writer = CheckpointWriter(open_tiers(str(store)), "w0", 3, lambda _: None)
    try:
        writer.take(State(modules, registered, b""), place(STEP))
        assert writer.wait(LIMIT_S)
    finally:
        writer.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "store"
    net, optimizer = trained()
    write(path, {"model": net}, {"optimizer": optimizer, "odds": Odds()})
    return path


def export(store: Path, form: str, out: Path, *more: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["checkpoints", "export", str(store), *more, "--format", form, str(out)])
    return done.exit_code, done.output


def assert_loads(state: dict[str, torch.Tensor]) -> None:
    """A fresh plain model takes it, all of it, and then has the bits that were saved."""
    fresh, (net, _) = Net(), trained()
    fresh.load_state_dict(state, strict=True)
    wanted = net.state_dict()
    assert all(same_bits(value, wanted[name]) for name, value in fresh.state_dict().items())
    assert all(same_bits(value, wanted[name]) for name, value in state.items())


def test_safetensors_has_the_keys_and_the_bits_of_state_dict(store: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    out = tmp_path / "model.safetensors"
    code, text = export(store, "safetensors", out)
    assert code == 0 and text.startswith(f"{out} holds checkpoint ")
    assert_loads(load_file(out))
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": str(STEP), "branch": "0"}


def test_torch_loads_it_without_trust_and_optimizers_take_their_state(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.pt"
    assert export(store, "torch", out, str(STEP))[0] == 0
    found = torch.load(out, weights_only=True)
    assert (found["step"], found["branch"]) == (STEP, 0)
    assert_loads(found["model"])
    _, wanted = trained()
    fresh = torch.optim.AdamW(Net().parameters())
    fresh.load_state_dict(found["registered"]["optimizer"])
    for number, values in wanted.state_dict()["state"].items():
        for key, value in values.items():
            assert same_bits(found["registered"]["optimizer"]["state"][number][key], value)
    assert fresh.state_dict()["param_groups"] == wanted.state_dict()["param_groups"]


def test_whatever_was_registered_becomes_plain_values(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.pt"
    assert export(store, "torch", out)[0] == 0
    odds = torch.load(out, weights_only=True)["registered"]["odds"]
    wanted = Odds().state_dict()
    assert odds["random"] == wanted["random"] and odds["counter"] == wanted["counter"]
    assert odds["numpy"][1].tolist() == wanted["numpy"][1].tolist()
    assert odds["words"] == ["a", "bc"] and odds["scalar"] == 0.5 and odds["lists"] == {"k": [1, 2.5, None, True]}
    assert odds["set"] == {1, 2} and odds["size"] == torch.Size([2, 3]) and odds["bytes"] == b"\x00\xff"
    assert odds["function"] is None and str(odds["nan"]) == "-0.0"


def test_distributed_checkpoint_loads_it(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "dcp"
    assert export(store, "dcp", out)[0] == 0
    fresh = Net()
    state: dict[str, Any] = {"model": fresh.state_dict(), "step": 0}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(state, checkpoint_id=str(out))
    assert_loads(state["model"])
    assert state["step"] == STEP


def test_two_modules_keep_their_names_apart(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    one, two = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    write(tmp_path / "store", {"model": one, "model1": two}, {})
    assert export(tmp_path / "store", "safetensors", tmp_path / "both.safetensors")[0] == 0
    assert export(tmp_path / "store", "torch", tmp_path / "both.pt")[0] == 0
    flat, nested = load_file(tmp_path / "both.safetensors"), torch.load(tmp_path / "both.pt", weights_only=True)
    assert sorted(flat) == ["model.bias", "model.weight", "model1.bias", "model1.weight"]
    assert same_bits(flat["model1.weight"], two.weight) and same_bits(nested["model1"]["weight"], two.weight)


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_a_damaged_chunk_is_named_and_nothing_is_written(form: str, tmp_path: Path) -> None:
    write(tmp_path / "store", {"model": torch.nn.Linear(200, 200)}, {})
    (manifest,) = candidates(open_tiers(str(tmp_path / "store")))
    damaged = tmp_path / "store" / chunk_path(manifest.chunks[0].hash)
    flip(damaged, 100)
    code, text = export(tmp_path / "store", form, tmp_path / "out")
    assert code == 1 and str(damaged) in text and "model.weight" in text
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_what_is_there_already_is_not_written_over(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    out.write_text("dear")
    code, text = export(store, "torch", out)
    assert (code, out.read_text()) == (2, "dear") and "exists already: remove it, or give another name" in text
    code, text = export(store, "torch", tmp_path / "no" / "model.pt")
    assert code == 2 and f"there is no directory {tmp_path / 'no'}: make it first" in text


@pytest.mark.parametrize(
    "form", [pytest.param("safetensors", marks=pytest.mark.long), pytest.param("torch", marks=pytest.mark.long), "dcp"]
)
def test_a_file_that_cannot_be_written_to_its_end_leaves_nothing_behind(form: str, store: Path, tmp_path: Path) -> None:
    limited = ["prlimit", "--fsize=5000", sys.executable, "-m", "craft.cli.main", "checkpoints", "export", str(store)]
    command = [*limited, "--format", form, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and f"craft: {tmp_path / 'out'} could not be written: " in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_without_the_package_a_sentence_says_what_to_install(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Python itself marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    code, text = export(store, "safetensors", tmp_path / "out")
    assert code == 2 and "pip install 'craft[export]', or export as torch" in text
