"""Kinds of faults that can be injected into a running job, by the process that injects them.

``control/http/injections.py`` checks requests against these; ``testing/chaos.py`` chooses among them.
"""

from __future__ import annotations

BY_AGENT = ("kill", "stop", "kill-agent")
"""SIGKILL to a worker, SIGSTOP to a worker, SIGKILL to the agent itself (which ends all its workers)."""
BY_WORKER = ("hang", "slow", "raise", "cut")
"""Sleep for ever, be slow for a while, raise an exception in the script's loop, cut one connection of the group."""
BY_LIGHTHOUSE = ("kill-lighthouse", "drain")
"""SIGKILL to itself, and the ordinary drain of a worker."""

KINDS = (*BY_AGENT, *BY_WORKER, *BY_LIGHTHOUSE)
OF_A_WORKER = ("kill", "stop", "hang", "slow", "raise", "cut", "drain")
"""Faults that name a worker."""

KEPT = 8
"""How many injections stay in the directive: each must reach its target before this many others follow."""
