"""Kinds of faults that can be injected into a running job, by who carries them out.

``control/http/injections.py`` checks what is asked for by these, ``testing/chaos.py`` chooses among them.
"""

from __future__ import annotations

BY_AGENT = ("kill", "stop", "kill-agent")
"""SIGKILL to a worker, SIGSTOP to a worker, SIGKILL to the agent itself (and by that to all its workers)."""
BY_WORKER = ("hang", "slow", "raise", "cut")
"""Sleep for ever, take longer for a while, raise an exception in the script's loop, cut one connection of the group."""
BY_LIGHTHOUSE = ("kill-lighthouse", "drain")
"""SIGKILL to itself, and the ordinary drain of a worker."""

KINDS = (*BY_AGENT, *BY_WORKER, *BY_LIGHTHOUSE)
OF_A_WORKER = ("kill", "stop", "hang", "slow", "raise", "cut", "drain")
"""Those that name a worker."""

KEPT = 8
"""So many injections stay in the directive: each must reach whom it concerns before so many others have followed."""
