"""``craft chaos``: inject faults into a running job, through its lighthouse."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from craft.cli.output.command_errors import EXIT_BAD_INPUT, explained
from craft.cli.output.echo import echo
from craft.cli.output.options import run_option
from craft.protocol.errors import ConfigError, CraftError, Unreachable
from craft.protocol.values.injections import KINDS

if TYPE_CHECKING:
    from craft.testing.chaos import ChaosFault, Planned
    from craft.wire.client import Client

EXIT_JOB_FAILED = 1
_LOOK_S = 0.2
_AWAY_S = 30.0
"""A lighthouse that does not answer for this long is gone."""


@click.command()
@run_option
@click.option("--kinds", default=",".join(KINDS), help=f"Which faults, of {', '.join(KINDS)}.  [default: all]")
@click.option("--every", default="5s", show_default=True, help="Mean time between two faults; it is random.")
@click.option("--schedule", help='Faults at given times instead: "10s:kill w1, 20s:stop".')
@click.option("--for", "length", help="How long.  [default: until the job ends, or the schedule]")
@click.option("--seed", type=int, help="The same seed gives the same kinds at the same times.  [default: by the clock]")
@click.option("--slow-by", default="100ms", show_default=True, help="How much longer a microbatch takes under 'slow'.")
@click.option("--slow-for", default="5s", show_default=True, help="How long 'slow' lasts.")
@click.option("--yes", is_flag=True, help="Do it also in a job that was not started with --chaos.")
@explained
def chaos(
    run_dir: Path | None,
    kinds: str,
    every: str,
    schedule: str | None,
    length: str | None,
    seed: int | None,
    slow_by: str,
    slow_for: str,
    yes: bool,
) -> None:
    """Inject faults into a running job, and print each.

    At least one worker that has the training state is always left alone. Faults that would break this wait for a better
    moment, or are left out.

    \b
    Example:
      craft chaos --every 5s --for 2m --seed 1
      craft chaos --kinds kill,stop --dir craft-run-1
      craft chaos --schedule "10s:kill w1, 20s:kill-lighthouse"

    Exit codes: 0 done, or the job ended well meanwhile; 1 the job failed; 2 bad input, or not confirmed.
    """
    from craft.settings.rundir import find_run
    from craft.testing.chaos import draw_plan, parse_duration, parse_kinds, parse_schedule, possible
    from craft.wire.client import Client

    wanted, mean_s = parse_kinds(kinds), parse_duration(every)
    limit_s = None if length is None else parse_duration(length)
    slow = {"delay_ms": 1e3 * parse_duration(slow_by), "seconds": parse_duration(slow_for)}
    if mean_s <= 0:
        raise ConfigError("--every must be more than 0")
    planned = None if schedule is None else parse_schedule(schedule)
    client = Client.of_run(find_run(run_dir))
    status = client.get_status()
    sure = _confirm(status, yes)
    seed = random.randrange(2**32) if seed is None else seed
    if planned is None:
        possible_kinds = possible(
            wanted,
            slots=status["slots"],
            hosts=len(status["agents"]),
            replica_size=status.get("replica_size", 1),
        )
        if not possible_kinds:
            raise ConfigError(f"a job of this size would not survive any of {kinds}: it needs a second worker or host")
        plan: Iterator[Planned] = draw_plan(possible_kinds, mean_s, seed)
        echo(f"seed {seed}: {', '.join(dict.fromkeys(possible_kinds))}, every {mean_s:g} s on average")
    else:
        plan = iter(planned)
    raise SystemExit(_Chaos(client, seed, sure, slow).run(plan, limit_s))


def _confirm(status: dict[str, Any], yes: bool) -> bool:
    """Return whether to insist; end the command if the user does not confirm."""
    if status["chaos"]:
        return False
    question = "this job was not started for chaos: go on?"
    if not yes and not (sys.stdin.isatty() and click.confirm(question)):
        echo(f"craft: {question} Say so with --yes, or start the job with --chaos", err=True)
        raise SystemExit(EXIT_BAD_INPUT)
    return True


class _Chaos:
    """One call of the command."""

    def __init__(self, client: Client, seed: int, sure: bool, slow: dict[str, float]) -> None:
        from craft.testing.chaos import Chooser

        self._client = client
        self._chooser = Chooser(seed)
        self._sure = sure
        self._slow = slow
        self._began = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._left_out = 0
        self._status: dict[str, Any] = {}

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def run(self, plan: Iterator[Planned], limit_s: float | None) -> int:
        """Inject faults until the plan, the time or the job ends; return the exit code."""
        late_s = 0.0
        for planned in plan:
            # A fault that had to wait delays all later ones: two must not come at once because the first was late.
            due = planned.at_s + late_s
            if not self._wait(due if limit_s is None else min(due, limit_s)) or (limit_s or due) < due:
                break
            if not self._inject(planned):
                break
            late_s = max(late_s, self._elapsed_s - planned.at_s)
        return self._summary()

    def _wait(self, moment_s: float) -> bool:
        """Watch the job until ``moment_s``; return False if it has ended."""
        while self._look():
            left_s = moment_s - self._elapsed_s
            if left_s <= 0:
                return True
            time.sleep(min(_LOOK_S, left_s))
        return False

    def _look(self) -> bool:
        """Read the status; return False once the job is over. The lighthouse may be away for a moment."""
        away = time.monotonic()
        while True:
            try:
                self._status = self._client.get_status()
                break
            except Unreachable:
                if time.monotonic() - away > _AWAY_S:
                    return False
                time.sleep(_LOOK_S)
        self._chooser.see(self._status, time.monotonic())
        return self._status["state"] in ("forming", "running", "restoring")

    def _inject(self, planned: Planned) -> bool:
        """Inject a fault as soon as possible; return False if the job has ended."""
        from craft.testing.chaos import PATIENCE_S, NotNow

        deadline = self._elapsed_s + PATIENCE_S
        while True:
            found = self._chooser.choose(planned.kind, planned.victim)
            reason = found.reason if isinstance(found, NotNow) else self._order(found)
            if reason is None:
                return True
            if self._elapsed_s > deadline:
                self._left_out += 1
                self._say(planned.kind, planned.victim or "-", f"left out: {reason}")
                return True
            if not self._wait(self._elapsed_s + _LOOK_S):
                return False

    def _order(self, fault: ChaosFault) -> str | None:
        """Ask the lighthouse for it; return why it refuses."""
        details: dict[str, Any] = {"worker_id": fault.worker_id, "host": fault.host}
        lasts_s = 0.0
        if fault.kind == "slow":
            details.update(self._slow)
            lasts_s = self._slow["seconds"]
        try:
            self._client.inject(fault.kind, sure=self._sure, **details)
        except Unreachable:
            return "no lighthouse answers"
        except CraftError as error:
            return str(error)
        self._chooser.injected(fault, lasts_s)
        self._counts[fault.kind] += 1
        self._say(fault.kind, fault.victim)
        return None

    def _say(self, kind: str, victim: str, more: str = "") -> None:
        moment = time.strftime("%H:%M:%S")
        echo(f"{moment} {self._elapsed_s:7.1f} s  {kind:15} {victim}" + (f"  ({more})" if more else ""))

    def _summary(self) -> int:
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(self._counts.items()))
        left_out = f"; {self._left_out} left out" if self._left_out else ""
        echo(f"{sum(self._counts.values())} faults in {self._elapsed_s:.1f} s: {counts or 'none'}{left_out}")
        status = self._status
        if not status:
            return 0
        reason = f" ({status['reason']})" if status["reason"] else ""
        echo(f"the job: {status['state']}{reason}, step {status['step']}, generation {status['generation']}")
        return EXIT_JOB_FAILED if status["state"] == "failed" or status["exit_code"] else 0
