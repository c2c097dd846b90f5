"""What the technique does in a worker: look at the sensor now and then, and tell once when it shows too much."""

from __future__ import annotations

import os
import time
from pathlib import Path

from craft.techniques import Hooks, Moment, Surroundings
from craft_thermal import HOT, ThermalSettings


class Sensor(Hooks):
    def __init__(self, settings: ThermalSettings, surroundings: Surroundings) -> None:
        assert settings.sensor is not None
        self._path = Path(settings.sensor.format(local_rank=os.environ.get("LOCAL_RANK", "0")))
        self._settings = settings
        self._surroundings = surroundings
        self._next = 0.0
        self._told = False

    def after_commit(self, moment: Moment) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._settings.every_s
        try:
            degrees = int(self._path.read_text()) / 1000
        except (OSError, ValueError):
            # A sensor that cannot be read says nothing about heat.
            return
        hot = degrees > self._settings.limit_c
        if hot and not self._told:
            self._surroundings.tell(HOT, degrees, f"{self._path} shows {degrees:g} C after step {moment.step}")
        self._told = hot
