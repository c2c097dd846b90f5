"""``AbortGloo``: what frees a thread that is blocked in a collective of Gloo's, as a plug-in of ``inprocess.Wrapper``.

The wrapper raises an exception in the main thread, which a thread that waits inside Gloo never comes to see; and
``AbortTorchDistributed`` ends NCCL's groups alone.
"""

from __future__ import annotations

import logging

from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.state import FrozenState

from craft.groups import sockets

logger = logging.getLogger(__name__)


class AbortGloo(Abort):
    """Shuts the connections of this process's Gloo groups down; whoever waits for them gets a RuntimeError at once.

    Name it last in ``Compose``: that one is called first, and ``AbortTorchDistributed`` forgets the groups.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        number = sockets.abort_gloo()
        logger.info("rank %s: %s connections of Gloo's are aborted", state.rank, number)
        return state
