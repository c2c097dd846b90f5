"""What torch gets back for an operation: a ``Work``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed

_NO_LIMIT = timedelta(0)


class Done(dist.Work):  # type: ignore[misc]
    """An operation that is complete, or enqueued on the stream that was current when it was issued."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._device = next((output.device for output in outputs if output.is_cuda), None)
        self._event: Any = None
        if self._device is not None:
            self._event = torch.cuda.current_stream(self._device).record_event()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Make the current stream wait for the operation; on the CPU it is complete."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is complete."""
        self.wait()
        devices = {output.device for output in self._outputs if output.is_cuda}
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=list(devices))
        future.set_result(self._outputs)
        return future


class UnderWay(Done):
    """A message that is posted; waiting for it finishes it."""

    def __init__(self, outputs: Sequence[torch.Tensor], finish: Callable[[], None], source: int) -> None:
        super().__init__(outputs)
        self._finish: Callable[[], None] | None = finish
        self._source = source

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            # What arrives is copied to its place on the stream of now.
            finish()
        return True

    def is_completed(self) -> bool:
        """Return whether it was waited for: no other answer is the same on every run."""
        return self._finish is None

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank
