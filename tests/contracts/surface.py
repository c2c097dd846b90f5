"""What people and other programs rely on, collected from the code: by role, so that moving code changes nothing here.

Each function makes the contents of one file in ``golden``. ``python -m tests.contracts`` writes them anew: a difference there
is a change of a promise, and belongs into the changelog.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from craft.adapters.torchft import messages as torchft
from craft.agent import forkserver
from craft.cli.main import main
from craft.control.durable import Durable
from craft.control.openapi import description
from craft.control.status import Status
from craft.decide.policies import policy
from craft.groups import store
from craft.protocol import (
    actions,
    adoption,
    alerts,
    beats,
    debug,
    entries,
    events,
    journal,
    membership,
    messages,
    notes,
)
from craft.protocol.activity import Phase
from craft.protocol.word import Word
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir
from craft.settings.worker import _KEYS, WorkerSettings
from craft.snapshots import dcp_header, line, manifest, portable, skeleton
from craft.snapshots.suspicion import Suspicion
from craft.testing.faults import Fault
from craft.worker.chronicle import Committed

from .describe import Json, command, message


def cli() -> Json:
    """Commands with their options."""
    return command(main)


def exit_codes() -> Json:
    """Exit codes of ``craft run``."""
    return {name: getattr(policy, name) for name in sorted(dir(policy)) if name.startswith("EXIT_")}


def journal_lines() -> Json:
    """Records of journal.jsonl, by their names."""
    kinds = {
        "event": (*_members(events.AnyEvent), *_members(notes.AnyNote), *_members(journal.LighthouseEvent)),
        "action": _members(actions.AnyAction),
        "outcome": (journal.Cost, journal.Fault),
    }
    return {kind: dict(sorted((each.__name__, message(each)) for each in types)) for kind, types in kinds.items()}


def wire() -> Json:
    """Messages between processes of a job."""
    roles = {
        "worker to agent": messages.WorkerReport,
        "agent to lighthouse": messages.HostReport,
        "lighthouse to all": messages.Directive,
        "heartbeat": beats.Heartbeat,
        "pace of heartbeats": beats.Pace,
        "update": beats.Update,
        "generation": membership.Generation,
        "claim of a member": membership.Claim,
        "control word": Word,
        "look at a worker": debug.Look,
        "what was seen": debug.Looked,
        "attach by torchrun": adoption.Adopt,
        "attached": adoption.Adopted,
        "fork": forkserver.Fork,
        "forked": forkserver.Forked,
        "fork server is ready": forkserver.Ready,
        "worker ended": forkserver.Ended,
        "rendezvous": store.Bring,
        "met": store.Met,
        "not met": store.NotMet,
        "stripe of the state, asked for": line.StripeOf,
        "stripe of the state": line.Stripe,
        "result of a call, asked for": line.ResultOf,
        "result of a call": line.Result,
        "torchft attends": torchft.Attends,
        "torchft gone": torchft.Gone,
        "torchft quorum": torchft.Quorum,
    }
    return {"version": messages.PROTOCOL_VERSION, **{role: message(kind) for role, kind in roles.items()}}


def http() -> Json:
    """The HTTP interface."""
    return {
        "openapi": description(),
        "status": message(Status),
        "failure": message(messages.FailureReport),
        "alert group": message(alerts.AlertGroup),
        "cloud event": message(alerts.CloudEvent),
    }


def run_directory() -> Json:
    """Files of a run directory, and what is in those that programs read."""
    run = RunDir(Path("RUN"))
    names = (
        "token",
        "address",
        "certificate",
        "journal",
        "config",
        "metrics",
        "generation",
        "lock",
        "lighthouse_log",
        "diagnosis",
    )
    of_a_worker: tuple[Callable[[str], Path], ...] = (run.worker, run.log, run.stacks, run.steps, run.generations)
    return {
        "files": sorted(str(getattr(run, name)) for name in names) + sorted(str(each("w0")) for each in of_a_worker),
        "generation.json": message(Durable),
        "steps.jsonl": message(Committed),
        "generations.jsonl": message(entries.Entered),
    }


def checkpoints() -> Json:
    """What is in a checkpoint store."""
    return {
        "manifest": message(manifest.Manifest),
        "part": message(manifest.Part),
        "header": message(portable.Header),
        "tree": message(skeleton.Node),
        "header by torch.distributed.checkpoint": message(dcp_header.DcpHeader),
        "suspicion": message(Suspicion),
    }


def settings() -> Json:
    """Settings of a run, environment variables of a worker, and the form of a planned fault."""
    return {
        "run": message(RunSettings),
        "worker": message(WorkerSettings),
        "environment of a worker": sorted(_KEYS.values()),
        "phases": {each.name: each.value for each in Phase},
        "fault": message(Fault),
    }


def _members(union: Any) -> tuple[Any, ...]:
    return tuple(getattr(union, "__args__", (union,)))


SURFACES = {
    "cli": cli,
    "exit_codes": exit_codes,
    "journal": journal_lines,
    "wire": wire,
    "http": http,
    "run_directory": run_directory,
    "checkpoints": checkpoints,
    "settings": settings,
}
