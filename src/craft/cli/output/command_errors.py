"""Report errors of a command: one sentence, and an exit code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from craft.cli.output.echo import echo_error
from craft.protocol.errors import ConfigError, CraftError

P = ParamSpec("P")
R = TypeVar("R")

EXIT_PROBLEM = 1
EXIT_BAD_INPUT = 2


def explained(command: Callable[P, R]) -> Callable[P, R]:
    """For commands about a job: print the error on stderr, and exit with code 2."""
    return _explained(command, EXIT_BAD_INPUT)


def explained_as_problem(command: Callable[P, R]) -> Callable[P, R]:
    """For commands that look for problems: exit code 2 if other input would help, else 1."""
    return _explained(command, EXIT_PROBLEM)


def _explained(command: Callable[P, R], otherwise: int) -> Callable[P, R]:
    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except CraftError as error:
            echo_error(f"craft: {error}")
            raise SystemExit(EXIT_BAD_INPUT if isinstance(error, ConfigError) else otherwise) from None

    return wrapper
