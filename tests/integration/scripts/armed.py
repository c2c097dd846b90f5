"""Run a script that knows nothing of tests, with the faults that a test wants: armed.py SCRIPT [ARGUMENTS]."""

from __future__ import annotations

import runpy
import sys

from craft import testing

testing.arm()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
