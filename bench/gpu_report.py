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
LIMIT_S = 480.0
"""Of a run with all parts."""


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
            yield f"{name}: {_bits(result, name)}"
    if "took_s" in result:
        yield f"all of it took {result['took_s']:.0f} s"
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
    if part["faults"]:
        yield from _join_lines(name, part["faults"])
    if "snapshots" in part:
        found = part["snapshots"]
        ways = ", ".join(
            f"{kind} {found[f'median_{kind}']:.3f} s ({len(found[kind])})"
            for kind in ("copied", "written", "without")
            if found[kind]
        )
        lasted = statistics.median(found["seconds"])
        yield f"{name}: steps while a snapshot is: {ways}; from the copy until it is listed: {lasted:.1f} s"


PARTS = {
    "steps": "process and script, to its first step",
    "told": "told of a generation",
    "entered": "groups open (Gloo, NCCL)",
    "settled": "the others come to a step boundary",
    "fetched": "the state is on the device",
    "state": "loaded and compared",
    "first_commit": "first commit",
    "level": "keeps pace",
    "computed": "commits a step that it computed some of",
}
"""What a worker that joins goes through, one after the other. The first two and the groups are what they are whatever the state;
to the boundary it is part of a step."""


def parts_of(faults: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds that each part of joining took: the median of all who joined."""
    found = {}
    for before, name in zip((None, *PARTS), PARTS, strict=False):
        each = [fault[f"{name}_s"] - (fault[f"{before}_s"] if before is not None else 0.0) for fault in faults]
        found[name] = statistics.median(value for value in each if value == value)
    return found


def _join_lines(name: str, faults: list[dict[str, Any]]) -> Iterator[str]:
    first, whole = (statistics.median(fault[key] for fault in faults) for key in ("first_commit_s", "computed_s"))
    yield (
        f"{name}: who takes the place commits {first:.1f} s after the start of its process, and takes its full part after"
        f" {whole:.1f} s (medians); the survivors' slowest step meanwhile:"
        f" {max(fault['survivors_slowest_s'] for fault in faults):.2f} s"
    )
    parts = parts_of(faults)
    yield f"{name}: of that: " + "; ".join(f"{words} {parts[part]:.2f} s" for part, words in PARTS.items())


def _bits(result: dict[str, Any], name: str) -> str:
    part = result[name]
    if "digest" not in part:
        return f"did not end: {part.get('did_not_end', '')[:300]}"
    same = result.get("bits", {}).get(name, "was not looked at")
    return f"{part['steps']} steps, same bits as one undisturbed worker: {same}"


def checks(result: dict[str, Any]) -> Iterator[Check]:
    """The bars, for whatever was measured."""
    if "took_s" in result:
        yield Check("time", f"{result['took_s']:.0f} s", f"at most {LIMIT_S:.0f} s", result["took_s"] <= LIMIT_S)
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
        if part.get("faults"):
            yield from _fault_checks(name, part)
            same = result.get("bits", {}).get(name, False)
            yield Check(f"{name}: bits", str(same), "those of the undisturbed run", same)
        if "snapshots" in part and part["faults"] and "bandwidths" in result:
            yield from _join_checks(name, part, result["bandwidths"])
        if "snapshots" in part:
            found = part["snapshots"]
            for kind in ("copied", "with"):
                slower = found[f"median_{kind}"] / found["median_without"]
                what = "in which it is copied" if kind == "copied" else "until it is written"
                yield Check(
                    f"{name}: snapshot, steps {what}",
                    f"{slower:.3f}",
                    f"at most {MAX_SNAPSHOT}",
                    slower <= MAX_SNAPSHOT,
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


def _join_checks(name: str, part: dict[str, Any], rates: dict[str, float]) -> Iterator[Check]:
    """Against what the state of the large model, parameters and AdamW's in bfloat16, takes over loopback and to the device.

    Both ways: all of it, as the bar says; and from where the state is asked for until it is loaded, which bandwidths govern.
    """
    size_gb = LARGE_PARAMS * 3 * 2 / 1e9
    allowed_s = 1.5 * (size_gb / rates["loopback"] + size_gb / rates["to_device"])
    bar = f"1.5 times what bandwidths allow: {allowed_s:.2f} s"
    all_s = statistics.median(fault["first_commit_s"] for fault in part["faults"])
    yield Check(f"{name}: from a process's start to its first commit", f"{all_s:.2f} s", bar, all_s <= allowed_s)
    state_s = statistics.median(fault["state_s"] - fault["settled_s"] for fault in part["faults"])
    yield Check(f"{name}: of that, the state", f"{state_s:.2f} s", bar, state_s <= allowed_s)


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


def write(result: dict[str, Any], folder: Path) -> str:
    """Write the text of whatever was measured so far; return it."""
    text = "\n".join([str(result["environment"]), "", *lines(result), "", *map(str, checks(result))]) + "\n"
    (folder / "gpu.txt").write_text(text)
    return text


def main(folder: Path) -> int:
    result = json.loads((folder / "gpu.json").read_text())
    print(write(result, folder))
    draw(result, folder / "gpu.png")
    return 0 if all(check.passed for check in checks(result)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
