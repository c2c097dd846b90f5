"""A rank of ``ft_launcher``: sends heartbeats. The first time, rank 1 stops doing so."""

import os
import time

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

client = RankMonitorClient()
client.init_workload_monitoring()
for beat in range(10):
    client.send_heartbeat()
    time.sleep(0.05)
    if beat == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(600)
client.shutdown_workload_monitoring()
