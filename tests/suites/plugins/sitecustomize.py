"""Loads a plugin also into the processes that a test starts: those know nothing of pytest."""

import os

if (_plugin := os.environ.get("SUITE_EVERYWHERE")) is not None:
    __import__(_plugin)
