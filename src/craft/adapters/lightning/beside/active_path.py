"""The active path beside a strategy of Lightning: a fit under ``craft run`` whose loop and groups are Lightning's.

Losses, hangs, alerts and requests reach it while it is blocked in a collective, and free it. No such strategy continues without
a lost worker. So the first survivor saves its state, which is complete, and the job begins again from there, in new processes.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from craft.adapters.lightning.metric_log import named
from craft.groups import sockets
from craft.settings.worker import WorkerSettings
from craft.worker.entry.join import attend
from craft.worker.entry.worker_process import process
from craft.worker.external.external_worker import Guest
from craft.worker.external.generation_follower import Change

logger = logging.getLogger(__name__)

_NEWS_LIMIT_S = 5.0
"""Gloo reports a dead peer before the lighthouse has decided that it is lost."""
_HOLD_LIMIT_S = 120.0
"""With a held slot, the loss is announced only when a replacement has arrived."""
_END_LIMIT_S = 60.0
_LOOK_S = 0.2
_FILE = re.compile(r"step=(\d+)\.ckpt")
_WHOLE = ("DDPStrategy", "SingleDeviceStrategy")
"""With these strategies each worker has the whole state; subclasses may shard it."""


def is_under_craft() -> bool:
    """Whether ``craft run`` started this process."""
    return WorkerSettings.from_environment().socket is not None


def newest(folder: str) -> str | None:
    """Return the checkpoint with the most steps; None if there is none."""
    names = [name for name in os.listdir(folder) if _FILE.fullmatch(name)] if os.path.isdir(folder) else []
    return os.path.join(folder, max(names, key=_steps)) if names else None


def _steps(name: str) -> int:
    found = _FILE.fullmatch(name)
    return int(found.group(1)) if found else 0


class ActivePath:
    """This process as an external worker of its job. Made before the trainer: it gives the rank and the rendezvous."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._changed = threading.Event()
        self._pauses = ExitStack()
        self._updating = False
        self._between = False
        self._exchanging = False
        self._begun = False
        """Whether all have met and trained: until then nothing can be aborted, and nothing is saved."""
        self.guest = attend(self._abort, saves=True, meets=True)

    def _abort(self, change: Change) -> None:
        """On a separate thread: blocked calls return with an error of Gloo."""
        self._changed.set()
        number = sockets.abort_gloo()
        logger.warning("%s: aborted %s Gloo connections", change.reason, number)
        guest = process.guest
        assert guest is not None
        if self._begun:
            # Gloo does not wake every waiter. Then another rank has the state, and this one must not delay it.
            guest.free_or_end()
        else:
            # A worker that waits for all to meet waits in vain, and cannot be freed.
            threading.Thread(target=self._insist, args=(guest,), name="craft-begin-again", daemon=True).start()

    def _insist(self, guest: Guest) -> None:
        """Restart the job; a newer generation may be made meanwhile, and is reported, too."""
        deadline = time.monotonic() + _END_LIMIT_S
        while time.monotonic() < deadline:
            guest.begin_again()
            time.sleep(_LOOK_S)

    # Where the main thread is.

    def exchanges(self, begins: bool) -> None:
        """In backward, and in agreements on actions: this worker may wait for others there."""
        if begins != self._exchanging:
            self._exchanging = begins
            (self.guest.exchange_began if begins else self.guest.exchange_ended)()

    def begins(self) -> None:
        """A batch begins."""
        self._begun, self._between = True, False

    def updates(self) -> None:
        """The optimizer is about to change parameters: until the step is over, the state is inconsistent."""
        self._updating = True

    def stepped(self, trainer: Any) -> None:
        self._updating, self._between = False, True
        self.guest.step(trainer.global_step, **named(trainer.callback_metrics))

    def evaluates(self, begins: bool) -> None:
        if begins:
            self._pauses.enter_context(self.guest.paused("validation"))
        else:
            self._pauses.close()

    def part(self, trainer: Any) -> None:
        """Before all leave: wait until the first one has told the lighthouse that the checkpoint is complete.

        A worker that leaves earlier counts as lost, and the others are aborted.
        """
        # The last one may find that the others have gone.
        with suppress(RuntimeError):
            trainer.strategy.barrier("CraftCallback")

    # When it cannot go on.

    def is_lost(self, error: BaseException) -> bool:
        """Return whether an error came out of a collective because a worker is lost, or all were to abort."""
        # Errors of Lightning and of the script are mostly of other kinds.
        if not isinstance(error, RuntimeError):
            return False
        with self.guest.paused("waits to hear who is lost"):
            return self._changed.wait(_HOLD_LIMIT_S if "gloo" in str(error).lower() else _NEWS_LIMIT_S)

    def begin_again(self, trainer: Any) -> None:
        """Restart the job from the state of this worker; ends with this process, or after a limit."""
        saved, deadline = False, time.monotonic() + _END_LIMIT_S
        with self.guest.paused("the job is to begin again"):
            while time.monotonic() < deadline:
                if self.guest.members[0] == self.guest.worker_id:
                    saved = saved or self._save(trainer)
                    self.guest.begin_again()
                # A newer generation may have been made meanwhile, and the first one may be another.
                time.sleep(_LOOK_S)
        logger.error("the job did not begin again within %g s", _END_LIMIT_S)

    def _save(self, trainer: Any) -> bool:
        name = type(trainer.strategy).__name__
        if self._updating or name not in _WHOLE:
            why = "an update was under way" if self._updating else f"under {name} no worker may have all of it"
            logger.warning("the state is not saved: %s; the job goes on from an older checkpoint", why)
            return True
        batches = trainer.fit_loop.epoch_loop.batch_progress
        if self._between and batches.current.completed < batches.current.processed:
            # Its step is done, though its callbacks were not: it must not be used again.
            batches.increment_completed()
        path = os.path.join(self._folder, f"step={trainer.global_step}.ckpt")
        os.makedirs(self._folder, exist_ok=True)
        # By hand: the trainer's method is a collective.
        trainer.strategy.checkpoint_io.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), f"{path}.part")
        self.listed(path, trainer.global_step)
        return True

    def listed(self, path: str, step: int) -> None:
        """Move a complete checkpoint to its place, and tell the lighthouse."""
        os.replace(f"{path}.part", path)
        self.guest.saved(os.path.basename(path), step, self._folder, os.path.getsize(path))
        logger.info("saved %s", path)
