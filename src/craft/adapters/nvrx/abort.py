"""``AbortGloo``: frees a thread that is blocked in a Gloo collective, as a plug-in of ``inprocess.Wrapper``.

The wrapper raises an exception in the main thread, which a thread inside Gloo never sees; ``AbortTorchDistributed`` ends only
NCCL's groups.
"""

from __future__ import annotations

import logging

from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.state import FrozenState

from craft.groups import sockets

logger = logging.getLogger(__name__)


class AbortGloo(Abort):
    """Shuts down the connections of this process's Gloo groups; waiting calls get a RuntimeError at once.

    Name it last in ``Compose``, which calls it first: ``AbortTorchDistributed`` forgets the groups.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        number = sockets.abort_gloo()
        logger.info("rank %s: aborted %s Gloo connections", state.rank, number)
        return state
