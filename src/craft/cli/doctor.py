"""``craft doctor``: is this machine fit for CRAFT?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from craft.cli.output.command_errors import EXIT_PROBLEM, explained
from craft.cli.output.echo import echo, echo_json
from craft.cli.output.options import FiniteNumber, json_option

if TYPE_CHECKING:
    from craft.doctor.findings import Finding, Torch

_LIMIT_S = 120.0


@click.command()
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="Where run directories or checkpoints are to be."
)
@click.option("--token-file", type=click.Path(path_type=Path, exists=True), help="Look at this token, too.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="That are to run here.")
@click.option(
    "--params",
    type=FiniteNumber(min=0),
    help="Say what holding the gradients of so many parameters costs, such as 1e9.",
)
@click.option("--dtype", default="float32", show_default=True, help="Of the gradients.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Of a step; as many as workers if it is not given.")
@json_option("For programs.")
@explained
def doctor(
    folder: Path | None,
    token_file: Path | None,
    workers: int,
    params: float | None,
    dtype: str,
    microbatches: int | None,
    as_json: bool,
) -> None:
    """Measure this machine; report what is in the way of a job, and what to do about it.

    Takes some seconds. The exit code is 1 if there is a problem; warnings leave it at 0.

    \b
    Example:
      craft doctor --workers 4
      craft doctor --params 1e9 --dtype bf16 --microbatches 16 --workers 3
    """
    import msgspec

    from craft.doctor.judge import judge
    from craft.doctor.machine import measure
    from craft.telemetry.nvml import why_not

    place = (folder or Path.cwd()).absolute()
    cost = [_cost(params, dtype, microbatches or workers, workers)] if params is not None else []
    tokens = sorted({*place.glob("craft-run*/token"), *place.glob("token"), *([token_file] if token_file else [])})
    findings = [*judge(measure(place, tokens, why_not()), _torch(), workers), *cost]
    if as_json:
        echo_json(msgspec.to_builtins(findings), indent=2)
    else:
        _print(findings)
    if any(finding.grade == "problem" for finding in findings):
        raise SystemExit(EXIT_PROBLEM)


def _torch() -> Torch | str:
    """Probe torch in a separate process: it may be missing, broken, or hang."""
    import msgspec

    from craft.doctor.findings import Torch

    command = [sys.executable, "-m", "craft.doctor.torch_probe"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"did not answer within {_LIMIT_S:g} s"
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Torch)
    except (IndexError, msgspec.DecodeError):
        said = done.stderr.decode(errors="replace").strip().splitlines()
        errors = [line for line in said if "Error" in line] or said
        return errors[-1] if errors else f"ended with {done.returncode} and printed nothing"


def _cost(params: float, dtype: str, microbatches: int, workers: int) -> Finding:
    from craft.decide.step.gradient_memory import BYTES, held
    from craft.doctor.judge import costs
    from craft.protocol.errors import ConfigError

    element_bytes = BYTES.get(dtype.removeprefix("torch."))
    if element_bytes is None:
        raise ConfigError(f"--dtype {dtype!r} is not known: take one of {', '.join(sorted(BYTES))}")
    if not 0 < params < 1e15:
        raise ConfigError(f"--params {params:g}: a number of parameters, such as 1e9")
    return costs(params, dtype, element_bytes, microbatches, workers, held(microbatches, workers))


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        echo(f"{finding.grade:<7}  {finding.subject:<{width}}  {finding.found}")
        if finding.advice:
            echo(f"{'':<7}  {'':<{width}}  -> {finding.advice}")
    problems = sum(finding.grade == "problem" for finding in findings)
    warnings = sum(finding.grade == "warning" for finding in findings)
    echo(f"\n{_count(problems, 'problem')}, {_count(warnings, 'warning')}.")


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
