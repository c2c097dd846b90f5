"""A loop that is not CRAFT's: an all-reduce per step over a Gloo group of its own, until another one is lost; then alone.

Each abort becomes a line: what changed, when, and how many connections it took. Runs until it is told to leave.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import craft
from craft.groups.sockets import abort_gloo

dist: Any = torch.distributed

parser = argparse.ArgumentParser()
parser.add_argument("--store", type=Path, required=True, help="a file in which the two first workers meet")
parser.add_argument("--hang-at", type=int, help="the step in which rank 1 hangs")
parser.add_argument("--stuck-at", type=int, help="the step from whose exchange rank 0 never comes out")
args = parser.parse_args()


def say(**what: Any) -> None:
    # In one piece: two threads have something to say.
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def abort(change: craft.Change) -> None:
    connections = abort_gloo()
    say(aborted=change.generation, lost=change.lost, told=change.told, at=time.time(), connections=connections)
    guest.free_or_end(limit_s=5.0)


guest = craft.attend(abort)
say(member=guest.worker_id, members=guest.members, generation=guest.generation)
group = None
if guest.members == ("w0", "w1"):
    rank = guest.members.index(guest.worker_id)
    # No limit that would end the wait for a lost one by itself.
    group = dist.ProcessGroupGloo(dist.FileStore(str(args.store), 2), rank, 2, timedelta(minutes=30))
total, step = torch.zeros(1), 0
while guest.leaving is None:
    if group is not None and rank == 1 and step == args.hang_at:
        time.sleep(600)
    if group is not None:
        try:
            with guest.exchanging():
                group.allreduce([total]).wait()
                if rank == 0 and step == args.stuck_at:
                    say(stuck=step)
                    time.sleep(600)
        except RuntimeError as error:
            say(freed=time.time(), error=str(error).partition("\n")[0])
            group = None
    time.sleep(0.01)
    step += 1
    guest.step(step, loss=1.0 / step)
say(leaving=guest.leaving, step=step)
sys.exit(0)
