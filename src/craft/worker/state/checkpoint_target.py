"""Choose where checkpoints go and how often they are taken: settings override the script's arguments."""

from __future__ import annotations

import logging
from typing import NamedTuple

from craft.decide.step.interval import Every, parse_every
from craft.decide.techniques import Checkpoints, Divergence
from craft.decide.techniques.technique import Chosen
from craft.protocol.errors import ConfigError, Refused
from craft.snapshots.store.tiers import Tiers, open_tiers

logger = logging.getLogger(__name__)


class CheckpointRequest(NamedTuple):
    """The arguments of ``job.checkpoints``."""

    url: str | None = None
    every: str = "auto"
    keep: int = 3
    local: str | None = None


class CheckpointTarget(NamedTuple):
    """Where a job's checkpoints go, how often, and how many are kept."""

    tiers: Tiers
    every: Every
    keep: int

    @classmethod
    def of(cls, url: str, every: str, keep: int, local: str | None, owner: str = "") -> CheckpointTarget:
        if not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"job.checkpoints(keep={keep!r}): at least 1 must be kept")
        if not url:
            raise ConfigError("job.checkpoints(''): say where checkpoints go: a path or a URL, such as s3://bucket/job")
        try:
            return cls(open_tiers(url, local, owner), parse_every(every), keep)
        except ConfigError as error:
            raise Refused(str(error)) from error


def choose_target(asked: CheckpointRequest, techniques: Chosen, owner: str = "") -> CheckpointTarget | None:
    """Return where checkpoints of the job ``owner`` go; None if none are taken.

    Raises Refused if another technique needs checkpoints.
    """
    technique, divergence = techniques.get(Checkpoints), techniques.get(Divergence)
    if technique is not None and (url := technique.settings.url or asked.url) is not None:
        given = technique.settings
        every, keep, local = given.every or asked.every, given.keep or asked.keep, given.local or asked.local
        return CheckpointTarget.of(url, every, keep, local, owner)
    if technique is None and asked.url is not None:
        logger.warning("technique checkpoints is switched off: job.checkpoints(%r) does nothing", asked.url)
    if divergence is not None and divergence.settings.answer == "rollback":
        raise Refused("--on-divergence rollback needs checkpoints to go back to: --checkpoints URL")
    return None


def check_every(target: CheckpointTarget | None, is_stream: bool) -> CheckpointTarget | None:
    """Return ``target``; raise Refused if its checkpoints are due by epochs and the data is a stream."""
    if target is not None and target.every.epochs is not None and is_stream:
        raise Refused(
            "checkpoints every so many epochs with a stream: a stream has one pass; give a number of steps or minutes"
        )
    return target


def check_tag(tag: str | None) -> None:
    """Raise ConfigError unless ``tag`` is a valid tag of a checkpoint."""
    if tag is not None and not (isinstance(tag, str) and 0 < len(tag) <= 64 and tag.isprintable()):
        raise ConfigError(f"job.checkpoint(tag={tag!r}): a tag is a word of at most 64 characters, such as 'best'")
