"""The figures of ``bench/completion.py`` against their bars."""

from __future__ import annotations

from typing import Any

from bench.verdict import Check, Summary

MAX_SLOWDOWN = 1.08
NAMES = {
    "craft": "CRAFT",
    "torchft": "torchft",
    "torchft-tuned": "torchft tuned",
    "checkpoint-restart": "torchrun, checkpoints",
}


def summarize_completion(result: dict[str, Any]) -> Summary:
    runs = {(each["system"], each["kind"]): each for each in result["runs"]}
    figures: dict[str, Any] = {}
    rows = []
    for system, name in NAMES.items():
        calm, hit = runs.get((system, "undisturbed")), runs.get((system, "disturbed"))
        if calm is None or hit is None:
            continue
        slowdown = hit["seconds"] / calm["seconds"]
        figures[system] = {
            "undisturbed_s": calm["seconds"], "disturbed_s": hit["seconds"], "slowdown": slowdown, "kills": len(hit["kills"]),
            "trained": hit["trained"], "lost": hit["lost"], "repeated": hit["repeated"],
            "undisturbed_loss": calm["loss"], "disturbed_loss": hit["loss"],
        }  # fmt: skip
        seconds = (f"{calm['seconds']:.1f}", f"{hit['seconds']:.1f}", f"{100 * (slowdown - 1):+.1f}%")
        samples = (str(hit["lost"]), str(hit["repeated"]))
        rows.append((name, *seconds, str(len(hit["kills"])), *samples, f"{calm['loss']:.4f}", f"{hit['loss']:.4f}"))
    size, limits = result["length"], result["limits"]
    return Summary(
        title=f"Time to train {size['steps']} steps of {4 * size['samples']} samples, FSDP2 over 2 replicas of 2 workers, with a "
        f"SIGKILL of one\nprocess every {result['settings']['every']:.0f} s. torchft starts the whole group again at once; "
        f"torchrun has a save every {limits['save_every']} steps.\nlost: samples in no step of the final model. "
        "repeated: trained, thrown away, and trained again.",
        header=(
            "system",
            "undisturbed (s)",
            "disturbed (s)",
            "more",
            "kills",
            "lost",
            "repeated",
            "loss",
            "loss, disturbed",
        ),
        rows=tuple(rows),
        checks=tuple(_checks(runs, figures)),
        figures=figures,
    )


def _checks(runs: dict[tuple[str, str], dict[str, Any]], figures: dict[str, Any]) -> list[Check]:
    if "craft" not in figures:
        return []
    craft, calm, hit = figures["craft"], runs["craft", "undisturbed"], runs["craft", "disturbed"]
    wrong = [*calm["violations"], *hit["violations"]]
    same = calm["digest"] == hit["digest"] and calm["digest"] is not None
    slower, most = 100 * (craft["slowdown"] - 1), 100 * (MAX_SLOWDOWN - 1)
    astray = craft["lost"] + craft["repeated"]
    return [
        Check("time of CRAFT beyond its undisturbed one", f"{slower:.1f}%", f"at most {most:.0f}%", slower <= most),
        Check("final bits of CRAFT", "the undisturbed ones" if same else "others", "the undisturbed ones", same),
        Check("samples that CRAFT lost or repeated", str(astray), "none", astray == 0),
        Check("what the checker of CRAFT's history says", "; ".join(wrong) or "nothing", "nothing", not wrong),
    ]
