"""The findings of ``bench/fuzz_http.py`` against their bars."""

from __future__ import annotations

from typing import Any

from bench.verdict import Check, Summary

MAX_GROWN_MB = 16.0


def summarize_fuzz(result: dict[str, Any]) -> Summary:
    grown_mb = result["grown_bytes"] / 1e6
    errors = len(result["failures"])
    effects = {name: count for name, count in result["actions"].items() if name != "Reconfigure"}
    calm = result["generation"] == 1 and result["faults"] == 0 and not effects and result["steps"] > 0
    checks = (
        Check("answers that are a 5xx", str(errors), "none", errors == 0),
        Check("requests without an answer", str(result["silent"]), "none", result["silent"] == 0),
        Check("the lighthouse", "lives" if result["same_lighthouse"] else "died", "lives", result["same_lighthouse"]),
        Check("its memory grew by", f"{grown_mb:.1f} MB", f"at most {MAX_GROWN_MB:g} MB", grown_mb <= MAX_GROWN_MB),
        Check(
            "training meanwhile",
            f"{result['steps']} steps, generation {result['generation']}, {result['faults']} faults",
            "steps, no other generation, no fault, nothing done",
            calm,
        ),
    )
    rows = tuple((status, str(count)) for status, count in result["statuses"].items())
    return Summary(
        title=f"{result['sent']} fuzzed requests in {result['seconds']:.0f} s; {result['closed']} connections were ended",
        header=("status", "answers"),
        rows=rows,
        checks=checks,
        figures={"per_s": result["sent"] / result["seconds"]},
    )
