"""The error by which a script ends, and its words, where a framework turned it into an exit code (hydra, click, argparse)."""

from __future__ import annotations

import traceback

from craft.protocol.errors import Refused


def real_error(raised: BaseException) -> BaseException:
    """Return what ``raised`` was raised for: the exception that was handled when ``sys.exit`` gave a number that is not 0.

    hydra's and click's main functions print an exception and exit. An exit with a message says itself what is wrong.
    """
    error = raised
    while isinstance(error, SystemExit) and isinstance(error.code, int) and error.code != 0:
        behind = error.__cause__ if error.__suppress_context__ else error.__context__ or _kept(error)
        if behind is None:
            break
        error = behind
    return error


def _kept(error: SystemExit) -> BaseException | None:
    """An exception that the function which exits has caught and still holds.

    click (8.5) leaves its ``except`` block before it exits, with the exception's ``show`` in a variable.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    held = [] if frames is None else [getattr(each, "__self__", each) for each in frames.tb_frame.f_locals.values()]
    raised = (each for each in held if isinstance(each, BaseException) and each.__traceback__ is not None)
    return next((each for each in raised if each is not error), None)


def sentence(raised: BaseException) -> str:
    """The error in one sentence, with the exit code that it was turned into."""
    error = real_error(raised)
    if isinstance(error, Refused):
        return str(error)
    said = "".join(traceback.format_exception_only(type(error), error)).strip()
    if error is raised or not isinstance(raised, SystemExit):
        return said
    return f"{said} (the script then exited with code {raised.code})"


def story(raised: BaseException, *skipped_files: str) -> str:
    """The traceback of the error, without the frames of ``skipped_files`` at its beginning."""
    error = real_error(raised)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in skipped_files:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
