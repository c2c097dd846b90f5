"""``craft run``: start a job on this host and run it to its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from craft.cli.output.echo import echo_error
from craft.cli.output.options import FILE, FOLDER, technique_options
from craft.protocol.errors import ConfigError, CraftError, Unauthorized
from craft.settings.run import resolve, write_effective
from craft.settings.rundir import claim, claim_new
from craft.settings.techniques import Wishes
from craft.telemetry.text import stdio


class _Resume(click.Command):
    """Allows ``--resume`` without a value: what follows is then the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {
            name for each in self.params if isinstance(each, click.Option) and not each.is_flag for name in each.opts
        }
        place = 0
        # Up to the script: everything after it belongs to the script.
        while place < len(args) and args[place].startswith("-"):
            value = args[place + 1] if place + 1 < len(args) else ""
            if args[place] == "--resume" and value != "auto" and not value.isdigit():
                args = [*args[:place], "--resume=auto", *args[place + 1 :]]
            place += 2 if args[place] in valued else 1
        return super().parse_args(ctx, args)


@click.command(cls=_Resume, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--workers", type=int, help="Workers on this host.  [default: 1]")
@click.option("--spares", type=int, help="Further workers that wait for a free slot.  [default: 0]")
@click.option("--min-workers", type=int, help="Give up when fewer are left and no replacement comes.  [default: 1]")
@click.option(
    "--workers-per-replica",
    type=int,
    help="Workers that hold one copy of the model together, each a part of it.  [default: 1]",
)
@click.option("--max-restarts", type=int, help="Workers started in the place of lost ones, at most.  [default: 1000]")
@click.option(
    "--on-loss",
    type=click.Choice(["redo", "shrink", "wait", "auto"]),
    help="What becomes of lost microbatches; wait: for who takes the lost worker's place; auto: redo, and fill the lost"
    " slot only if that pays.  [default: redo]",
)
@click.option("--threads", type=int, help="Threads of each worker; bits depend on it.  [default: OMP_NUM_THREADS or 1]")
@click.option(
    "--preload", metavar="MODULES", help="Modules to import once for all workers, such as transformers.trainer."
)
@click.option(
    "--tee",
    type=click.Choice(["leader", "all", "none"]),
    help="Whose output is shown here, beside the workers' logs.  [default: leader]",
)
@click.option("--dir", "run_dir", type=FOLDER, help="Run directory.  [default: craft-run-TIME]")
@click.option("--lighthouse", help="URL of a running lighthouse.  [default: start one]")
@click.option("--token-file", type=FILE, help="File with the lighthouse's token.")
@click.option(
    "--tls-ca", type=FILE, help="Certificate of the authority of a lighthouse at https://, or the lighthouse's own."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port of the lighthouse that is started.  [default: a free one]"
)
@click.option(
    "--check-bits/--no-check-bits", default=None, help="Compare microbatches' bits between workers in the first steps."
)
@click.option(
    "--check-script/--no-check-script",
    default=None,
    help="Refuse loops that would go wrong unseen, such as with an optimizer that is not registered.",
)
@click.option(
    "--group",
    type=click.Choice(["auto", "gloo", "nccl"]),
    help="What carries gradients; auto: NCCL between GPUs, Gloo between CPUs.  [default: auto]",
)
@click.option(
    "--hold",
    type=click.Choice(["device", "host", "recompute"]),
    help="Where gradients that were sent are held until commit; recompute: nowhere.  [default: device]",
)
@click.option("--checkpoints", metavar="URL", help="Where checkpoints go: a path, or such as s3://bucket/job.")
@click.option(
    "--checkpoint-every", metavar="HOW", help="auto, or such as '500 steps', '1 epoch' or '10 min'.  [default: auto]"
)
@click.option("--checkpoint-keep", type=int, help="How many are kept, besides those with a tag.  [default: 3]")
@click.option("--checkpoint-local", metavar="DIR", help="A fast directory to which they are written first.")
@click.option(
    "--resume",
    metavar="[auto|STEP]",
    help="Go on from the newest good checkpoint, if there is one; or from that of a step.",
)
@click.option(
    "--on-divergence",
    type=click.Choice(["report", "skip", "lower-lr", "rollback", "stop"]),
    help="What is done about a loss or gradient that is not finite.  [default: report]",
)
@click.option(
    "--on-straggler",
    type=click.Choice(["report", "rebalance", "drain"]),
    help="What is done about a slow worker.  [default: rebalance]",
)
@click.option(
    "--preempt-file",
    type=click.Path(dir_okay=False),
    help="When this file appears: take a checkpoint and end with exit code 75.",
)
@technique_options
@click.option("--chaos", is_flag=True, default=None, help="Let 'craft chaos' inject faults without being asked twice.")
@click.option("--config", type=FILE, help="A craft.toml.")
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    run_dir: Path | None,
    config: Path | None,
    as_module: bool,
    script: str,
    arguments: tuple[str, ...],
    enable: tuple[str, ...],
    disable: tuple[str, ...],
    sets: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run SCRIPT as a job that survives the loss of its workers.

    \b
    Example:
      craft run --workers 4 train.py --lr 0.1
      craft run --workers 4 --on-loss shrink -m my_package.train

    Exit codes: 0 finished, 1 bug in the script, 2 bad input, 3 given up, 75 preempted, 130/143 interrupted.
    """
    try:
        command = {"script": script, "arguments": arguments, "as_module": as_module}
        resolved = resolve({**flags, **command}, config, Wishes(enable, disable, sets))
        settings = resolved.settings
        place = claim_new() if run_dir is None else claim(run_dir)
        write_effective(place.config, resolved)
    except CraftError as error:
        raise SystemExit(_refuse(error)) from None
    # Imported late: it takes a while, and bad input gets its answer at once.
    from craft.agent.supervisor import supervise
    from craft.cli.output.display import Display

    stdio.forgive()
    display = Display(place, settings)
    started = time.monotonic()
    try:
        outcome = supervise(settings, place, display.show)
    except CraftError as error:
        display.close()
        raise SystemExit(_refuse(error)) from None
    display.close()
    display.summary(outcome, time.monotonic() - started)
    raise SystemExit(outcome.exit_code)


def _refuse(error: CraftError) -> int:
    echo_error(f"craft run: {error}")
    return 2 if isinstance(error, ConfigError | Unauthorized) else 3
