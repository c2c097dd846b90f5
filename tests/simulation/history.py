"""What was committed and saved: the training of the simulated job, with a digest in the place of tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

MICROBATCHES = 4


class Violation(Exception):
    """A promise does not hold."""


def trained(digest: str, step: int, microbatches: frozenset[int]) -> str:
    """The state after a step, by the state before it and what went into it."""
    text = f"{digest} {step} {sorted(microbatches)}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class History:
    """One for the whole job. Raises Violation where two workers do not have the same."""

    steps: int
    committed: dict[tuple[int, int], str] = field(default_factory=lambda: {(0, 0): "initial"})
    """For each branch and number of steps: the digest of the state."""
    saved: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Complete checkpoints by name: branch, steps, digest."""
    newest_branch: int = 0
    last_commit: float = 0.0
    commits: int = 0

    def commit(self, worker_id: str, branch: int, step: int, digest: str, now: float) -> None:
        """A worker has committed so many steps."""
        if branch < self.newest_branch:
            raise Violation(
                f"P3: {worker_id} commits step {step} of branch {branch} after a commit of branch {self.newest_branch}:"
                " two courses of the job go on beside each other"
            )
        known = self.committed.setdefault((branch, step), digest)
        if known != digest:
            raise Violation(f"P3: {worker_id} has another state than others after step {step} of branch {branch}")
        if (branch, step - 1) not in self.committed:
            raise Violation(f"P3: {worker_id} commits step {step} of branch {branch}, and nobody the one before")
        self.newest_branch = branch
        self.last_commit = now
        self.commits += 1

    def begin(self, worker_id: str, branch: int, checkpoint: str | None) -> tuple[int, str]:
        """A worker begins from a checkpoint: returns its step and digest."""
        _, step, digest = self.saved[checkpoint] if checkpoint is not None else (0, 0, "initial")
        known = self.committed.setdefault((branch, step), digest)
        if known != digest:
            raise Violation(f"P3: {worker_id} begins branch {branch} from another state than others")
        return step, digest

    @property
    def furthest(self) -> int:
        """Committed steps of the newest branch."""
        return max(step for branch, step in self.committed if branch == self.newest_branch)
