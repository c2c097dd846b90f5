"""``craft lighthouse``: run the control plane of a job as a separate process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from craft.cli.output.echo import echo, echo_error
from craft.cli.output.options import FILE, FOLDER, FiniteNumber, technique_options
from craft.protocol.errors import ConfigError, CraftError
from craft.settings.rundir import START_ANEW, HeldRunDir, RunDir
from craft.telemetry.text import stdio

if TYPE_CHECKING:
    from craft.control.lighthouse import LighthouseSettings
    from craft.control.process import LighthouseAddress
    from craft.decide.techniques.technique import Chosen
    from craft.settings.techniques import Wishes


@click.command()
@click.option("--workers", type=click.IntRange(min=1), required=True, help="Workers of the whole job, over all hosts.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 picks a free one.")
@click.option("--dir", "run_dir", type=FOLDER, required=True, help="The run directory.")
@click.option(
    "--min-workers", type=click.IntRange(min=1), default=1, show_default=True, help="Give up below this many."
)
@click.option(
    "--workers-per-replica",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Workers that hold one copy of the model together; the same on every host.",
)
@click.option(
    "--on-loss",
    type=click.Choice(["redo", "shrink", "wait", "auto"]),
    help="What becomes of a lost worker's microbatches.  [default: redo]",
)
@click.option(
    "--wait-limit",
    type=FiniteNumber(min=0),
    help="Seconds to wait for who takes a lost worker's place, with 'wait' or below --min-workers.  [default: 60]",
)
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--host-address", help="Name or address under which other hosts reach this one.")
@click.option(
    "--token-file",
    type=FILE,
    help="Where the token is; made if it is not there. Default: the file 'token' in the run directory.",
)
@click.option("--tls-cert", type=FILE, help="Speak TLS, with this certificate.")
@click.option("--tls-key", type=FILE, help="The key of that certificate.")
@click.option(
    "--heartbeat-limit",
    type=FiniteNumber(min=0.05),
    default=1.0,
    show_default=True,
    help="Seconds of silence after which a host is lost.",
)
@click.option(
    "--keep", is_flag=True, help="Serve from a child process, and start another one within moments if it is killed."
)
@click.option("--chaos", is_flag=True, help="Let 'craft chaos' inject faults without being asked twice.")
@click.option("--config", type=FILE, help="A craft.toml with techniques, and rules for alerts and hooks.")
@technique_options
@click.option("--with-parent", is_flag=True, help="End when the process that started this one ends.")
def lighthouse(
    workers: int,
    port: int,
    run_dir: Path,
    min_workers: int,
    workers_per_replica: int,
    on_loss: str | None,
    wait_limit: float | None,
    bind: str,
    host_address: str | None,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    heartbeat_limit: float,
    keep: bool,
    chaos: bool,
    config: Path | None,
    enable: tuple[str, ...],
    disable: tuple[str, ...],
    sets: tuple[str, ...],
    with_parent: bool,
) -> None:
    """Run the lighthouse of a job: it knows the membership, decides, and tells.

    'craft run' starts one by itself; start your own for a job of several hosts. It can be killed and started again on
    the same run directory while the job goes on.

    \b
    Example:
      craft lighthouse --workers 16 --dir run --bind 0.0.0.0 --port 29400
      craft run --workers 8 --lighthouse http://HOST:29400 --token-file token train.py    (on each of two hosts)
    """
    parent_pid = os.getppid()
    stdio.forgive()
    # Imported late: 'craft --help' must not wait for aiohttp.
    from craft.control.lighthouse import LighthouseSettings
    from craft.control.process import LighthouseAddress, end_with_parent, serve
    from craft.settings.techniques import Wishes

    _check_numbers(workers, min_workers, workers_per_replica)
    place = LighthouseAddress(bind=bind, port=port, host_address=host_address, tls=_tls(tls_cert, tls_key))
    run, flags = RunDir(run_dir), {"on_loss": on_loss, "wait_limit_s": wait_limit}

    def begin() -> int:
        settings = LighthouseSettings(
            workers=workers,
            min_workers=min_workers,
            replica_size=workers_per_replica,
            heartbeat_limit_s=heartbeat_limit,
            chaos=chaos,
            kept=keep,
            techniques=_techniques(run, flags, config, Wishes(enable, disable, sets)),
        )
        if with_parent:
            end_with_parent(parent_pid)
        if not keep:
            serve(run, settings, place, token_file, echo)
        return _keep(run, settings, place, token_file) if keep else 0

    raise SystemExit(_guarded(begin))


def _check_numbers(workers: int, min_workers: int, workers_per_replica: int) -> None:
    from craft.settings.run import uneven

    if min_workers > workers:
        raise click.UsageError(f"--min-workers {min_workers} is more than --workers {workers}")
    if (trouble := uneven(workers, workers_per_replica)) is not None:
        raise click.UsageError(f"--workers-per-replica {workers_per_replica}: {trouble}")


def _tls(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if certificate is not None and key is not None:
        return certificate, key
    if certificate is not None or key is not None:
        raise click.UsageError("--tls-cert and --tls-key go together")
    return None


def _techniques(run: RunDir, flags: dict[str, Any], config: Path | None, wishes: Wishes) -> Chosen:
    from craft.settings.run import for_lighthouse

    # The file that 'craft run' wrote for its lighthouse includes the flags already.
    effective = config is not None and config.resolve() == run.config.resolve()
    return for_lighthouse(flags, config, wishes, effective=effective)


def _keep(run: RunDir, settings: LighthouseSettings, place: LighthouseAddress, token_file: Path | None) -> int:
    from craft.control.process import listen, serve_on
    from craft.control.respawn import keep

    def child(listener: socket.socket, say: Callable[[str], None], beat: Callable[[], None]) -> int:
        def begin() -> int:
            if trouble := held.trouble():
                raise ConfigError(f"{trouble}. {START_ANEW}")
            serve_on(listener, run, settings, place, token_file, say, beat)
            return 0

        return _guarded(begin)

    with listen(run, place) as listener:
        held = HeldRunDir(run)
        return keep(child, listener, echo)


def _guarded(begin: Callable[[], int]) -> int:
    """Return the exit code of ``begin``; print an error of CRAFT as one line."""
    try:
        return begin()
    except CraftError as error:
        echo_error(f"craft lighthouse: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        # Such as a full disk.
        echo_error(f"craft lighthouse: {error}")
        return 1
