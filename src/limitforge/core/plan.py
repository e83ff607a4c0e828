"""Limits compiled for the hot path: what a check needs of each limit, worked out once per plan and priority."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from limitforge.core.algorithms.base import Algorithm
from limitforge.core.algorithms.concurrency import ConcurrencyAlgorithm
from limitforge.core.algorithms.fixed_window import FixedWindowAlgorithm, WindowKind
from limitforge.core.algorithms.leaky_bucket import LeakyBucketAlgorithm
from limitforge.core.algorithms.ledger import LedgerAlgorithm
from limitforge.core.algorithms.level import LevelAlgorithm
from limitforge.core.exact import percent_of, short_repr
from limitforge.core.keys import Layer, spread_offset
from limitforge.core.limits import Consistency, Counts, Limit, Mode, Priority, Quota, Scope
from limitforge.core.text import parse_limits
from limitforge.errors import InvalidInput, InvalidLimit

MAX_LIMITS = 32
BUCKET_US = 7  # what one bucket takes in Redis, in a batch
ENTRIES_PER_US = 20  # and how many entries of a log or leases are read in a microsecond

ENFORCED = 1
COUNT_DENIED = 2
FORCED = 4


class Rule(msgspec.Struct, frozen=True, eq=False):
    """One limit as a store decides it, for one priority and place."""

    limit: Limit
    algorithm: Algorithm
    percent: int
    scope: Scope
    layer: str
    """The letter of its place: a plain string, which is formatted four times as fast as an enum's member."""
    key_suffix: str
    overflow_suffix: str
    """That of its overflow bucket. Plans of several resources meet there, so it has the numbers of the limit too."""
    enforced: bool
    count_denied: bool
    counts_requests: bool
    overridable: bool
    delays: bool
    is_bucket: bool
    holds_lease: bool
    is_dynamic: bool
    """Whether the steps depend on the key (a spread window) or on the time (a quota)."""
    prepaid: bool
    """Whether this process may have paid for a share of it in advance."""
    local: bool
    """Whether this process decides by its part of the limit."""
    forced: bool
    """Whether it takes without asking for room, up to twice the limit: what is charged after the fact."""
    script_args: tuple[Any, ...]
    """As the script reads it: algorithm, flags, percent, name, numbers, 1 if several resources share the bucket."""
    calendar_cache: list["Rule"]
    """The last rule that `around` made: a quota's windows change once a day at most."""

    @classmethod
    def compile(cls, limit: Limit, priority: Priority, place: Layer, mode: Mode = Mode.ON) -> "Rule":
        steps = limit.compiled
        enforced = weakest_mode(Mode(limit.mode), mode) is Mode.ON
        count_denied = limit.count_denied and enforced
        spread = isinstance(steps, FixedWindowAlgorithm) and steps.kind == WindowKind.SPREAD
        flags = ENFORCED * enforced + COUNT_DENIED * count_denied
        return cls(
            limit=limit,
            algorithm=steps,
            percent=limit.percent(priority),
            scope=Scope(limit.scope),
            layer=place.value,
            key_suffix=f"{limit.name}:{steps.letter}{limit.shape}",
            overflow_suffix=_overflow_suffix(limit, place),
            enforced=enforced,
            count_denied=count_denied,
            counts_requests=limit.counts is Counts.REQUESTS,
            overridable=limit.scope in (Scope.SUBJECT, Scope.CALLER) and place is not Layer.OPERATOR,
            delays=enforced and isinstance(steps, LeakyBucketAlgorithm),
            is_bucket=isinstance(steps, LevelAlgorithm),
            holds_lease=isinstance(steps, ConcurrencyAlgorithm),
            is_dynamic=spread or isinstance(limit, Quota),
            prepaid=limit.consistency is Consistency.PREPAID and enforced,
            local=limit.consistency is Consistency.LOCAL,
            forced=False,
            script_args=(
                steps.code,
                flags,
                limit.percent(priority),
                limit.name,
                steps.numbers(),
                int(limit.scope is not Scope.SUBJECT),
            ),
            calendar_cache=[],
        )

    def for_key(self, key: str) -> "Rule":
        """This rule for one key, without its prefix: the phase of a spread window is the same in every store."""
        if isinstance(self.algorithm, FixedWindowAlgorithm):
            return self._with(msgspec.structs.replace(self.algorithm, offset=spread_offset(key)))
        return self

    def without_offset(self) -> "Rule":
        """This rule for a bucket that subjects share: a spread window has the same phase for all of them."""
        if isinstance(self.algorithm, FixedWindowAlgorithm) and self.algorithm.offset:
            return self._with(msgspec.structs.replace(self.algorithm, offset=0))
        return self

    def at_time(self, now_us: int) -> "Rule":
        """This rule with the windows of its calendar around `now_us`."""
        if not isinstance(self.limit, Quota):
            return self
        for known in self.calendar_cache:
            if known.algorithm.second <= now_us < known.algorithm.third:  # type: ignore[attr-defined]
                return known
        windows = self.limit.calendar.windows_around(now_us)
        self.calendar_cache[:] = [self._with(self.algorithm.with_numbers((*self.algorithm.numbers()[:2], *windows)))]
        return self.calendar_cache[0]

    def as_charge(self) -> "Rule":
        """This rule for a cost that was admitted, or counts, without having been asked for."""
        code, flags, _, *rest = self.script_args
        row = (code, flags % COUNT_DENIED + FORCED, 100, *rest)
        return msgspec.structs.replace(
            self, forced=True, count_denied=False, percent=100, script_args=row, calendar_cache=[]
        )

    def divided(self, nodes: int) -> "Rule":
        """This rule for one of several nodes that can't ask each other: its part of the limit, at least 1."""
        if nodes == 1 or self.algorithm.limit <= 0:
            return self
        part = msgspec.structs.replace(self._with(self.algorithm.divided(nodes)), local=False)
        if percent_of(part.algorithm.limit, part.percent) or not percent_of(self.algorithm.limit, self.percent):
            return part
        return msgspec.structs.replace(part, percent=100)  # at least 1 for whoever has a share at all

    def _with(self, steps: Algorithm) -> "Rule":
        return msgspec.structs.replace(
            self,
            algorithm=steps,
            script_args=(*self.script_args[:4], steps.numbers(), self.script_args[5]),
            calendar_cache=[],
        )


def _overflow_suffix(limit: Limit, place: Layer) -> str:
    steps = limit.compiled
    numbers = "/".join(map(str, steps.numbers()[: steps.override_width]))
    return f"{place.value}{limit.scope[0]}:{limit.name}:{numbers}:{steps.letter}{limit.shape}"


class Plan(msgspec.Struct, frozen=True, eq=False):
    """The rules of several limits that decide together, with the names under which they are reported."""

    rules: tuple[Rule, ...]
    names: tuple[str, ...]
    indexes_by_name: Mapping[str, tuple[int, ...]]
    """Which rules a name means. Those that are off have names too, and no rule: a caller may go on to send their
    costs.
    """
    takes_lease: bool
    is_dynamic: bool
    is_partly_local: bool
    """Whether some of it is decided in this process."""
    weight_us: int
    """What a check of these rules takes in Redis, by estimate: what travels together is bounded by it."""
    uniform_rules: tuple[tuple[Rule, str, bool, bool], ...]
    """Each rule, its suffix, whether it counts requests and whether overrides reach it: if all count in one place, for
    the same scope, and none depends on its key. Else nothing.
    """

    @classmethod
    def compile(cls, limits: Sequence[Limit], priority: Priority, place: Layer, mode: Mode = Mode.ON) -> "Plan":
        """No limit is stronger than `mode`."""
        there = [limit for limit in limits if weakest_mode(Mode(limit.mode), mode) is not Mode.OFF]
        names = tuple(limit.name for limit in there)
        off: dict[str, tuple[int, ...]] = {limit.name: () for limit in limits}
        known = off | {name: (at,) for at, name in enumerate(names)}
        return cls.from_rules(tuple(Rule.compile(limit, priority, place, mode) for limit in there), names, known)

    @classmethod
    def from_rules(
        cls, rules: tuple[Rule, ...], names: tuple[str, ...], known: Mapping[str, tuple[int, ...]]
    ) -> "Plan":
        return cls(
            rules=rules,
            names=names,
            indexes_by_name=known,
            takes_lease=any(rule.holds_lease for rule in rules),
            is_dynamic=any(rule.is_dynamic for rule in rules),
            is_partly_local=any(rule.prepaid or rule.local for rule in rules),
            weight_us=weight_us(rules),
            uniform_rules=_alike(rules),
        )


def _alike(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, str, bool, bool], ...]:
    if any(rule.is_dynamic for rule in rules) or len({(rule.scope, rule.layer) for rule in rules}) != 1:
        return ()
    return tuple((rule, rule.key_suffix, rule.counts_requests, rule.overridable) for rule in rules)


_WEAKEST_FIRST = (Mode.OFF, Mode.MONITOR, Mode.ON)


def weakest_mode(*modes: Mode) -> Mode:
    """Of several that hold for one limit, the one that it has: off, then monitor, then on."""
    return min(modes, key=_WEAKEST_FIRST.index)


def weight_us(rules: Iterable[Rule]) -> int:
    return sum(
        BUCKET_US + (rule.algorithm.limit // ENTRIES_PER_US if isinstance(rule.algorithm, LedgerAlgorithm) else 0)
        for rule in rules
    )


class Limits:
    """An ordered set of limits with distinct names, ready to be checked together.

    Wherever limits are asked for, one limit, several, or their text will do; parse or build them once and pass the same
    object for speed.
    """

    __slots__ = ("_limits", "_other_plans", "plans")

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
        self._other_plans: dict[tuple[Layer, Mode], dict[str, Plan]] = {}

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

    def plan(self, priority: str, place: Layer = Layer.POLICY, mode: Mode = Mode.ON) -> Plan:
        """These limits compiled, once per priority, place and the mode that none of them exceeds."""
        usual = place is Layer.POLICY and mode is Mode.ON
        plans = self.plans if usual else self._other_plans.setdefault((place, mode), {})
        try:
            return plans[priority]
        except (KeyError, TypeError):
            known = parse_priority(priority)
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


def parse_priority(priority: object) -> Priority:
    try:
        return Priority(priority)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidInput("priority", f"must be one of {', '.join(Priority)}, got {short_repr(priority)}") from None


@lru_cache(maxsize=1_024)
def _parsed(text: str) -> Limits:
    return Limits(*parse_limits(text))


@lru_cache(maxsize=1_024)
def _single(limit: Limit) -> Limits:
    return Limits(limit)
