"""NVRx's in-process wrapper under ``craft run``: an all-reduce per step, until it is told to leave. Each beginning is a line.

With ``--deadlock`` both ranks of the first iteration wait for something that never comes.
"""

import argparse
import json
import logging
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from nvidia_resiliency_ext import fault_tolerance, inprocess
from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.health_check import FaultCounter
from nvidia_resiliency_ext.inprocess.rank_assignment import ActivateAllRanks, ShiftRanks

from craft.adapters.nvrx import AbortGloo, Attend, heartbeats

dist: Any = torch.distributed

parser = argparse.ArgumentParser()
parser.add_argument("--deadlock", action="store_true")
parser.add_argument("--default-abort", action="store_true", help="NVRx's own abort alone")
parser.add_argument("--miss", type=int, help="the rank that sends no heartbeat after its tenth step")
parser.add_argument(
    "--stay", type=int, help="the rank that does not come out of the first iteration when it is told to"
)
parser.add_argument("--soft-s", type=float, default=60.0, help="after how long NVRx finds by itself that a rank hangs")
args = parser.parse_args()
logging.getLogger("nvidia_resiliency_ext").setLevel(logging.WARNING)
attend = Attend()
client = None
if args.miss is not None:
    limits = {"rank_heartbeat_timeout": 1.5, "workload_check_interval": 0.2, "enable_nic_monitor": False}
    client = heartbeats(fault_tolerance.FaultToleranceConfig(**limits))
aborts = [AbortTorchDistributed()] if args.default_abort else [AbortTorchDistributed(), AbortGloo()]


def say(**what: Any) -> None:
    print(json.dumps({**what, "time": time.time()}), flush=True)


@inprocess.Wrapper(
    abort=inprocess.Compose(*aborts),
    health_check=attend.health(FaultCounter()),
    rank_assignment=inprocess.Compose(attend, ActivateAllRanks(), ShiftRanks()),
    soft_timeout=timedelta(seconds=args.soft_s),
    hard_timeout=timedelta(seconds=args.soft_s + 10),
    last_call_wait=timedelta(seconds=0.1),
    # Shorter than the interval of the watchdog: a monitor that always finds a message looks at nothing else.
    monitor_process_interval=timedelta(seconds=0.2),
)
def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    global client
    assert call_wrapper is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = dist.PrefixStore(f"iteration{call_wrapper.iteration}", store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size)
    say(iteration=call_wrapper.iteration, rank=rank, world_size=world_size, pid=os.getpid())
    if args.deadlock and call_wrapper.iteration == 0:
        dist.recv(torch.zeros(1), 1 - rank)
    leaving, step = torch.zeros(1), 0
    while not leaving:
        leaving[0] = attend.guest.leaving is not None
        try:
            with attend.guest.exchanging():
                dist.all_reduce(leaving)
        except (RuntimeError, ValueError):
            # The latter between two exchanges: NVRx has made an end of the group.
            if rank == args.stay and call_wrapper.iteration == 0:
                # No exception of NVRx's comes through to it here.
                threading.Event().wait()
            raise
        step += 1
        attend.step(step)
        call_wrapper.ping()
        if client is not None and not (rank == args.miss and world_size == 3 and step > 10):
            client.send_heartbeat()
        time.sleep(0.01)
    if client is not None:
        client.shutdown_workload_monitoring()
        # Whoever ends its group first may break the others' last exchange: then all begin once more.
        client = None
    dist.destroy_process_group()


train()
