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
    "abort": ("craft.cli.inspect", "abort", "Abort what all workers are blocked in."),
    "chaos": ("craft.cli.chaos", "chaos", "Inject faults into a running job."),
    "checkpoint": ("craft.cli.inspect", "checkpoint", "Have a job take a checkpoint now."),
    "checkpoints": (
        "craft.cli.checkpoints.commands",
        "checkpoints",
        "List, verify, compare, export and remove checkpoints.",
    ),
    "debug": ("craft.cli.debug", "debug", "Inspect a worker: what it does, its stacks."),
    "demo": ("craft.cli.demo", "demo", "See it work: kill workers of a small job and compare the bits."),
    "doctor": ("craft.cli.doctor", "doctor", "Measure whether this machine is fit for jobs, and say what to do."),
    "drain": ("craft.cli.inspect", "drain", "Let a worker or a host leave in order."),
    "events": ("craft.cli.inspect", "events", "Show what happened in a job."),
    "fail": ("craft.cli.inspect", "fail", "Report a worker as failed."),
    "lighthouse": ("craft.cli.lighthouse", "lighthouse", "Run the control plane of a job of several hosts."),
    "plan": (
        "craft.cli.plan",
        "plan",
        "Compare what techniques would cost and save, and say how often to take checkpoints.",
    ),
    "preempt": ("craft.cli.inspect", "preempt", "Have a job take a checkpoint and end, to go on later."),
    "run": ("craft.cli.run", "run", "Run a training script as a fault-tolerant job."),
    "status": ("craft.cli.inspect", "status", "Show how a job is doing."),
    "techniques": ("craft.cli.techniques", "techniques", "List techniques, their settings, and who answers what."),
    "stop": ("craft.cli.inspect", "stop", "End a job."),
    "why": ("craft.cli.why", "why", "Tell what happened in a fault, and what it cost."),
}


class _Lazy(click.Group):
    """Lists commands by their one-line help, without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # The user who presses Ctrl-C knows why.
            raise SystemExit(_INTERRUPTED) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][2]) for name in self.list_commands(ctx)])


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
