"""``craft``: the command group. Each subcommand is imported only when it is called."""

from __future__ import annotations

import importlib
from typing import Any

from craft.telemetry.text import stdio

_INTERRUPTED = 130

try:
    import click
except KeyboardInterrupt:
    # Slow to import.
    raise SystemExit(_INTERRUPTED) from None

_COMMANDS = {
    "abort": ("inspect", "Abort what all workers are blocked in."),
    "chaos": ("chaos", "Inject faults into a running job."),
    "checkpoint": ("inspect", "Have a job take a checkpoint now."),
    "checkpoints": ("checkpoints.commands", "List, verify, compare, export and remove checkpoints."),
    "debug": ("debug", "Inspect a worker: what it does, its stacks."),
    "demo": ("demo", "See it work: kill workers of a small job and compare the bits."),
    "doctor": ("doctor", "Measure whether this machine is fit for jobs, and say what to do."),
    "drain": ("inspect", "Let a worker or a host leave in order."),
    "events": ("inspect", "Show what happened in a job."),
    "fail": ("inspect", "Report a worker as failed."),
    "lighthouse": ("lighthouse", "Run the control plane of a job of several hosts."),
    "plan": ("plan", "Compare what techniques would cost and save, and say how often to take checkpoints."),
    "preempt": ("inspect", "Have a job take a checkpoint and end, to go on later."),
    "run": ("run", "Run a training script as a fault-tolerant job."),
    "status": ("inspect", "Show how a job is doing."),
    "stop": ("inspect", "End a job."),
    "techniques": ("techniques", "List techniques, their settings, and who answers what."),
    "why": ("why", "Tell what happened in a fault, and what it cost."),
}
"""By name: the module in ``craft.cli`` that has it, and its one-line help."""


class _Lazy(click.Group):
    """Lists commands by their one-line help, without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"craft.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # The user who presses Ctrl-C knows why.
            raise SystemExit(_INTERRUPTED) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="craft", message="craft %(version)s")
def main(**_: Any) -> None:
    """Keep PyTorch training jobs running through failures, bit for bit.

    \b
    Example:
      craft run --workers 4 train.py      then, in another terminal, kill -9 one of its workers
    """
    stdio.open_standard_files()
    # Imported late: 'craft --help' logs nothing.
    import logging

    from craft.telemetry.text import logs

    logs.begin(logging.WARNING, logs.FOR_PEOPLE)


if __name__ == "__main__":
    main(prog_name="craft")
