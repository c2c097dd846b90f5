"""The role ``Technique``: a named, configurable unit of detection and/or response.

Techniques of CRAFT (``decide.techniques``) and of other packages (entry-point group ``craft.techniques``) are used alike.
Every process of a job makes its own instances, from the same settings. Then, in this order:

1. ``craft run`` asks each for its ``objection``, before anything is started.
2. The lighthouse asks for ``policies`` and chains them; the first that answers an event wins.
3. Each worker asks for ``hooks`` when its loop over the steps begins, and calls them at the safe points of every step.

The lighthouse imports the module of a technique: torch belongs into the module of its hooks.
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
    """The settings of a technique without any."""


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
    """The microbatch being computed; None between microbatches."""
    metrics: Mapping[str, float] = {}
    """In ``after_commit``: what was logged, averaged over the global batch."""
    word: Combined | None = None
    """In ``after_commit``: the combined control word of this step; the same on every worker."""
    under: Generation | None = None
    """In ``after_commit``: the generation of the result; the same on every worker."""
    lost: tuple[str, ...] = ()
    """In ``generation_change``: members of the former generation that are not in this one."""
    behind: bool = False
    """Whether this worker is still catching up, and takes no part in calls between the steps."""


class Surroundings(Protocol):
    """What hooks may know and do."""

    @property
    def worker_id(self) -> str: ...

    @property
    def host(self) -> str: ...

    def tell(self, what: str, value: float | None = None, detail: str = "") -> None:
        """Report ``ConditionSeen`` to the lighthouse, for policies and the journal. Callable from any thread."""


class Hooks:
    """What a technique does in a worker, at the safe points of a step, on the main thread. Override what is needed.

    A step calls, in this order: for each microbatch of this worker ``batch_start`` and ``after_backward``; ``before_commit``
    once all of them are exchanged; ``after_commit``. ``generation_change`` may come between any two of these. Every call
    delays the worker. A hook must not change the training state: it would differ from that of the others.
    """

    def batch_start(self, moment: Moment) -> None:
        """The script is about to get a microbatch."""

    def after_backward(self, moment: Moment) -> None:
        """The script is done with a microbatch: its gradient is held."""

    def before_commit(self, moment: Moment) -> None:
        """This worker computed its share; the exchange and the acknowledgements come next."""

    def after_commit(self, moment: Moment) -> None:
        """The step is committed; the script's update of the state comes next."""

    def generation_change(self, moment: Moment) -> None:
        """The members of a newer generation agree on the step in flight."""

    def close(self) -> None:
        """The loop over the steps ended, normally or not."""


POINTS = ("batch_start", "after_backward", "before_commit", "after_commit", "generation_change")


class Technique(Generic[S_co]):
    """Derive from it, and list the class in the entry-point group ``craft.techniques``."""

    name: ClassVar[str]
    """Its name in craft.toml, in ``craft techniques`` and in the journal."""
    summary: ClassVar[str]
    """One line for people."""
    Settings: ClassVar[type[msgspec.Struct]] = NoSettings
    """Frozen, every field with a default, described by ``says``; unknown keys are refused."""
    flags: ClassVar[Mapping[str, str]] = {}
    """Names of settings outside of their table: ``--on-loss`` and ``CRAFT_ON_LOSS`` for ``{"on_loss": "answer"}``.

    Only for built-in techniques; settings of others are given by ``--set NAME.KEY=VALUE``.
    """
    shared: ClassVar[tuple[str, ...]] = ()
    """Settings that must be the same on every worker, because bits or plans depend on them."""
    emits: ClassVar[tuple[type[Event], ...]] = ()
    answers: ClassVar[tuple[type[Event], ...]] = ()
    points: ClassVar[tuple[str, ...]] = ()
    """Safe points that its hooks use, of ``POINTS``. For display only: all that the hooks override is called."""
    before: ClassVar[tuple[str, ...]] = ("alerts",)
    """Techniques whose policies are asked after this one's."""
    optional: ClassVar[bool] = True
    """Whether it can be switched off."""

    def __init__(self, settings: S_co) -> None:
        self.settings = settings

    @classmethod
    def check(cls, settings: Any) -> None:
        """Raise ConfigError if the settings, each of them valid, do not fit together.

        A message that begins with a key, such as ``every='often': ...``, is attributed to the line of that key.
        """

    def objection(self, others: Mapping[str, Technique[Any]]) -> str | None:
        """Return why it cannot work with ``others`` (all active ones, itself included), or None."""
        return None

    def inexact(self) -> str | None:
        """Return why, with these settings, the weights can differ from those of an undisturbed run, or None."""
        return None

    def policies(self) -> Sequence[Policy]:
        """Return its policies in the lighthouse: pure functions of the job state and an event."""
        return ()

    def hooks(self, surroundings: Surroundings) -> Hooks | None:
        """Return its hooks in a worker."""
        return None


def described(kind: type[Technique[Any]]) -> str:
    """Return a technique with its class: ``technique thermal (craft_thermal:Thermal)``."""
    return f"technique {kind.name} ({kind.__module__}:{kind.__qualname__})"


AnyTechnique = Technique[Any]
K = TypeVar("K", bound=Technique[Any])


class Chosen:
    """The active techniques of a job, in the order in which their policies are asked."""

    def __init__(self, techniques: Sequence[AnyTechnique] = ()) -> None:
        self._by_name = {each.name: each for each in techniques}

    @property
    def by_name(self) -> Mapping[str, AnyTechnique]:
        return self._by_name

    def get(self, kind: type[K]) -> K | None:
        """Return the technique of this class, if it is active."""
        found = self._by_name.get(kind.name)
        return found if isinstance(found, kind) else None

    def policies(self) -> tuple[Policy, ...]:
        return tuple(policy for each in self._by_name.values() for policy in each.policies())

    def answer(self, kind: type[Event]) -> bool:
        """Return whether any of them declares that it answers such events."""
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
        """Return the settings that must be the same on every worker."""
        return {
            f"{each.name}.{key}": getattr(each.settings, key) for each in self._by_name.values() for key in each.shared
        }


def arrange(kinds: Sequence[type[AnyTechnique]], order: Sequence[str] = ()) -> list[type[AnyTechnique]]:
    """Put techniques in the order in which their policies are asked.

    ``order`` from craft.toml counts most, then each one's ``before``; else the order stays.
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
