"""What tests of checkpoints share: a small training state that is a function of its step, members that write it, a server."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from craft.protocol.events import AnyNote, CheckpointWritten
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.restore import restore
from craft.snapshots.checkpoint.writer import CheckpointShare, CheckpointWriter
from craft.snapshots.state.raw_memory import same_bits
from craft.snapshots.state.serialized import State
from craft.snapshots.store.manifest import Manifest, name_of
from craft.snapshots.store.tiers import Tiers, open_tiers

LIMIT_S = 60.0


class Trained:
    """A model and an optimizer whose every byte follows from the step. The first layer is frozen."""

    def __init__(self, width: int = 96) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, 256), torch.nn.Linear(256, width), torch.nn.BatchNorm1d(width)
        )
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad])
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        return {"model": self.model}

    @property
    def registered(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    @torch.no_grad()
    def at(self, step: int) -> State:
        """The state of a step."""
        generator = torch.Generator().manual_seed(step)
        for parameter, values in self.optimizer.state.items():
            for each in (parameter, values["exp_avg"], values["exp_avg_sq"]):
                each.copy_(torch.rand(each.shape, generator=generator))
            values["step"].fill_(step)
        return State(self.modules, self.registered, b"conditions")


def place(step: int, part: int = 0, of: int = 1, tag: str | None = None, branch: int = 0) -> CheckpointShare:
    return CheckpointShare(name_of(branch, step, "nonce"), branch, step, 1, tag, part, of)


def holds(tiers: Tiers, manifest: Manifest) -> bool:
    """Whether a checkpoint, read back, has the very bytes of its step."""
    wanted = Trained().at(manifest.step)
    found = restore(tiers, manifest)
    return found.header == wanted.header and all(map(same_bits, found.tensors, wanted.tensors))


class Crew:
    """Writers of one job, in this process."""

    def __init__(self, tiers: Tiers, num_members: int, keep: int = 3) -> None:
        self.tiers = tiers
        self.events: list[AnyNote] = []
        self.trained = Trained()
        self.writers = [
            CheckpointWriter(tiers, f"w{number}", keep, self.events.append) for number in range(num_members)
        ]

    def take(self, step: int, tag: str | None = None, branch: int = 0) -> None:
        state = self.trained.at(step)
        for part, writer in enumerate(self.writers):
            writer.take(state, place(step, part, len(self.writers), tag, branch))

    def wait(self) -> None:
        assert all(writer.wait(LIMIT_S) for writer in self.writers)

    def save(self, *steps: int, tag: str | None = None) -> None:
        for step in steps:
            self.take(step, tag)
            self.wait()

    @property
    def written(self) -> list[CheckpointWritten]:
        return [event for event in self.events if isinstance(event, CheckpointWritten)]

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


@contextmanager
def crew(url: str | Path, num_members: int = 1, keep: int = 3, local: Path | None = None) -> Iterator[Crew]:
    """Members that write to a store, and whose threads end."""
    members = Crew(open_tiers(str(url), None if local is None else str(local)), num_members, keep)
    try:
        yield members
    finally:
        members.close()


def steps_of(tiers: Tiers) -> list[int]:
    """What is listed, newest first."""
    return [manifest.step for manifest in candidates(tiers)]


S3 = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """A real server that speaks S3, and the environment in which it is found; it has the bucket ``bucket``."""
    server = subprocess.Popen([sys.executable, "-c", S3], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        # It is given a port as it begins to listen.
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        with urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=5):
            pass
        yield {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
        }
    finally:
        server.kill()
        server.communicate()


def flip(path: Path, position: int) -> None:
    """Change one bit of a file in its place."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def num_kills(quick: int) -> int:
    """How many processes a test of kills ends; CRAFT_KILLS asks for more."""
    return int(os.environ.get("CRAFT_KILLS", quick))
