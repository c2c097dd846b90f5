"""Where groups that are not CRAFT's meet, and what their workers find in the environment."""

from __future__ import annotations

from typing import Any

import torch.distributed

from craft.protocol.membership import Generation, Member
from craft.worker.external.external_store import ExternalStore, variables

dist: Any = torch.distributed


def test_a_store_of_torchs_answers_at_the_workers_own_address() -> None:
    external_store = ExternalStore("127.0.0.1")
    client = dist.TCPStore("127.0.0.1", external_store.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    assert client.get("key") == b"value"


def test_variables_are_those_of_torchrun_on_two_hosts() -> None:
    members = tuple(
        Member(
            worker_id=f"w{number}", host=f"h{number // 2}", address=f"10.0.0.{number // 2}", store_port=4000 + number
        )
        for number in range(4)
    )
    found = variables(Generation(number=3, nonce="a", members=members), "w3")
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    }  # fmt: skip
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.0", "4000"), "the store of rank 0"
