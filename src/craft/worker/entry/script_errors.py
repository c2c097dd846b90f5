"""Find and describe the error that ends a script, also where a framework turned it into an exit code (hydra, click)."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from craft.protocol.errors import Refused

_REFUSED = 2


def real_error(raised: BaseException) -> BaseException:
    """Return the exception that was being handled when the script called ``sys.exit`` with a number other than 0.

    hydra's and click's main functions print an exception and exit. An exit with a message is its own error.
    """
    error = raised
    while isinstance(error, SystemExit) and isinstance(error.code, int) and error.code != 0:
        behind = error.__cause__ if error.__suppress_context__ else error.__context__ or _held_by_frame(error)
        if behind is None:
            break
        error = behind
    return error


def _held_by_frame(error: SystemExit) -> BaseException | None:
    """Return an exception that the exiting function has caught and still holds.

    click (8.5) leaves its ``except`` block before it exits, with the exception's ``show`` in a variable.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    held = [] if frames is None else [getattr(each, "__self__", each) for each in frames.tb_frame.f_locals.values()]
    raised = (each for each in held if isinstance(each, BaseException) and each.__traceback__ is not None)
    return next((each for each in raised if each is not error), None)


def summary(raised: BaseException) -> str:
    """Return the error in one sentence, with the exit code that it was turned into."""
    error = real_error(raised)
    if isinstance(error, Refused):
        return str(error)
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    if error is raised or not isinstance(raised, SystemExit):
        return text
    return f"{text} (the script then exited with code {raised.code})"


def script_traceback(raised: BaseException, *skipped_files: str) -> str:
    """Return the traceback of the error, without leading frames in ``skipped_files``."""
    error = real_error(raised)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in skipped_files:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def exit_with_refusal_code() -> None:
    """Make ``python script.py`` exit with 2, as ``craft run`` does, when CRAFT refuses the script."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, Refused):
            # The interpreter takes the exit code of a SystemExit that its hook raises.
            raise SystemExit(_REFUSED)

    sys.excepthook = hook
