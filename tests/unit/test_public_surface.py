"""The whole public surface, as literal lists: whoever adds or removes a name says so here."""

from __future__ import annotations

import subprocess
import sys

import pytest

import craft

IMPORTED_BY = "import sys, craft; print(sorted(name for name in sys.modules if name.partition('.')[0] == 'torch'))"


def public_names(kind: type) -> list[str]:
    return sorted(name for name in dir(kind) if not name.startswith("_"))


def test_craft_exports_exactly_these_names() -> None:
    assert sorted(craft.__all__) == [
        "BitsDiffer",
        "Change",
        "ConfigError",
        "CraftError",
        "Fenced",
        "GroupError",
        "Guest",
        "Job",
        "Step",
        "Unreachable",
        "attend",
        "dcp",
        "events",
        "join",
        "techniques",
    ]


def test_every_exported_name_is_there_and_the_list_is_sorted() -> None:
    assert craft.__all__ == sorted(craft.__all__) == dir(craft)
    assert all(getattr(craft, name) is not None for name in craft.__all__)


def test_importing_craft_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED_BY], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"


def test_a_job_has_exactly_these_attributes() -> None:
    assert public_names(craft.Job) == [
        "all_reduce",
        "attempts",
        "barrier",
        "branch",
        "broadcast_object",
        "checkpoint",
        "checkpoints",
        "device",
        "epoch",
        "epochs",
        "evaluate",
        "generation",
        "is_leader",
        "local_rank",
        "mesh",
        "num_replicas",
        "on",
        "once",
        "paused",
        "rank",
        "rank_in_replica",
        "register",
        "register_state",
        "replica_rank",
        "replica_size",
        "replicate",
        "step",
        "steps",
        "stop",
        "worker_id",
        "world_size",
    ]


def test_a_guest_has_exactly_these_attributes() -> None:
    assert public_names(craft.Guest) == [
        "await_slot",
        "begin_again",
        "direct",
        "exchange_began",
        "exchange_ended",
        "exchanging",
        "finish",
        "free_or_end",
        "generation",
        "leaving",
        "members",
        "on_change",
        "paused",
        "place",
        "saved",
        "step",
        "tell",
        "variables",
        "worker_id",
    ]


def test_a_step_has_exactly_these_methods() -> None:
    assert public_names(craft.Step) == ["carry", "gather", "last_of_epoch", "log", "weight"]


def test_an_attempt_has_exactly_these_methods() -> None:
    from craft.worker.api.attempts import StepAttempt

    assert public_names(StepAttempt) == ["carry", "gather", "log", "microbatches"]


def test_storage_for_distributed_checkpoints_is_a_writer_and_a_reader() -> None:
    from craft import dcp

    assert dcp.__all__ == ["StorageReader", "StorageWriter"]


def test_a_name_that_is_not_exported_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'craft' has no attribute 'nonsense'"):
        craft.nonsense  # noqa: B018
