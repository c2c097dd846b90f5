"""The active path beside a strategy of Lightning's own: a fit under ``craft run`` whose loop and groups are Lightning's.

Losses, hangs, alerts and orders reach it while it is blocked in a collective, and free it. No such strategy goes on without a
lost worker. So the first survivor saves what it has, which is whole, and the job begins again from there, in new processes.
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
from craft.worker.entry.join import attend, attending
from craft.worker.external.external_worker import Guest
from craft.worker.external.generation_follower import Change

logger = logging.getLogger(__name__)

_NEWS_LIMIT_S = 5.0
"""Gloo tells of a dead peer before the lighthouse has decided that it is lost."""
_HOLD_LIMIT_S = 120.0
"""Where a lost worker's place is kept, nobody hears of its loss before another one is there."""
_END_LIMIT_S = 60.0
_LOOK_S = 0.2
_FILE = re.compile(r"step=(\d+)\.ckpt")
_WHOLE = ("DDPStrategy", "SingleDeviceStrategy")
"""Under these each worker has the whole state; what is derived from them may cut it in parts."""


def is_under_craft() -> bool:
    """Whether ``craft run`` started this process."""
    return WorkerSettings.from_environment().socket is not None


def newest(folder: str) -> str | None:
    """The checkpoint with the most steps; None if there is none."""
    names = [name for name in os.listdir(folder) if _FILE.fullmatch(name)] if os.path.isdir(folder) else []
    return os.path.join(folder, max(names, key=_steps)) if names else None


def _steps(name: str) -> int:
    found = _FILE.fullmatch(name)
    return int(found.group(1)) if found else 0


class ActivePath:
    """This process as a guest of its job. Made before the trainer: it says which rank this is, and where all meet."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._changed = threading.Event()
        self._pauses = ExitStack()
        self._updating = False
        self._between = False
        self._exchanging = False
        self._begun = False
        """Whether all have met, and trained: until then nothing can be freed, and nothing is to be saved."""
        self.guest = attend(self._abort, saves=True, meets=True)

    def _abort(self, change: Change) -> None:
        """On a thread of its own: whoever is blocked comes out with an error of Gloo's."""
        self._changed.set()
        number = sockets.abort_gloo()
        logger.warning("%s: %s connections of Gloo's are aborted", change.reason, number)
        guest = attending()
        assert guest is not None
        if self._begun:
            # Gloo does not tell everybody. Then another rank has the state, and this one must not hold it up.
            guest.free_or_end()
        else:
            # Who waits for all to meet waits in vain, and cannot be freed.
            threading.Thread(target=self._insist, args=(guest,), name="craft-begin-again", daemon=True).start()

    def _insist(self, guest: Guest) -> None:
        """Have the job begin again; a newer generation may be made meanwhile, and is told, too."""
        deadline = time.monotonic() + _END_LIMIT_S
        while time.monotonic() < deadline:
            guest.begin_again()
            time.sleep(_LOOK_S)

    # Where the main thread is.

    def exchanges(self, begins: bool) -> None:
        """In the backward, and where wishes are agreed on: whoever is there may wait for others."""
        if begins != self._exchanging:
            self._exchanging = begins
            (self.guest.exchange_began if begins else self.guest.exchange_ended)()

    def begins(self) -> None:
        """A batch begins."""
        self._begun, self._between = True, False

    def updates(self) -> None:
        """The optimizer is about to change parameters: until the step is over, the state is not whole."""
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
        """All are about to leave: nobody does before the first one has told the lighthouse that the checkpoint is complete.

        Who leaves earlier is one that is lost with what it has, and the others are torn out of what they are in.
        """
        # Whoever comes out of it last may find that the others have gone.
        with suppress(RuntimeError):
            trainer.strategy.barrier("CraftCallback")

    # When it cannot go on.

    def is_lost(self, error: BaseException) -> bool:
        """Whether an error came out of a collective because somebody is gone, or all were to abort."""
        # Lightning's own, and the script's, are of other kinds for the most part.
        if not isinstance(error, RuntimeError):
            return False
        with self.guest.paused("waits to hear who is lost"):
            return self._changed.wait(_HOLD_LIMIT_S if "gloo" in str(error).lower() else _NEWS_LIMIT_S)

    def begin_again(self, trainer: Any) -> None:
        """Have the job begin again from the state that is here; ends with this process, or after a limit."""
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
            # Its step is done, though callbacks were not: it is not to be used once more.
            batches.increment_completed()
        path = os.path.join(self._folder, f"step={trainer.global_step}.ckpt")
        os.makedirs(self._folder, exist_ok=True)
        # By hand: the trainer's own way has all workers take part.
        trainer.strategy.checkpoint_io.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), f"{path}.part")
        self.listed(path, trainer.global_step)
        return True

    def listed(self, path: str, step: int) -> None:
        """A checkpoint is complete beside its place: put it there, and tell the lighthouse."""
        os.replace(f"{path}.part", path)
        self.guest.saved(os.path.basename(path), step, self._folder, os.path.getsize(path))
        logger.info("saved %s", path)
