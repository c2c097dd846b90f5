"""Draw the figures in docs/assets: architecture, the life of a step, a loss in milliseconds, the walk of a SIGKILL.

    python tools/figures.py             # write them
    python tools/figures.py --check     # exit with code 1 if one is out of date, or names a file that is not there

Each figure has its background and follows the reader's colour scheme, so that it reads on light and dark pages. The loss
is drawn from docs/assets/loss.json, the output of ``craft why --json`` for a real job.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"

STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 13px }
.back { fill: #ffffff } .box { fill: #e8eef8; stroke: #3d5f94 } .frame { fill: none; stroke: #7d8794; stroke-dasharray: 5 4 }
.hot { fill: #fde3d0; stroke: #b4541a } .good { fill: #dcf0e0; stroke: #2e7d43 } .soft { fill: #eef0f3; stroke: #7d8794 }
text { fill: #1b2530 } .dim { fill: #525e6b } .bold { font-weight: 600 }
.mono { font-family: ui-monospace, monospace; font-size: 12px }
.line { stroke: #3d5f94; fill: none; stroke-width: 1.6 } .wide { stroke: #2e7d43; fill: none; stroke-width: 4 }
.cut { stroke: #b4541a; fill: none; stroke-width: 1.6; stroke-dasharray: 4 3 } .tip { fill: #3d5f94 }
@media (prefers-color-scheme: dark) {
.back { fill: #171c24 } .box { fill: #24344f; stroke: #8fb0e6 } .frame { stroke: #8a94a3 }
.hot { fill: #4a2c19; stroke: #f0a068 } .good { fill: #1d3d28; stroke: #7bcf92 } .soft { fill: #2a303a; stroke: #8a94a3 }
text { fill: #e8edf4 } .dim { fill: #aab4c1 } .line { stroke: #8fb0e6 } .wide { stroke: #7bcf92 }
.cut { stroke: #f0a068 } .tip { fill: #8fb0e6 }
}
"""


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return the whole file."""
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        '<path d="M0 0L8 4L0 8z" class="tip"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    back = f'<rect class="back" width="{width}" height="{height}" rx="10"/>'
    lines = [
        head,
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f"<defs>{tip}</defs>",
        back,
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def box(x: float, y: float, width: float, height: float, text: str = "", kind: str = "box", under: str = "") -> str:
    """Return a rectangle with one or two lines of text in its middle."""
    middle, rows = y + height / 2 + 4.5, [(text, "bold")] + ([(under, "dim")] if under else [])
    found = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    for at, (row, style) in enumerate(rows):
        place = middle + (at - (len(rows) - 1) / 2) * 17
        found += f'<text x="{x + width / 2:g}" y="{place:g}" text-anchor="middle" class="{style}">{escape(row)}</text>'
    return found


def label(x: float, y: float, text: str, kind: str = "dim", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def arrow(*points: tuple[float, float], kind: str = "line", ends: str = "end") -> str:
    path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
    tips = "".join(f' marker-{each}="url(#tip)"' for each in ends.split())
    return f'<path class="{kind}" d="{path}"{tips}/>'


def architecture() -> str:
    """Processes and channels of a job of two hosts."""
    parts = [
        box(30, 30, 220, 52, "people, Prometheus,", "soft", "schedulers, alerts"),
        arrow((250, 56), (340, 56)),
        label(295, 48, "HTTP", anchor="middle"),
        box(340, 24, 200, 64, "lighthouse", "hot", "knows who is there, decides"),
        arrow((540, 56), (650, 56)),
        label(595, 48, "writes", anchor="middle"),
        box(650, 30, 200, 52, "run directory", "soft", "journal, generation, token"),
    ]
    for left, name, workers in ((30, "host A", ("worker 0", "worker 1")), (460, "host B", ("worker 2", "spare"))):
        parts += [
            f'<rect class="frame" x="{left}" y="150" width="390" height="200" rx="8"/>',
            label(left + 12, 170, name),
            box(left + 30, 182, 180, 46, "agent: craft run", "box", "one per host"),
            box(left + 250, 182, 115, 46, "fork server", "soft", "torch imported"),
            arrow((left + 210, 205), (left + 250, 205)),
            arrow(
                (left + 120, 182),
                (left + 120, 118),
                (390 if left < 100 else 490, 118),
                (390 if left < 100 else 490, 88),
                ends="start end",
            ),
            label(left + 128, 143, "WebSocket, one per host"),
        ]
        for at, worker in enumerate(workers):
            x = left + 30 + at * 180
            kind = "soft" if worker == "spare" else "good"
            parts += [
                box(x, 286, 150, 44, worker, kind),
                arrow((x + 75, 286), (x + 75, 228), ends="start end")
                if at == 0
                else arrow((x + 20, 286), (left + 190, 228), ends="start end"),
            ]
        parts.append(label(left + 112, 262, "Unix socket"))
    parts += [
        arrow((105, 330), (105, 378), (715, 378), (715, 330), kind="wide", ends=""),
        arrow((285, 330), (285, 378), kind="wide", ends=""),
        arrow((535, 330), (535, 378), kind="wide", ends=""),
        label(30, 400, "Gloo or NCCL: gradients, control words,"),
        label(30, 418, "acknowledgements. TCP: state for a joiner"),
        arrow((440, 378), (440, 408)),
        box(330, 408, 220, 46, "checkpoint store", "soft", "a directory, or s3://"),
    ]
    return svg(880, 472, "Processes and channels of a CRAFT job", parts)


def step() -> str:
    """The life of a step, for three workers and six microbatches."""
    columns = (
        (120, 250, "compute"),
        (370, 250, "exchange"),
        (620, 110, "acknowledge"),
        (730, 90, "commit"),
        (820, 150, "update"),
    )
    parts = [label(x + width / 2, 34, name, "bold", "middle") for x, width, name in columns]
    for rank in range(3):
        y = 56 + rank * 62
        first, second = 2 * rank, 2 * rank + 1
        parts += [
            label(20, y + 27, f"worker {rank}", "bold"),
            box(120, y, 120, 42, f"microbatch {first}", "box", "forward, backward"),
            box(244, y, 172, 42, f"microbatch {second}", "box", "buckets leave in backward"),
            box(420, y, 90, 42, f"T({first},{second + 1})", "good", "block"),
            box(514, y, 100, 42, "word", "hot", "rides behind"),
            box(626, y, 98, 42, "1 byte", "soft", "to all, log2(n)"),
            box(738, y, 74, 42, "commit", "good"),
            box(826, y, 138, 42, "clip, optimizer,", "soft", "scheduler: your code"),
        ]
    parts += [
        '<path class="cut" d="M729 44V250"/>',
        label(729, 264, "on all, or on none", "bold", "middle"),
        label(120, 290, "gradients:", "bold"),
        label(218, 290, "stay in the worker's buffers until the commit; a retry computes only what no survivor holds"),
        label(120, 312, "tree:", "bold"),
        label(218, 312, "((0 + 1) + (2 + 3)) + (4 + 5), by whichever workers and routes: the same bits"),
        label(120, 334, "control word:", "bold"),
        label(
            218,
            334,
            "logged scalars, stop, checkpoint due, generation that all are ready for, digest of a slice of the state",
        ),
    ]
    return svg(990, 352, "The life of a step", parts)


def loss() -> str:
    """A loss in milliseconds, from what ``craft why --json`` printed."""
    story: dict[str, Any] = json.loads((ASSETS / "loss.json").read_text())

    def at(who: str, begins: str) -> float:
        return next(
            float(each["at_ms"]) for each in story["moments"] if each["who"] == who and each["what"].startswith(begins)
        )

    def x(ms: float) -> float:
        return 120 + (ms + 65) * 4.6 if ms <= 80 else 120 + 145 * 4.6 + (ms - 80) * 0.46

    rows = {name: 60 + row * 50 for row, name in enumerate(("w1", "agent", "lighthouse", "w0", "w2", "w3"))}
    parts = [label(16, y + 20, name, "bold") for name, y in rows.items()]
    for ms in (-50, -25, 0, 25, 50, 75, 200, 350, 500):
        parts += [f'<path class="frame" d="M{x(ms):g} 44V362"/>', label(x(ms), 36, f"{ms} ms", anchor="middle")]

    def bar(who: str, start: float, end: float, text: str, kind: str) -> str:
        return box(x(start), rows[who], x(end) - x(start), 30, text, kind)

    decided, end = at("lighthouse", "decides"), 500.0
    parts += [
        bar("w1", -65, 0, "trains", "box"),
        label(x(2), rows["w1"] + 20, "SIGKILL"),
        label(x(2), rows["agent"] + 20, "sees the death at once: SIGCHLD, no timeout"),
        f'<circle class="hot" cx="{x(0):g}" cy="{rows["agent"] + 15}" r="6"/>',
        f'<circle class="hot" cx="{x(decided):g}" cy="{rows["lighthouse"] + 15}" r="6"/>',
        label(
            x(decided) + 12,
            rows["lighthouse"] + 20,
            f"{decided:.1f} ms: generation 2 of w0 and w2, durable before they are told",
        ),
    ]
    for who, redone in (("w0", "6, 8, 10"), ("w2", "7, 9")):
        told, settled, commits = at(who, "is told"), at(who, "has met"), at(who, "commits")
        parts += [
            bar(who, -65, told, "step 28: computes, then its exchange breaks", "hot"),
            bar(who, told, settled, "meet", "soft"),
            bar(who, settled, commits, f"redoes {redone}", "good"),
            bar(who, commits, end, f"{commits:.0f} ms: step 28 committed", "box"),
        ]
    comes, joins, level = at("w3", "comes"), at("w3", "joins"), at("w3", "keeps pace")
    parts += [
        bar("w3", comes, joins, "script", "soft"),
        bar("w3", joins, level, "state", "good"),
        label(
            x(comes) - 8,
            rows["w3"] + 20,
            f"replacement: forked, joins at {joins:.0f} ms, computes its share from {level:.0f} ms on",
            anchor="end",
        ),
        label(120, 384, f"{story['note']}."),
        label(120, 404, f"Its loss cost {story['cost']['lost_ms']:.0f} ms. The scale changes at 80 ms."),
    ]
    return svg(1010, 420, "A loss in milliseconds", parts)


KILL = (
    (
        "agent",
        (
            ("agent/linux/forkserver.py", "SIGCHLD, exit status"),
            ("agent/supervisor.py", "hands it on"),
            ("agent/host/relay.py", "HostReport with Exited"),
        ),
    ),
    (
        "lighthouse",
        (
            ("control/agents/sessions.py", "decodes the report"),
            ("control/core/report_events.py", "WorkerLost"),
            ("control/core/loop.py", "asks the policies"),
            ("decide/job/observe.py", "event into JobState"),
            ("decide/policies/loss.py", "Reconfigure"),
            ("decide/job/apply.py", "Generation"),
            ("control/core/persistence_file.py", "fsync, then tell"),
            ("control/agents/dispatch.py", "Directive to all agents"),
        ),
    ),
    (
        "survivor",
        (
            ("worker/report/channel.py", "receives the directive"),
            ("worker/membership/client.py", "newer generation"),
            ("worker/membership/group_opening.py", "abort, open"),
            ("groups/gloo.py", "socket shutdown"),
            ("worker/loop/step_runner.py", "leaves the exchange"),
            ("worker/membership/participant.py", "enters, gathers claims"),
            ("decide/step/settle.py", "who redoes what"),
        ),
    ),
)


def walk() -> str:
    """A SIGKILL, file by file."""
    parts, width, gap = [], 300, 24
    for column, (where, files) in enumerate(KILL):
        left = 20 + column * (width + gap)
        parts.append(label(left + width / 2, 34, where, "bold", "middle"))
        for row, (name, what) in enumerate(files):
            y = 48 + row * 54
            parts.append(
                f'<rect class="{("box", "hot", "good")[column]}" x="{left}" y="{y}" width="{width}" height="42" rx="6"/>'
            )
            parts += [label(left + 12, y + 18, name, "mono"), label(left + 12, y + 35, what)]
            if row:
                parts.append(arrow((left + width / 2, y - 12), (left + width / 2, y)))
        if column:
            above = 48 + (len(KILL[column - 1][1]) - 1) * 54 + 21
            side = left - gap / 2
            parts.append(arrow((left - gap, above), (side, above), (side, 69), (left, 69)))
    return svg(3 * width + 2 * gap + 40, 48 + 8 * 54, "A SIGKILL, file by file", parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with code 1 if a figure is out of date"
    )
    check = parser.parse_args().check
    files = [name for _, column in KILL for name, _ in column]
    found = [f"walk_kill.svg: there is no {name}" for name in files if not (ROOT / "src" / "craft" / name).exists()]
    for name, make in {"architecture": architecture, "step": step, "loss": loss, "walk_kill": walk}.items():
        path, text = ASSETS / f"{name}.svg", make()
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            found.append(f"{path.name}: out of date; run python tools/figures.py")
    for each in found:
        print(each)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
