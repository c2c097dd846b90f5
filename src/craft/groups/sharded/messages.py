"""A message between two members: posted by ``isend`` or ``irecv``, finished when the script waits for it.

Both posting and waiting are operations of the replica, since the group may break between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from craft.groups.group import P2P
from craft.groups.sharded.operation import TAGS
from craft.groups.sharded.transfer import Posted
from craft.protocol.errors import ConfigError

_FIRST_TAG = 1
"""Collectives use the tag below."""


class Message:
    """One message, sent or received; as an operation, its end."""

    def __init__(self, tensor: torch.Tensor, peer: int, tag: int, is_sent: bool) -> None:
        if not 0 <= tag < TAGS - _FIRST_TAG:
            raise ConfigError(f"tag {tag}: messages in a sharded replica have tags from 0 to {TAGS - _FIRST_TAG - 1}")
        self.name = "send" if is_sent else "recv"
        self.outputs: Sequence[torch.Tensor] = () if is_sent else (tensor,)
        self._transfers = [(tensor, peer)]
        self._tag = _FIRST_TAG + tag
        self._posted: Posted | None = None

    def post(self, peers: P2P) -> None:
        """Start it; return at once."""
        if self.outputs:
            self._posted = Posted(peers, (), self._transfers, self._tag, in_order=False)
        else:
            self._posted = Posted(peers, self._transfers, (), self._tag, in_order=False)

    def live(self, peers: P2P) -> None:
        if self._posted is None or self._posted.generation != peers.generation:
            self.post(peers)
        posted, self._posted = self._posted, None
        assert posted is not None
        posted.finish(peers)

    def echo(self) -> None:
        for output in self.outputs:
            output.zero_()


class Posting:
    """The start of a message."""

    outputs = ()

    def __init__(self, message: Message) -> None:
        self.name = f"post_{message.name}"
        self._message = message

    def live(self, peers: P2P) -> None:
        self._message.post(peers)

    def echo(self) -> None:
        """Nothing is posted: the end of the message is echoed too."""
