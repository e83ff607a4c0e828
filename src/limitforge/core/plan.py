"""Limits compiled for the hot path, once for each plan, priority and layer."""

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
BUCKET_US = 7  # the time that Redis needs for one bucket, in a batch
ENTRIES_PER_US = 20  # how many entries of a sliding window or leases Redis reads in a microsecond

ENFORCED = 1
COUNT_DENIED = 2
FORCED = 4


class Rule(msgspec.Struct, frozen=True, eq=False):
    """One limit compiled for one priority and layer."""

    limit: Limit
    algorithm: Algorithm
    percent: int
    scope: Scope
    layer: str
    """The letter of its layer: a plain string is formatted four times as fast as a member of an enum."""
    key_suffix: str
    overflow_suffix: str
    """The key suffix of its overflow bucket, which several plans may share. So it includes the parameters."""
    enforced: bool
    count_denied: bool
    counts_requests: bool
    overridable: bool
    """True if overrides apply: to subject and caller limits, except those of the operator."""
    delays: bool
    """True for an enforced leaky bucket: an allowed check learns how long to wait."""
    has_level: bool
    """True for a token bucket or a leaky bucket, whose state is a level."""
    holds_lease: bool
    """True for a concurrency limit."""
    is_dynamic: bool
    """True if the algorithm's parameters depend on the key (a spread window) or on the time (a quota)."""
    prepaid: bool
    """True if this process may have debited a share of it in advance."""
    local: bool
    """True if this process decides alone, with the limit divided by the number of processes."""
    forced: bool
    """True for a charge: it takes its cost even without room, up to twice the limit."""
    script_args: tuple[Any, ...]
    """What the script reads: algorithm, flags, percent, name, parameters, 1 if several resources share the bucket."""
    calendar_cache: list["Rule"]
    """The rule that `with_calendar_at` returned last, if any: the windows of a quota change at most once a day."""

    @classmethod
    def compile(cls, limit: Limit, priority: Priority, layer: Layer, mode: Mode = Mode.ON) -> "Rule":
        algorithm = limit.compiled
        enforced = weakest_mode(Mode(limit.mode), mode) is Mode.ON
        count_denied = limit.count_denied and enforced
        is_spread = isinstance(algorithm, FixedWindowAlgorithm) and algorithm.kind == WindowKind.SPREAD
        flags = ENFORCED * enforced + COUNT_DENIED * count_denied
        return cls(
            limit=limit,
            algorithm=algorithm,
            percent=limit.percent(priority),
            scope=Scope(limit.scope),
            layer=layer.value,
            key_suffix=f"{limit.name}:{algorithm.letter}{limit.shape}",
            overflow_suffix=_overflow_suffix(limit, layer),
            enforced=enforced,
            count_denied=count_denied,
            counts_requests=limit.counts is Counts.REQUESTS,
            overridable=limit.scope in (Scope.SUBJECT, Scope.CALLER) and layer is not Layer.OPERATOR,
            delays=enforced and isinstance(algorithm, LeakyBucketAlgorithm),
            has_level=isinstance(algorithm, LevelAlgorithm),
            holds_lease=isinstance(algorithm, ConcurrencyAlgorithm),
            is_dynamic=is_spread or isinstance(limit, Quota),
            prepaid=limit.consistency is Consistency.PREPAID and enforced,
            local=limit.consistency is Consistency.LOCAL,
            forced=False,
            script_args=(
                algorithm.code,
                flags,
                limit.percent(priority),
                limit.name,
                algorithm.parameters(),
                int(limit.scope is not Scope.SUBJECT),
            ),
            calendar_cache=[],
        )

    def cost_of(self, cost: int) -> int:
        """Return what a check of this cost takes: 1 if the limit counts requests, except for a peek.

        The paths of most checks inline this, because a call takes longer than the expression.
        """
        return 1 if self.counts_requests and cost else cost

    def for_key(self, key: str) -> "Rule":
        """Return this rule for a key without its prefix: a spread window then has the same phase in every store."""
        if isinstance(self.algorithm, FixedWindowAlgorithm):
            return self._with_algorithm(msgspec.structs.replace(self.algorithm, offset=spread_offset(key)))
        return self

    def for_overflow_bucket(self) -> "Rule":
        """Return this rule for an overflow bucket: its subjects share one phase of a spread window."""
        if isinstance(self.algorithm, FixedWindowAlgorithm) and self.algorithm.offset:
            return self._with_algorithm(msgspec.structs.replace(self.algorithm, offset=0))
        return self

    def with_calendar_at(self, now_us: int) -> "Rule":
        """Return this rule with the calendar windows around `now_us`."""
        if not isinstance(self.limit, Quota):
            return self
        for known in self.calendar_cache:
            if known.algorithm.second <= now_us < known.algorithm.third:  # type: ignore[attr-defined]
                return known
        windows = self.limit.calendar.windows_around(now_us)
        self.calendar_cache[:] = [
            self._with_algorithm(self.algorithm.with_parameters((*self.algorithm.parameters()[:2], *windows)))
        ]
        return self.calendar_cache[0]

    def as_charge(self) -> "Rule":
        """Return this rule for a cost that was admitted without asking the store."""
        code, flags, _, *rest = self.script_args
        script_args = (code, (flags & ENFORCED) | FORCED, 100, *rest)
        return msgspec.structs.replace(
            self, forced=True, count_denied=False, percent=100, script_args=script_args, calendar_cache=[]
        )

    def divided_by(self, processes: int) -> "Rule":
        """Return this rule with the limit divided by the number of processes that decide alone, at least 1."""
        if processes == 1 or self.algorithm.limit <= 0:
            return self
        part = msgspec.structs.replace(self._with_algorithm(self.algorithm.divided_by(processes)), local=False)
        if percent_of(part.algorithm.limit, part.percent) or not percent_of(self.algorithm.limit, self.percent):
            return part
        return msgspec.structs.replace(part, percent=100)  # at least 1 for every priority that may take anything

    def _with_algorithm(self, algorithm: Algorithm) -> "Rule":
        return msgspec.structs.replace(
            self,
            algorithm=algorithm,
            script_args=(*self.script_args[:4], algorithm.parameters(), self.script_args[5]),
            calendar_cache=[],
        )


def _overflow_suffix(limit: Limit, layer: Layer) -> str:
    algorithm = limit.compiled
    parameters = "/".join(map(str, algorithm.parameters()[: algorithm.override_width]))
    return f"{layer.value}{limit.scope[0]}:{limit.name}:{parameters}:{algorithm.letter}{limit.shape}"


class Plan(msgspec.Struct, frozen=True, eq=False):
    """The rules of limits that are decided together, with the names under which they are reported."""

    rules: tuple[Rule, ...]
    names: tuple[str, ...]
    indexes_by_name: Mapping[str, tuple[int, ...]]
    """The indexes of the rules that a name means. A limit that is off has a name and no rule, so that callers may still
    send a cost for it.
    """
    takes_lease: bool
    is_dynamic: bool
    is_hybrid: bool
    """True if this process may decide some of the rules: those that are prepaid or local."""
    weight_us: int
    """The estimated time that a check of these rules takes in Redis. It bounds the size of a batch."""
    uniform_rules: tuple[tuple[Rule, str, bool, bool], ...]
    """Each rule with its key suffix, `counts_requests` and `overridable`, for the fast path.

    Empty unless all rules have the same scope and layer and none is dynamic.
    """

    @classmethod
    def compile(cls, limits: Sequence[Limit], priority: Priority, layer: Layer, mode: Mode = Mode.ON) -> "Plan":
        """Compile the limits. No limit has a mode that is stronger than `mode`."""
        enabled = [limit for limit in limits if weakest_mode(Mode(limit.mode), mode) is not Mode.OFF]
        names = tuple(limit.name for limit in enabled)
        indexes_by_name: dict[str, tuple[int, ...]] = {limit.name: () for limit in limits}
        indexes_by_name |= {name: (index,) for index, name in enumerate(names)}
        rules = tuple(Rule.compile(limit, priority, layer, mode) for limit in enabled)
        return cls.from_rules(rules, names, indexes_by_name)

    @classmethod
    def from_rules(
        cls, rules: tuple[Rule, ...], names: tuple[str, ...], indexes_by_name: Mapping[str, tuple[int, ...]]
    ) -> "Plan":
        return cls(
            rules=rules,
            names=names,
            indexes_by_name=indexes_by_name,
            takes_lease=any(rule.holds_lease for rule in rules),
            is_dynamic=any(rule.is_dynamic for rule in rules),
            is_hybrid=any(rule.prepaid or rule.local for rule in rules),
            weight_us=weight_us(rules),
            uniform_rules=_uniform_rules(rules),
        )


def _uniform_rules(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, str, bool, bool], ...]:
    if any(rule.is_dynamic for rule in rules) or len({(rule.scope, rule.layer) for rule in rules}) != 1:
        return ()
    return tuple((rule, rule.key_suffix, rule.counts_requests, rule.overridable) for rule in rules)


_WEAKEST_FIRST = (Mode.OFF, Mode.MONITOR, Mode.ON)


def weakest_mode(*modes: Mode) -> Mode:
    """Return the mode of a limit to which all of these apply: off if any is off, else monitor if any is monitor."""
    return min(modes, key=_WEAKEST_FIRST.index)


def weight_us(rules: Iterable[Rule]) -> int:
    """Estimate the time that these rules take in Redis."""
    return sum(
        BUCKET_US + (rule.algorithm.limit // ENTRIES_PER_US if isinstance(rule.algorithm, LedgerAlgorithm) else 0)
        for rule in rules
    )


class Limits:
    """Limits with distinct names that are checked together, in this order: at most 32.

    Arguments called `limits` also take a single limit, an iterable of limits, or their text. A `Limits` object that is
    made once and passed to every check is the fastest. Raises `InvalidLimit` if two limits have the same name.
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
        self.plans: dict[str, Plan] = {}  # by priority, in the policy layer: what nearly every check uses
        self._other_plans: dict[tuple[Layer, Mode], dict[str, Plan]] = {}

    @staticmethod
    def parse(text: str) -> "Limits":
        """Return the limits of a text such as `"100/minute; burst=10/second"`.

        Raises `InvalidLimit` whose message points at the wrong token.
        """
        if not isinstance(text, str):
            raise InvalidLimit("limits", f"must be text such as '100/minute', got {type(text).__name__}")
        return _parsed(text)

    @staticmethod
    def of(given: "LimitsLike") -> "Limits":
        """Return the limits of any argument called `limits`. Raises `InvalidLimit`."""
        if isinstance(given, Limits):
            return given
        if isinstance(given, str):
            return _parsed(given)
        if isinstance(given, Limit):
            return _single(given)
        if isinstance(given, Iterable):
            return Limits(*given)
        raise InvalidLimit("limits", f"must be limits or their text, got {type(given).__name__}")

    def plan(self, priority: str, layer: Layer = Layer.POLICY, mode: Mode = Mode.ON) -> Plan:
        """Return the compiled limits. They are compiled once for each priority, layer and mode.

        No limit gets a mode that is stronger than `mode`. Raises `InvalidInput` if the priority is unknown.
        """
        is_default = layer is Layer.POLICY and mode is Mode.ON
        plans = self.plans if is_default else self._other_plans.setdefault((layer, mode), {})
        try:
            return plans[priority]
        except (KeyError, TypeError):
            known = parse_priority(priority)
        return plans.setdefault(known, Plan.compile(self._limits, known, layer, mode))

    def all_on(self) -> "Limits":
        """Return the same limits with mode `on`: a limit that is off may still have a bucket."""
        return Limits(*(replace(limit, mode=Mode.ON) for limit in self._limits))

    def overridable(self, names: Collection[object]) -> "Limits":
        """Return the limits that an override of these names may change."""
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
    """Return the priority of this name. Raise `InvalidInput` if it is unknown."""
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
