"""What is said of a machine: each measurement that is bad has its own line, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from craft.decide.step.gradient_memory import held
from craft.doctor.findings import Device, Machine, TokenFile, Torch
from craft.doctor.judge import costs, judge, size

GIB = 1 << 30
GOOD = Machine(
    python="3.11.7",
    cpus=8,
    memory_bytes=16 * GIB,
    shared_bytes=8 * GIB,
    open_files=20000,
    pidfd=True,
    synchronised=True,
    ports=28000,
    loopback_mb_s=2000.0,
    folder="/runs",
    folder_free_bytes=100 * GIB,
    folder_mb_s=500.0,
    tokens=(TokenFile(path="token", mode=0o600, own=True),),
)
TORCH = Torch(version="2.13.0+cpu", threads=4, abort_ms=3.0)
GPU = Device(name="H200", free_bytes=100 * GIB, total_bytes=140 * GIB, to_host_gb_s=51.0, to_device_gb_s=50.0)


def test_a_good_machine_has_neither_problems_nor_warnings() -> None:
    assert {finding.grade for finding in judge(GOOD, TORCH, 4)} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "subject", "grade"),
    [
        ({"python": "3.9.1"}, "Python", "problem"),
        ({"cpus": 2}, "CPUs", "warning"),
        ({"shared_bytes": 64 << 20}, "shared memory", "warning"),
        ({"shared_bytes": None}, "shared memory", "problem"),
        ({"open_files": 1000}, "files", "warning"),
        ({"open_files": 100}, "files", "problem"),
        ({"pidfd": False}, "kernel", "problem"),
        ({"synchronised": False}, "clock", "warning"),
        ({"ports": None}, "ports", "problem"),
        ({"ports": 50}, "ports", "warning"),
        ({"loopback_mb_s": None}, "loopback", "problem"),
        ({"loopback_mb_s": 20.0}, "loopback", "warning"),
        ({"folder_mb_s": None}, "disk", "problem"),
        ({"folder_mb_s": 5.0}, "disk", "warning"),
        ({"folder_free_bytes": 1000}, "disk", "warning"),
        ({"tokens": (TokenFile(path="token", mode=0o644, own=True),)}, "token", "problem"),
        ({"tokens": (TokenFile(path="token", mode=0o600, own=False),)}, "token", "problem"),
    ],
)
def test_what_is_bad_about_the_machine_is_the_one_line_that_says_what_to_do(
    changes: dict[str, Any], subject: str, grade: str
) -> None:
    (bad,) = [finding for finding in judge(replace(GOOD, **changes), TORCH, 4) if finding.grade != "ok"]
    assert (bad.subject, bad.grade) == (subject, grade)
    assert bad.advice


@pytest.mark.parametrize(
    ("torch", "subject", "grade"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "torch", "problem"),
        (replace(TORCH, version="2.8.0"), "torch", "problem"),
        (replace(TORCH, version="2.99.0"), "torch", "warning"),
        (replace(TORCH, abort_ms=None, abort_error="still blocked"), "Gloo", "problem"),
        (replace(TORCH, abort_ms=5000.0), "Gloo", "warning"),
        (replace(TORCH, devices=(replace(GPU, to_host_gb_s=1.0),)), "GPU 0", "warning"),
    ],
)
def test_what_is_bad_about_torch_is_the_one_line_that_says_what_to_do(
    torch: Torch | str, subject: str, grade: str
) -> None:
    (bad,) = [finding for finding in judge(GOOD, torch, 4) if finding.grade != "ok"]
    assert (bad.subject, bad.grade) == (subject, grade)
    assert bad.advice


def test_no_gpu_is_no_problem_and_health_that_is_not_available_is_said_only_where_there_is_one() -> None:
    machine = replace(GOOD, gpu_health="the package nvidia-ml-py is not installed")
    assert "none" in next(finding.found for finding in judge(machine, TORCH, 1) if finding.subject == "GPUs")
    (health,) = [
        finding for finding in judge(machine, replace(TORCH, devices=(GPU,)), 1) if finding.subject == "GPU health"
    ]
    assert health.grade == "warning"
    assert health.found.startswith("not available: the package")


def test_sizes_are_for_people() -> None:
    assert [size(number) for number in (0, 1023, 2048, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "2.0 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    text = costs(1e9, "bf16", 2, 4, 4, held(4, 4)).found
    assert "a gradient is 1.9 GiB; on a GPU it takes 3.7 GiB to hold gradients there" in text
    assert "1.9 GiB with --hold host (and 1.9 GiB of pinned memory) or --hold recompute; on the CPU 5.1 GiB" in text
