"""Call NCCL through ctypes: the library that torch ships, without torch's process group.

In: device tensors and the stream to send them on. Out: work on that stream. ``nccl.py`` calls it.
docs/explanation/decisions/nccl_by_its_own_calls.md says why it does not go through torch.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch

from craft.groups.group import Transfers

ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_BYTE = 1
"""NCCL's number for uint8: everything is sent as bytes."""
_ABORT_PATIENCE_S = 1.0
"""How long an abort waits for a call on another thread to return before it ends the call."""


class NcclError(Exception):
    """A call to NCCL failed."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@functools.cache
def _library() -> Any:
    """Return the library that torch has loaded, or the one beside it; raise NcclError if neither exists."""
    problem = ""
    for name in ("libnccl.so.2", "libnccl.so", "libtorch_cuda.so"):
        try:
            found = ctypes.CDLL(name)
            found.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _Id, ctypes.c_int]
            found.ncclGetErrorString.restype = ctypes.c_char_p
            found.ncclGetLastError.restype = ctypes.c_char_p
            for each in ("ncclSend", "ncclRecv"):
                getattr(found, each).argtypes = [
                    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
                ]  # fmt: skip
        except (OSError, AttributeError) as error:
            problem = problem or str(error)
        else:
            return found
    raise NcclError(f"NCCL is not installed: {problem}")


def _check(code: int, call: str) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        text = _library().ncclGetErrorString(code).decode(errors="replace")
        detail = (_library().ncclGetLastError(None) or b"").decode(errors="replace").strip()
        raise NcclError(f"{call}: {text}{': ' + detail if detail else ''}")


def version() -> str:
    """Return the version, such as 2.28.9; raise NcclError without NCCL."""
    number = ctypes.c_int()
    _check(_library().ncclGetVersion(ctypes.byref(number)), "ncclGetVersion")
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def unique_id() -> bytes:
    """Return the identity that all members of a communicator share; its maker listens for the others from then on."""
    made = _Id()
    _check(_library().ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
    return ctypes.string_at(ctypes.byref(made), ID_BYTES)


class Communicator:
    """One rank's end. ``swap`` by one thread at a time; ``abort`` by any thread, at any moment."""

    def __init__(self, identity: bytes, rank: int, size: int, device: torch.device) -> None:
        """Connect all members; may block for ever if one dies meanwhile."""
        # Held while a call uses the communicator, so that an abort does not free it meanwhile.
        self._calls = threading.Lock()
        self._handle: ctypes.c_void_p | None = None
        made = _Id()
        ctypes.memmove(ctypes.byref(made), identity, ID_BYTES)
        handle = ctypes.c_void_p()
        # The current device is per thread, and this thread may have none yet.
        with torch.cuda.device(device):
            _check(_library().ncclCommInitRank(ctypes.byref(handle), size, made, rank), "ncclCommInitRank")
        self._handle = handle

    def swap(self, sends: Transfers, receives: Transfers, stream: torch.cuda.Stream) -> None:
        """Enqueue sends and receives on ``stream`` as one NCCL group: the order among peers does not matter."""
        library, where = _library(), ctypes.c_void_p(stream.cuda_stream)
        with self._calls, torch.cuda.device(stream.device):
            handle = self._alive()
            _check(library.ncclGroupStart(), "ncclGroupStart")
            try:
                for tensor, peer in sends:
                    _check(library.ncclSend(tensor.data_ptr(), _nbytes(tensor), _BYTE, peer, handle, where), "ncclSend")
                for tensor, peer in receives:
                    _check(library.ncclRecv(tensor.data_ptr(), _nbytes(tensor), _BYTE, peer, handle, where), "ncclRecv")
            finally:
                code = library.ncclGroupEnd()
            _check(code, "ncclGroupEnd")

    def error(self) -> str | None:
        """Return the asynchronous error, if any; None, too, while another call is under way."""
        if not self._calls.acquire(blocking=False):
            return None
        try:
            code = ctypes.c_int()
            _check(_library().ncclCommGetAsyncError(self._alive(), ctypes.byref(code)), "ncclCommGetAsyncError")
            _check(code.value, "NCCL")
        except NcclError as error:
            return str(error)
        finally:
            self._calls.release()
        return None

    def abort(self) -> None:
        """End all work, on the device too. Once it has returned, nothing is written any more."""
        patient = self._calls.acquire(timeout=_ABORT_PATIENCE_S)
        try:
            handle, self._handle = self._handle, None
            if handle is not None:
                _check(_library().ncclCommAbort(handle), "ncclCommAbort")
        finally:
            if patient:
                self._calls.release()

    def _alive(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise NcclError("the communicator was aborted")
        return self._handle


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
