"""Find an object within the objects that a script registered, and the line of the script that made a call.

The checks of a script's loop use it in the first steps only: nothing here is fast.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_MOST_OBJECTS = 20_000
_MOST_STEPS = 8
"""Most references between a registered object and what it holds."""
_OWN = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_LEAVES = (str, bytes, int, float, complex, torch.Tensor, types.ModuleType, type)


def reaches(roots: Iterable[Any], wanted: Any) -> bool:
    """Return whether ``wanted`` is one of ``roots``, or may be part of the state of one.

    A scheduler holds its optimizer but does not save it: that reference does not count.
    """
    seen: set[int] = set()
    queue = deque((root, 0) for root in roots)
    while queue and len(seen) < _MOST_OBJECTS:
        thing, depth = queue.popleft()
        if thing is wanted:
            return True
        if id(thing) in seen or isinstance(thing, _LEAVES) or depth >= _MOST_STEPS:
            continue
        seen.add(id(thing))
        queue.extend((each, depth + 1) for each in _held_by(thing))
    return False


def _held_by(thing: Any) -> Iterator[Any]:
    """Yield what ``thing`` refers to and may save in its state."""
    if isinstance(thing, LRScheduler):
        yield from getattr(thing, "_schedulers", ())
    elif isinstance(thing, Optimizer):
        # An optimizer may wrap another, such as a lookahead.
        yield from (each for each in vars(thing).values() if isinstance(each, Optimizer))
    elif isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from _used_by(thing)
    else:
        yield from _attributes(thing)


def _attributes(thing: Any) -> Iterator[Any]:
    yield from getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield getattr(thing, name)


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function's body names in its closure and in its module."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def objects_alive(*kinds: type) -> dict[type, list[Any]]:
    """Return all objects of these kinds, in one pass over those of the process: some tens of milliseconds."""
    found: dict[type, list[Any]] = {kind: [] for kind in kinds}
    for each in gc.get_objects():
        for kind in kinds:
            # Not isinstance: it may run code of proxies and lazily loaded modules.
            if issubclass(type(each), kind):
                found[kind].append(each)
    return found


def script_frame() -> FrameType | None:
    """Return the innermost frame on this thread that is neither CRAFT's nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, _TORCH)):
        frame = frame.f_back
    return frame


def script_line() -> str:
    """Return where the script is: ``train.py, line 12``; empty if unknown."""
    frame = script_frame()
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def name_in_script(thing: Any) -> str:
    """Return the name of the script's variable that holds ``thing``; empty if no variable does."""
    frame = script_frame()
    while frame is not None:
        for names in (frame.f_locals, frame.f_globals):
            for name, value in names.items():
                if value is thing and name.isidentifier() and not name.startswith("_"):
                    return name
        frame = frame.f_back
    return ""
