"""The parts of a control word that come from other than the exchange itself, as typed values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ConsistencyPart:
    """Hashes for comparison; ``Word`` says what each field means."""

    digest: bytes = b""
    probe: bytes = b""
    sample: bytes = b""
    state: bytes = b""
    whole: bytes = b""
    newcomer: bool = False
    agreed: int = 0
    computed: tuple[tuple[int, bytes], ...] = ()
    repeated: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True)
class CheckpointPart:
    """What this worker wants and knows of checkpoints; ``Word`` says what each field means."""

    save: str | None = None
    wish: int = 0
    busy: bool = False
    saved: tuple[int, int] = (0, 0)
    leave: bool = False


@dataclass(frozen=True)
class LoopPart:
    """What the training loop adds."""

    stop: str | None = None
    """Why the script or the lighthouse ends the job after this step; None: it goes on."""
    stop_is_final: bool = False
    """Whether it is the script that ends the job."""
    busy_us: int = 0
    """How long a microbatch took on this worker."""
    checkpoint: CheckpointPart = field(default_factory=CheckpointPart)
