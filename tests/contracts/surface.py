"""What people and other programs rely on, collected from the code: by role, so that moving code changes nothing here.

Each function makes the contents of one file in ``golden``. ``python -m tests.contracts`` writes them anew: a difference there
is a change of a promise, and belongs into the changelog.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from craft.adapters.torchft import messages as torchft
from craft.agent.linux import forkserver
from craft.cli.main import main
from craft.control.core.persistence import Durable
from craft.control.http.openapi import description
from craft.control.replay.status import Status
from craft.decide.policies import policy
from craft.groups import rendezvous
from craft.protocol import actions, events, generation_log, heartbeats, journal, membership, messages, worker_events
from craft.protocol.control_word import Word
from craft.protocol.values import alerts, attach, inspection
from craft.protocol.values.activity import Phase
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir
from craft.settings.worker import _KEYS, WorkerSettings
from craft.snapshots.checkpoint.suspect import Suspicion
from craft.snapshots.interop import dcp_header
from craft.snapshots.state import serialized, tree
from craft.snapshots.store import manifest
from craft.snapshots.transfer import protocol
from craft.testing.faults import PlacedFault
from craft.worker.report.step_log import Committed

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
        "event": (*_members(events.AnyEvent), *_members(worker_events.AnyNote), *_members(journal.LighthouseEvent)),
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
        "heartbeat": heartbeats.Heartbeat,
        "pace of heartbeats": heartbeats.Pace,
        "update": heartbeats.Update,
        "generation": membership.Generation,
        "claim of a member": membership.Claim,
        "control word": Word,
        "look at a worker": inspection.Look,
        "what was seen": inspection.Looked,
        "attach by torchrun": attach.Adopt,
        "attached": attach.Adopted,
        "fork": forkserver.Fork,
        "forked": forkserver.Forked,
        "fork server is ready": forkserver.Ready,
        "worker ended": forkserver.Ended,
        "rendezvous": rendezvous.Bring,
        "met": rendezvous.Met,
        "not met": rendezvous.NotMet,
        "stripe of the state, asked for": protocol.StripeOf,
        "stripe of the state": protocol.Stripe,
        "result of a call, asked for": protocol.ResultOf,
        "result of a call": protocol.Result,
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
        "generations.jsonl": message(generation_log.Entered),
    }


def checkpoints() -> Json:
    """What is in a checkpoint store."""
    return {
        "manifest": message(manifest.Manifest),
        "part": message(manifest.Part),
        "header": message(serialized.Header),
        "tree": message(tree.Node),
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
        "fault": message(PlacedFault),
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
