"""Python loads this at its start where ``tests/system_calls.py`` put this folder first: the process obeys the test's rules."""

import os
from pathlib import Path

from tests import system_calls

system_calls.install(Path(os.environ[system_calls.VARIABLE]))
