"""Limits compiled for the hot path: what a check needs of each limit, worked out once per plan and priority."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from limitforge.core.algorithms.concurrency import ConcurrencySteps
from limitforge.core.algorithms.fixed_window import FixedWindowSteps, WindowKind
from limitforge.core.algorithms.leaky_bucket import LeakyBucketSteps
from limitforge.core.algorithms.ledger import LedgerSteps
from limitforge.core.algorithms.level import LevelSteps
from limitforge.core.algorithms.steps import Steps
from limitforge.core.exact import share_of, shown
from limitforge.core.keys import Place, spread_offset
from limitforge.core.limits import Consistency, Counts, Limit, Mode, Priority, Quota, Scope
from limitforge.core.text import parse
from limitforge.errors import InvalidInput, InvalidLimit

MAX_LIMITS = 32
BUCKET_US = 7  # what one bucket takes in Redis, in a batch
LISTED_PER_US = 20  # and how many entries of a log or leases are read in a microsecond

ENFORCED = 1
COUNT_DENIED = 2
FORCED = 4


class Rule(msgspec.Struct, frozen=True, eq=False):
    """One limit as a store decides it, for one priority and place."""

    limit: Limit
    steps: Steps
    percent: int
    scope: Scope
    place: str
    """The letter of its place: a plain string, which is formatted four times as fast as an enum's member."""
    suffix: str
    overflow_suffix: str
    """That of its overflow bucket. Plans of several resources meet there, so it has the numbers of the limit too."""
    enforced: bool
    count_denied: bool
    requests: bool
    overridable: bool
    delays: bool
    is_bucket: bool
    holds_lease: bool
    varies: bool
    """Whether the steps depend on the key (a spread window) or on the time (a quota)."""
    leased: bool
    """Whether this process may have paid for a share of it in advance."""
    local: bool
    """Whether this process decides by its part of the limit."""
    forced: bool
    """Whether it takes without asking for room, up to twice the limit: what is charged after the fact."""
    row: tuple[Any, ...]
    """As the script reads it: algorithm, flags, percent, name, numbers, 1 if several resources share the bucket."""
    memo: list["Rule"]
    """The last rule that `around` made: a quota's windows change once a day at most."""

    @classmethod
    def compile(cls, limit: Limit, priority: Priority, place: Place, mode: Mode = Mode.ON) -> "Rule":
        steps = limit.steps
        enforced = weakest(Mode(limit.mode), mode) is Mode.ON
        count_denied = limit.count_denied and enforced
        spread = isinstance(steps, FixedWindowSteps) and steps.kind == WindowKind.SPREAD
        flags = ENFORCED * enforced + COUNT_DENIED * count_denied
        return cls(
            limit=limit,
            steps=steps,
            percent=limit.percent(priority),
            scope=Scope(limit.scope),
            place=place.value,
            suffix=f"{limit.name}:{steps.letter}{limit.shape}",
            overflow_suffix=_overflow_suffix(limit, place),
            enforced=enforced,
            count_denied=count_denied,
            requests=limit.counts is Counts.REQUESTS,
            overridable=limit.scope in (Scope.SUBJECT, Scope.CALLER) and place is not Place.OPERATOR,
            delays=enforced and isinstance(steps, LeakyBucketSteps),
            is_bucket=isinstance(steps, LevelSteps),
            holds_lease=isinstance(steps, ConcurrencySteps),
            varies=spread or isinstance(limit, Quota),
            leased=limit.consistency is Consistency.LEASED and enforced,
            local=limit.consistency is Consistency.LOCAL,
            forced=False,
            row=(
                steps.code,
                flags,
                limit.percent(priority),
                limit.name,
                steps.numbers(),
                int(limit.scope is not Scope.SUBJECT),
            ),
            memo=[],
        )

    def at(self, key: str) -> "Rule":
        """This rule for one key, without its prefix: the phase of a spread window is the same in every store."""
        if isinstance(self.steps, FixedWindowSteps):
            return self._with(msgspec.structs.replace(self.steps, offset=spread_offset(key)))
        return self

    def without_offset(self) -> "Rule":
        """This rule for a bucket that subjects share: a spread window has the same phase for all of them."""
        if isinstance(self.steps, FixedWindowSteps) and self.steps.offset:
            return self._with(msgspec.structs.replace(self.steps, offset=0))
        return self

    def around(self, now_us: int) -> "Rule":
        """This rule with the windows of its calendar around `now_us`."""
        if not isinstance(self.limit, Quota):
            return self
        for known in self.memo:
            if known.steps.second <= now_us < known.steps.third:  # type: ignore[attr-defined]
                return known
        windows = self.limit.calendar.around(now_us)
        self.memo[:] = [self._with(self.steps.overridden((*self.steps.numbers()[:2], *windows)))]
        return self.memo[0]

    def charged(self) -> "Rule":
        """This rule for a cost that was admitted, or counts, without having been asked for."""
        code, flags, _, *rest = self.row
        row = (code, flags % COUNT_DENIED + FORCED, 100, *rest)
        return msgspec.structs.replace(self, forced=True, count_denied=False, percent=100, row=row, memo=[])

    def divided(self, nodes: int) -> "Rule":
        """This rule for one of several nodes that can't ask each other: its part of the limit, at least 1."""
        if nodes == 1 or self.steps.limit <= 0:
            return self
        part = msgspec.structs.replace(self._with(self.steps.divided(nodes)), local=False)
        if share_of(part.steps.limit, part.percent) or not share_of(self.steps.limit, self.percent):
            return part
        return msgspec.structs.replace(part, percent=100)  # at least 1 for whoever has a share at all

    def _with(self, steps: Steps) -> "Rule":
        return msgspec.structs.replace(self, steps=steps, row=(*self.row[:4], steps.numbers(), self.row[5]), memo=[])


def _overflow_suffix(limit: Limit, place: Place) -> str:
    steps = limit.steps
    numbers = "/".join(map(str, steps.numbers()[: steps.override_width]))
    return f"{place.value}{limit.scope[0]}:{limit.name}:{numbers}:{steps.letter}{limit.shape}"


class Plan(msgspec.Struct, frozen=True, eq=False):
    """The rules of several limits that decide together, with the names under which they are reported."""

    rules: tuple[Rule, ...]
    names: tuple[str, ...]
    known: Mapping[str, tuple[int, ...]]
    """Which rules a name means. Those that are off have names too, and no rule: a caller may go on to send their
    costs.
    """
    leases: bool
    varies: bool
    is_mixed: bool
    """Whether some of it is decided in this process."""
    weight_us: int
    """What a check of these rules takes in Redis, by estimate: what travels together is bounded by it."""
    alike: tuple[tuple[Rule, str, bool, bool], ...]
    """Each rule, its suffix, whether it counts requests and whether overrides reach it: if all count in one place, for
    the same scope, and none depends on its key. Else nothing.
    """

    @classmethod
    def compile(cls, limits: Sequence[Limit], priority: Priority, place: Place, mode: Mode = Mode.ON) -> "Plan":
        """No limit is stronger than `mode`."""
        there = [limit for limit in limits if weakest(Mode(limit.mode), mode) is not Mode.OFF]
        names = tuple(limit.name for limit in there)
        off: dict[str, tuple[int, ...]] = {limit.name: () for limit in limits}
        known = off | {name: (at,) for at, name in enumerate(names)}
        return cls.of(tuple(Rule.compile(limit, priority, place, mode) for limit in there), names, known)

    @classmethod
    def of(cls, rules: tuple[Rule, ...], names: tuple[str, ...], known: Mapping[str, tuple[int, ...]]) -> "Plan":
        return cls(
            rules=rules,
            names=names,
            known=known,
            leases=any(rule.holds_lease for rule in rules),
            varies=any(rule.varies for rule in rules),
            is_mixed=any(rule.leased or rule.local for rule in rules),
            weight_us=weight_us(rules),
            alike=_alike(rules),
        )


def _alike(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, str, bool, bool], ...]:
    if any(rule.varies for rule in rules) or len({(rule.scope, rule.place) for rule in rules}) != 1:
        return ()
    return tuple((rule, rule.suffix, rule.requests, rule.overridable) for rule in rules)


_WEAKEST_FIRST = (Mode.OFF, Mode.MONITOR, Mode.ON)


def weakest(*modes: Mode) -> Mode:
    """Of several that hold for one limit, the one that it has: off, then monitor, then on."""
    return min(modes, key=_WEAKEST_FIRST.index)


def weight_us(rules: Iterable[Rule]) -> int:
    return sum(
        BUCKET_US + (rule.steps.limit // LISTED_PER_US if isinstance(rule.steps, LedgerSteps) else 0) for rule in rules
    )


class Limits:
    """An ordered set of limits with distinct names, ready to be checked together.

    Wherever limits are asked for, one limit, several, or their text will do; parse or build them once and pass the same
    object for speed.
    """

    __slots__ = ("_elsewhere", "_limits", "plans")

    def __init__(self, *limits: Limit) -> None:
        names: set[str] = set()
        for limit in limits:
            if not isinstance(limit, Limit):
                raise InvalidLimit("limits", f"must be limits, got {type(limit).__name__}")
            if limit.name in names:
                raise InvalidLimit(
                    "limits",
                    f"two limits are named {limit.name!r}; a limit without a name is named by its period, "
                    "so name one of them: 'burst=10/second' as text, else its field `name`",
                )
            names.add(limit.name)
        if len(limits) > MAX_LIMITS:
            raise InvalidLimit("limits", f"at most {MAX_LIMITS} in one check, got {len(limits)}")
        self._limits = limits
        self.plans: dict[str, Plan] = {}  # by priority: those that nearly every check asks for
        self._elsewhere: dict[tuple[Place, Mode], dict[str, Plan]] = {}

    @staticmethod
    def parse(text: str) -> "Limits":
        """Limits from their string form, such as `"100/minute; burst=10/second"`."""
        if not isinstance(text, str):
            raise InvalidLimit("limits", f"must be text such as '100/minute', got {type(text).__name__}")
        return _parsed(text)

    @staticmethod
    def of(given: "LimitsLike") -> "Limits":
        if isinstance(given, Limits):
            return given
        if isinstance(given, str):
            return _parsed(given)
        if isinstance(given, Limit):
            return _single(given)
        if isinstance(given, Iterable):
            return Limits(*given)
        raise InvalidLimit("limits", f"must be limits or their text, got {type(given).__name__}")

    def plan(self, priority: str, place: Place = Place.POLICY, mode: Mode = Mode.ON) -> Plan:
        """These limits compiled, once per priority, place and the mode that none of them exceeds."""
        usual = place is Place.POLICY and mode is Mode.ON
        plans = self.plans if usual else self._elsewhere.setdefault((place, mode), {})
        try:
            return plans[priority]
        except (KeyError, TypeError):
            known = known_priority(priority)
        return plans.setdefault(known, Plan.compile(self._limits, known, place, mode))

    def all_on(self) -> "Limits":
        """The same limits, each of them on: those that are off have buckets too."""
        return Limits(*(replace(limit, mode=Mode.ON) for limit in self._limits))

    def overridable(self, names: Collection[object]) -> "Limits":
        """Those among which an override finds its names."""
        return self

    def __iter__(self) -> Iterator[Limit]:
        return iter(self._limits)

    def __len__(self) -> int:
        return len(self._limits)

    def __getitem__(self, name: str) -> Limit:
        for limit in self._limits:
            if limit.name == name:
                return limit
        raise KeyError(name)

    def __repr__(self) -> str:
        return f"Limits({', '.join(map(repr, self._limits))})"


LimitsLike = str | Limit | Limits | Iterable[Limit]


def known_priority(priority: object) -> Priority:
    try:
        return Priority(priority)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidInput("priority", f"must be one of {', '.join(Priority)}, got {shown(priority)}") from None


@lru_cache(maxsize=1_024)
def _parsed(text: str) -> Limits:
    return Limits(*parse(text))


@lru_cache(maxsize=1_024)
def _single(limit: Limit) -> Limits:
    return Limits(limit)
