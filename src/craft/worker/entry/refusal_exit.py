"""Give ``python script.py`` the exit code of ``craft run`` where CRAFT refuses the script."""

from __future__ import annotations

import sys
from types import TracebackType

from craft.protocol.errors import Refused

_REFUSED = 2


def install() -> None:
    """Wrap ``sys.excepthook``: after a refusal is printed, the interpreter ends with exit code 2 and not 1."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, Refused):
            # The interpreter takes the exit code of a SystemExit that its hook raises.
            raise SystemExit(_REFUSED)

    sys.excepthook = hook
