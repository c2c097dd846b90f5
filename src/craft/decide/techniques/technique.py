"""The role ``Technique``: a named, configurable unit of detection and/or response.

Built-in ones (``decide.techniques``) and those of other packages (entry-point group ``craft.techniques``) are the same to
all who use them. Every process of a job makes each of its own, from the same settings. Then, in this order:

1. ``craft run`` asks each for its ``objection``, before anything is started.
2. The lighthouse asks for ``policies`` and puts them one behind the other; the first that answers an event wins.
3. Each worker asks for ``hooks`` when its loop over the steps begins, and calls them at the safe points of every step.

The module of a technique is imported by the lighthouse, too: torch belongs into that of its hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from craft.decide.policies.policy import Policy
from craft.protocol.control_word import Combined
from craft.protocol.errors import ConfigError
from craft.protocol.events import Event
from craft.protocol.membership import Generation


class NoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a technique that has none."""


S_co = TypeVar("S_co", bound=msgspec.Struct, covariant=True)
T = TypeVar("T")


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A safe point of a step, as a hook sees it."""

    step: int
    """The step in flight; in ``after_commit`` the one that was just committed."""
    branch: int
    generation: int
    members: tuple[str, ...]
    """The workers of that generation, in the order of their ranks."""
    microbatch: int | None = None
    """What is being computed; None where no microbatch is."""
    metrics: Mapping[str, float] = {}
    """In ``after_commit``: what was logged, averaged over the global batch."""
    word: Combined | None = None
    """In ``after_commit``: what all workers said in this step, combined; the same on every worker."""
    under: Generation | None = None
    """In ``after_commit``: the generation in which the result came about, whenever each worker committed it."""
    lost: tuple[str, ...] = ()
    """In ``generation_change``: members of the generation before that are not in this one."""
    behind: bool = False
    """Whether this worker still catches up, and takes no part in what the others do between the steps."""


class Surroundings(Protocol):
    """What hooks may know and do."""

    @property
    def worker_id(self) -> str: ...

    @property
    def host(self) -> str: ...

    def tell(self, what: str, value: float | None = None, detail: str = "") -> None:
        """Have ``ConditionSeen`` reach the lighthouse, where policies answer it, and the journal. Any thread may."""


class Hooks:
    """What a technique does in a worker, at the safe points of a step, on the main thread. Override what is needed.

    A step calls, in this order: for each microbatch of this worker ``batch_start`` and ``after_backward``; ``before_commit``
    once all of them are exchanged; ``after_commit``. ``generation_change`` comes between any two of these. Every call holds the
    worker up for as long as it takes. Nothing in them may change the state: it would differ from that of the others.
    """

    def batch_start(self, moment: Moment) -> None:
        """The script is about to get a microbatch."""

    def after_backward(self, moment: Moment) -> None:
        """The script is done with a microbatch: its gradient is held."""

    def before_commit(self, moment: Moment) -> None:
        """This worker has computed its share; it is exchanged, and acknowledged by all, next."""

    def after_commit(self, moment: Moment) -> None:
        """The step is committed; the script's update of the state comes next."""

    def generation_change(self, moment: Moment) -> None:
        """The members of a newer generation have met, and agree on the step in flight."""

    def close(self) -> None:
        """The loop over the steps has ended, however that came about."""


POINTS = ("batch_start", "after_backward", "before_commit", "after_commit", "generation_change")


class Technique(Generic[S_co]):
    """Derive from it, and name the class in the entry-point group ``craft.techniques``."""

    name: ClassVar[str]
    """What it is called in craft.toml, in ``craft techniques`` and in the journal."""
    summary: ClassVar[str]
    """One line for people."""
    Settings: ClassVar[type[msgspec.Struct]] = NoSettings
    """Frozen, every field with a default, described by ``says``; unknown keys are refused."""
    flags: ClassVar[Mapping[str, str]] = {}
    """Names that settings have outside of their table: ``--on-loss`` and ``CRAFT_ON_LOSS`` for ``{"on_loss": "answer"}``.

    Those of CRAFT alone have such names; of others this is not looked at, and ``--set NAME.KEY=VALUE`` is there for them.
    """
    shared: ClassVar[tuple[str, ...]] = ()
    """Settings that must be the same on every worker, because bits or plans depend on them."""
    emits: ClassVar[tuple[type[Event], ...]] = ()
    answers: ClassVar[tuple[type[Event], ...]] = ()
    points: ClassVar[tuple[str, ...]] = ()
    """Safe points at which its hooks wait, of ``POINTS``; for people, calls go to whatever the hooks override."""
    before: ClassVar[tuple[str, ...]] = ("alerts",)
    """Techniques whose policies are asked after this one's."""
    optional: ClassVar[bool] = True
    """Whether it can be switched off."""

    def __init__(self, settings: S_co) -> None:
        self.settings = settings

    @classmethod
    def check(cls, settings: Any) -> None:
        """Raise ConfigError if the settings, each of them good in itself, are not good together.

        A message that begins with a key, such as ``every='often': ...``, is put down to the line that has it.
        """

    def objection(self, others: Mapping[str, Technique[Any]]) -> str | None:
        """Why it cannot work beside ``others`` (all that are on, itself included), or None."""
        return None

    def inexact(self) -> str | None:
        """Why, with these settings, the weights can differ from those of an undisturbed run; None if they cannot."""
        return None

    def policies(self) -> Sequence[Policy]:
        """What it decides in the lighthouse: pure functions of the job's state and an event."""
        return ()

    def hooks(self, surroundings: Surroundings) -> Hooks | None:
        """What it does in a worker."""
        return None


def described(kind: type[Technique[Any]]) -> str:
    """A technique and its class, for whoever has to find it: ``technique thermal (craft_thermal:Thermal)``."""
    return f"technique {kind.name} ({kind.__module__}:{kind.__qualname__})"


AnyTechnique = Technique[Any]
K = TypeVar("K", bound=Technique[Any])


class Chosen:
    """The techniques of a job that are on, in the order in which their policies are asked."""

    def __init__(self, techniques: Sequence[AnyTechnique] = ()) -> None:
        self._by_name = {each.name: each for each in techniques}

    @property
    def by_name(self) -> Mapping[str, AnyTechnique]:
        return self._by_name

    def get(self, kind: type[K]) -> K | None:
        """The technique of this class, if it is on."""
        found = self._by_name.get(kind.name)
        return found if isinstance(found, kind) else None

    def policies(self) -> tuple[Policy, ...]:
        return tuple(policy for each in self._by_name.values() for policy in each.policies())

    def answer(self, kind: type[Event]) -> bool:
        """Whether any of them declares that it answers such events."""
        return any(kind in each.answers for each in self._by_name.values())

    def check(self) -> None:
        """Raise ConfigError with the reason if two of them cannot work together."""
        for each in self._by_name.values():
            try:
                objection = each.objection(self._by_name)
            except Exception as error:
                raise ConfigError(f"{described(type(each))}: objection: {type(error).__name__}: {error}") from error
            if objection is not None:
                raise ConfigError(f"technique {each.name}: {objection}")

    def shared(self) -> dict[str, int | float | str | bool | None]:
        """What must be the same on every worker."""
        return {
            f"{each.name}.{key}": getattr(each.settings, key) for each in self._by_name.values() for key in each.shared
        }


def arrange(kinds: Sequence[type[AnyTechnique]], order: Sequence[str] = ()) -> list[type[AnyTechnique]]:
    """Put techniques in the order in which their policies are asked.

    ``order`` comes from craft.toml and counts most; then what each says it comes ``before``; else they stay as they are.
    """
    names = [kind.name for kind in kinds]
    ahead: dict[str, set[str]] = {name: set() for name in names}
    wanted = [name for name in order if name in ahead]
    for earlier, later in pairwise(wanted):
        ahead[later].add(earlier)
    for kind in kinds:
        for later in kind.before:
            if later in ahead and not (kind.name in wanted and later in wanted):
                ahead[later].add(kind.name)
    by_name, arranged = {kind.name: kind for kind in kinds}, dict[str, type[AnyTechnique]]()

    def place(name: str, behind: tuple[str, ...]) -> None:
        if name in behind:
            raise ConfigError(f"techniques {', '.join(behind)}: each is to come before another of them")
        for other in names:
            if other in ahead[name] and other not in arranged:
                place(other, (*behind, name))
        arranged.setdefault(name, by_name[name])

    for name in names:
        place(name, ())
    return list(arranged.values())
