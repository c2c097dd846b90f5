"""Turns the figures of ``bench/gpu.py`` into a text table, a chart and a verdict against the bars.

``python -m bench.gpu_report FOLDER`` writes gpu.txt and gpu.png beside gpu.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.stats import paired_ratio, trimmed_ratio
from bench.verdict import Check

BEYOND_STEP_S = {"SIGKILL": 0.5, "SIGSTOP": 1.5}
MIN_FAULTS = 10
"""Of each kind."""
MAX_OVERHEAD = 1.10
MAX_COPIES = 1.0
MAX_SNAPSHOT = 1.05
LARGE_PARAMS = 953_223_168


def lines(result: dict[str, Any]) -> Iterator[str]:
    """One line for each figure."""
    for name, part in result.items():
        if not isinstance(part, dict) or name == "environment":
            continue
        if "failed" in part:
            yield f"{name}: FAILED: {part['failed'][:300]}"
        elif "blocks" in part:
            yield from _overhead_lines(name, part)
        elif "faults" in part:
            yield from _fault_lines(name, part)
    if "bandwidths" in result:
        found = {key: value for key, value in result["bandwidths"].items() if key != "took_s"}
        yield "bandwidths in GB/s: " + ", ".join(f"{key} {value:.1f}" for key, value in found.items())


def _overhead_lines(name: str, part: dict[str, Any]) -> Iterator[str]:
    steps = part["steps_per_block"]
    ours, plain = (statistics.median(block[side] for block in part["blocks"]) / steps for side in (0, 1))
    ratio = paired_ratio([(a, b) for a, b in part["blocks"]], trimmed_ratio)
    yield (
        f"{name}: {part['params'] / 1e6:.0f}M parameters, step {ours * 1e3:.0f} ms, DDP {plain * 1e3:.0f} ms,"
        f" ratio {ratio.value:.3f} (95%: {ratio.low:.3f} to {ratio.high:.3f}), {len(part['blocks'])} pairs of blocks"
    )
    between, within = copies(part)
    yield f"{name}: device memory beyond DDP's, in gradients of the model: {between:.2f} between steps, {within:.2f} at most"


def copies(part: dict[str, Any]) -> tuple[float, float]:
    """What CRAFT holds on the device beyond DDP, in gradients of the whole model (bfloat16): between steps, and at most."""
    ours, plain = part["memory"]["craft"], part["memory"]["ddp"]
    gradient = 2 * part["params"]
    return (ours[0] - plain[0]) / gradient, (ours[1] - plain[1]) / gradient


def step_of(part: dict[str, Any]) -> float:
    """An undisturbed step of all workers, from before the first loss. Later ones have steps of fewer workers before them."""
    return float(part["faults"][0]["step_s"])


def beyond_step(part: dict[str, Any], kind: str) -> list[float]:
    """Seconds to the survivors' next commit, beyond one step, for every loss of this kind."""
    return [fault["recovery_s"] - step_of(part) for fault in part["faults"] if fault["signal"] == kind]


def _fault_lines(name: str, part: dict[str, Any]) -> Iterator[str]:
    for kind in BEYOND_STEP_S:
        beyond = beyond_step(part, kind)
        if beyond:
            yield (
                f"{name}: {kind}, {len(beyond)} times: step {step_of(part) * 1e3:.0f} ms; to the survivors' next commit,"
                f" beyond one step: {statistics.median(beyond) * 1e3:.0f} ms median, {max(beyond) * 1e3:.0f} ms at most"
            )
    keys = ("steps_s", "state_s", "first_commit_s")
    middle = {key: statistics.median(fault[key] for fault in part["faults"]) for key in keys}
    yield (
        f"{name}: who takes the place: its script is at the first step after {middle['steps_s']:.1f} s, has the state after"
        f" {middle['state_s']:.1f} s, commits after {middle['first_commit_s']:.1f} s (medians); the survivors' slowest step"
        f" meanwhile: {max(fault['survivors_slowest_s'] for fault in part['faults']):.2f} s"
    )
    if "snapshots" in part:
        found = part["snapshots"]
        yield (
            f"{name}: step with a snapshot beside it {found['median_with']:.3f} s ({len(found['with'])}), without"
            f" {found['median_without']:.3f} s ({len(found['without'])})"
        )
    yield f"{name}: {part['steps']} steps, same bits as one undisturbed worker: {part['same_bits']}"


def checks(result: dict[str, Any]) -> Iterator[Check]:
    """The bars, for whatever was measured."""
    for name, part in result.items():
        if not isinstance(part, dict) or "failed" in part:
            continue
        if "blocks" in part:
            ratio = paired_ratio([(a, b) for a, b in part["blocks"]], trimmed_ratio)
            yield Check(
                f"{name}: step against DDP",
                f"{ratio.high:.3f}",
                f"95% limit at most {MAX_OVERHEAD}",
                ratio.high <= MAX_OVERHEAD,
            )
            most = copies(part)[1]
            yield Check(f"{name}: memory", f"{most:.2f}", f"at most {MAX_COPIES} gradient more", most <= MAX_COPIES)
        if "faults" in part:
            yield from _fault_checks(name, part)
        if "snapshots" in part and "bandwidths" in result:
            yield _join_check(name, part, result["bandwidths"])
        if "snapshots" in part:
            ratio_s = part["snapshots"]["median_with"] / part["snapshots"]["median_without"]
            yield Check(
                f"{name}: step with a snapshot", f"{ratio_s:.3f}", f"at most {MAX_SNAPSHOT}", ratio_s <= MAX_SNAPSHOT
            )


def _fault_checks(name: str, part: dict[str, Any]) -> Iterator[Check]:
    for kind, limit in BEYOND_STEP_S.items():
        beyond = beyond_step(part, kind)
        if beyond:
            middle = statistics.median(beyond)
            fine = middle <= limit and len(beyond) >= MIN_FAULTS
            bar = f"one step and {limit} s, at least {MIN_FAULTS} times"
            yield Check(f"{name}: {kind}, {len(beyond)} times", f"{middle:.3f} s", bar, fine)
    worst = max(fault["survivors_slowest_s"] for fault in part["faults"])
    limit_s = 1.5 * step_of(part) + 0.2
    what = f"{name}: survivors' slowest step while another joins"
    yield Check(what, f"{worst:.2f} s", f"1.5 steps and 0.2 s: {limit_s:.2f} s", worst <= limit_s)
    yield Check(f"{name}: bits", str(part["same_bits"]), "those of the undisturbed run", part["same_bits"])


def _join_check(name: str, part: dict[str, Any], rates: dict[str, float]) -> Check:
    """What the state of the large model, parameters and AdamW's in bfloat16, would take over loopback and to the device."""
    size_gb = LARGE_PARAMS * 3 * 2 / 1e9
    allowed_s = 1.5 * (size_gb / rates["loopback"] + size_gb / rates["to_device"])
    took_s = statistics.median(fault["first_commit_s"] for fault in part["faults"])
    return Check(
        f"{name}: from a process's start to its first commit",
        f"{took_s:.1f} s",
        f"{allowed_s:.1f} s",
        took_s <= allowed_s,
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Every fault as a dot, beside the bar of its kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    places: list[str] = []
    for name, part in result.items():
        for kind, limit in BEYOND_STEP_S.items():
            faulty = isinstance(part, dict) and "faults" in part
            beyond = [1e3 * each for each in beyond_step(part, kind)] if faulty else []
            if beyond:
                place = len(places)
                places.append(f"{name}\n{kind}")
                axes.bar(place, statistics.median(beyond), width=0.55, color="#1f6f8b", alpha=0.85)
                axes.scatter([place] * len(beyond), beyond, s=12, color="black", alpha=0.55, zorder=3)
                axes.hlines(1e3 * limit, place - 0.4, place + 0.4, color="#b0563a", linestyle="--")
    axes.set_xticks(range(len(places)), places)
    axes.set_ylabel("ms beyond one step (dashed: the bar)")
    axes.set_title("Loss of one of three workers on one GPU, to the survivors' next commit", loc="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(folder: Path) -> int:
    result = json.loads((folder / "gpu.json").read_text())
    verdicts = list(checks(result))
    text = "\n".join([str(result["environment"]), "", *lines(result), "", *map(str, verdicts)]) + "\n"
    (folder / "gpu.txt").write_text(text)
    draw(result, folder / "gpu.png")
    print(text)
    return 0 if all(check.passed for check in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
