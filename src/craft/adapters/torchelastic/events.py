"""Send TorchElastic's events to the lighthouse as CloudEvents; it journals them and answers by its rules.

In: lines that ``torch.distributed.elastic.events.record`` passes to a logging handler, in torchrun's process. torchrun never
waits for the lighthouse, except for a moment at its end.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from craft.protocol.errors import ConfigError, CraftError, Unreachable

logger = logging.getLogger(__name__)

NAME = "craft"
"""Name of the handler: ``--event-log-handler craft``."""
_MOST_WAITING = 1000
_TRIES, _AGAIN_S = 20, 0.5
_LAST_S = 5.0
_MAX_CHARS = 2000

Tell = Callable[..., object]
"""(source, kind, and what it says by name): ``Client.cloud_event``."""


class ElasticEvent(msgspec.Struct, frozen=True):
    """One event for the lighthouse."""

    source: str
    kind: str
    data: dict[str, str | int | float]


def read(line: str, host: str) -> ElasticEvent:
    """Return the content of an event of TorchElastic; ``host`` is CRAFT's name of this host."""
    found = json.loads(line)
    about = {key: value for key, value in (found.get("metadata") or {}).items() if value is not None}
    # Worker and process are in a nested text there, each value in a list of one.
    more = {
        key: value[0] if isinstance(value, list) else value for key, value in _object(about.get("metadata")).items()
    }
    error = _error(about.get("raw_error"))
    who = f"rank {about['global_rank']}" if "global_rank" in about else "torchrun"
    data: dict[str, Any] = {
        "host": host,
        "summary": f"{who}: {about.get('state', found['name'])}{f': {error.splitlines()[-1]}' if error else ''}"[
            :_MAX_CHARS
        ],
        "of": found.get("source"),
        "state": about.get("state"),
        "rank": about.get("global_rank"),
        "local_rank": more.get("local_rank"),
        "pid": more.get("worker_pid"),
        "exit_code": more.get("exit_code"),
        "restarts": about.get("agent_restarts"),
        "error": error[-_MAX_CHARS:],
    }
    told = {key: value for key, value in data.items() if value not in (None, "")}
    return ElasticEvent(f"torchelastic/{about.get('run_id', '')}", found["name"], told)


def _object(text: Any) -> dict[str, Any]:
    found = json.loads(text) if isinstance(text, str) else None
    return found if isinstance(found, dict) else {}


def _error(raw: Any) -> str:
    """Return what a worker left in its error file, or what torchrun raised."""
    if not isinstance(raw, str) or raw.strip() in ("", "NoneType: None"):
        return ""
    try:
        found = json.loads(raw)
    except ValueError:
        return raw.strip()
    message = found.get("message", found) if isinstance(found, dict) else found
    if isinstance(message, dict):
        said, extra = str(message.get("message", "")), message.get("extraInfo")
        stack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
        return f"{stack.strip()}\n{said}".strip()
    return str(message)


class EventForwarder(logging.Handler):
    """Sends events on a thread."""

    def __init__(self, tell: Tell, host: str) -> None:
        super().__init__()
        self._tell = tell
        self._host = host
        self._waiting: queue.Queue[ElasticEvent] = queue.Queue(_MOST_WAITING)
        threading.Thread(target=self._loop, name="craft-torchelastic", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(read(record.getMessage(), self._host))
        except queue.Full:
            logger.warning("the lighthouse does not answer: dropped an event of torchrun")
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("not an event of TorchElastic (%s): %.200s", error, record.getMessage())

    def flush(self) -> None:
        """Wait a moment until all events are sent; logging calls it at the end of the process."""
        deadline = time.monotonic() + _LAST_S
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def _loop(self) -> None:
        while True:
            event = self._waiting.get()
            for _ in range(_TRIES):
                try:
                    self._tell(event.source, event.kind, **event.data)
                    break
                except Unreachable:
                    # It may be starting, perhaps again.
                    time.sleep(_AGAIN_S)
                except CraftError as error:
                    logger.warning("the lighthouse does not accept an event of torchrun: %s", error)
                    break
            self._waiting.task_done()


def register(tell: Tell, host: str) -> None:
    """Register the handler with torchrun by name."""
    import torch
    from torch.distributed.elastic.events import handlers

    known = getattr(handlers, "_log_handlers", None)
    if not isinstance(known, dict):
        raise ConfigError(
            f"torch {torch.__version__} keeps the handlers of its elastic events elsewhere than CRAFT knows: use plain torchrun,"
            " without its events, or torch 2.9 to 2.13"
        )
    known[NAME] = EventForwarder(tell, host)
