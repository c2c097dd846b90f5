"""Heartbeats and sections of NVRx's ``RankMonitorClient`` in a worker of ``craft run``: the same calls as under ``ft_launcher``.

There the launcher starts a monitor for each rank. Here a worker starts one, which reports missed heartbeats to the lighthouse;
the worker is then lost, unless a rule for ``nvrx.heartbeat-missed`` in craft.toml says otherwise.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch.multiprocessing
from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorClient
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorServer

from craft.adapters.nvrx.cloud_events import EventSender
from craft.adapters.nvrx.monitor import take_over
from craft.protocol.errors import ConfigError
from craft.settings.environ import FT_MONITOR, is_ft_monitored
from craft.settings.rundir import RunDir
from craft.settings.worker import WorkerSettings
from craft.worker.entry.join import attend


def heartbeats(limits: FaultToleranceConfig | None = None) -> RankMonitorClient:
    """Return a client of this rank's monitor, and start the monitor unless ``ft_launcher`` did.

    ``limits`` are for a monitor that is started here. Call it when the worker has its rank: after ``Attend()``.
    """
    if not is_ft_monitored():
        _start(limits or FaultToleranceConfig(enable_nic_monitor=False))
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


def _start(limits: FaultToleranceConfig) -> Any:
    settings = WorkerSettings.from_environment()
    if settings.run_dir is None:
        raise ConfigError("heartbeats() needs a monitor: start the script with craft run, or with ft_launcher")
    attend(meets=True)
    place = Path(tempfile.mkdtemp(prefix="craft-nvrx-")) / "monitor"
    take_over(EventSender(RunDir(settings.run_dir)), settings.worker_id)
    os.environ[FT_MONITOR] = str(place)
    # Forked, so that it has the replaced class.
    return RankMonitorServer.run_in_subprocess(limits, str(place), mp_ctx=torch.multiprocessing.get_context("fork"))
