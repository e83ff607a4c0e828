"""A check as a store takes it: takes (one rule, one key, one cost each) that decide together, all or nothing."""

import os
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Literal

import msgspec

from limitforge.core.exact import MAX_COUNT, cost_of, shown
from limitforge.core.join import PLACE_WORDS, reported
from limitforge.core.keys import MAX_BYTES, Keys, Place, text
from limitforge.core.lanes import Home
from limitforge.core.limits import Limit, Mode, Scope
from limitforge.core.plan import MAX_LIMITS, Limits, LimitsLike, Plan, Rule, known_priority, weight_us
from limitforge.errors import InvalidInput

TOKEN_BYTES = 8
MAX_QUESTIONS = 16_384  # that are known, each in half a kilobyte


class Failure(StrEnum):
    """How a check is decided when its store can't: let it pass, deny it, decide by this node's share of the limit in
    memory, or leave it to the caller (`StoreUnavailable`).
    """

    OPEN = "open"
    CLOSED = "closed"
    LOCAL = "local"
    RAISE = "raise"


FailureName = Literal["open", "closed", "local", "raise"]


class Entry(msgspec.Struct, frozen=True):
    """One limit with what it is asked for: gateways give each limit a resource, a subject and a cost of its own."""

    limit: Limit
    resource: str | bytes
    subject: str | bytes
    cost: int = 1
    place: Place = Place.POLICY


Take = tuple[Rule, str, int, str, str | None]
"""What a check wants of one bucket: rule, key, cost, resource, and where its subject's overrides are, if they reach it.

A tuple, since one is made for each limit of each check."""


class Hold(msgspec.Struct, frozen=True):
    """A check that reserves: its record's key and token, and what happens to it when nobody settles.

    One that `awaits` is held for limits elsewhere that must have room too: it is given back after a moment unless it
    is confirmed. Without a key there is no record, and nothing to settle.
    """

    key: str
    token: bytes
    ttl_us: int
    refund: bool
    awaits: bool = False


class Check(msgspec.Struct, gc=False):
    """What decides together. `lease` is the token of the slots that it may take, `varies` tells that a rule depends
    on the time, `hold` makes it a reservation, `shadow` is a candidate plan that is judged beside it, `failure` says
    what happens when the store can't decide (None: as the store is set), `weight_us` estimates what it takes in Redis.
    One that `is_part` of another is answered with what the store told, not with a decision; one that `is_raw` too,
    unless there is more to say. `is_mixed` tells that this process may decide some of it.

    One that has a `question` is that about its subject, for its cost: what it takes is written out when somebody asks.
    """

    written: list[Take] | None
    names: tuple[str, ...]
    lease: bytes = b""
    varies: bool = False
    weight_us: int = 0
    question: "Question | None" = None
    subject: str = ""
    base: str = ""
    """What the keys of its buckets start with."""
    cost: int = 0
    hold: Hold | None = None
    shadow: "Check | None" = None
    failure: Failure | None = None
    is_part: bool = False
    is_mixed: bool = False
    is_raw: bool = False

    @property
    def takes(self) -> list[Take]:
        if self.written is None:
            self.written = [] if self.question is None else self.question.takes(self.subject, self.base, self.cost)
        return self.written

    @property
    def place(self) -> str:
        """One of its buckets, by which it is found: the first that is its subject's own, if there is one."""
        if self.written is None and self.question is not None:
            return self.base + self.question.plan.alike[0][1]
        for rule, key, *_ in self.takes:
            if rule.scope is Scope.SUBJECT or rule.scope is Scope.CALLER:
                return key
        return self.takes[0][1] if self.takes else ""

    def around(self, now_us: int) -> None:
        """Lay every quota's windows around a time."""
        for at in range(len(self.takes)):
            self.around_one(at, now_us)

    def around_one(self, at: int, now_us: int) -> None:
        rule, *rest = self.takes[at]
        self.takes[at] = (rule.around(now_us), *rest)  # type: ignore[assignment]


def check_of(
    keys: Keys,
    limits: LimitsLike,
    resource: str | bytes,
    subject: str | bytes,
    cost: int,
    costs: Mapping[str, int] | None,
    tenant: str | bytes,
    priority: str,
    shadow: LimitsLike | None = None,
) -> Check:
    """The simple form: one resource, one subject, and one cost for every limit (or one by name)."""
    is_known = _is_itself(limits) and (shadow is None or _is_itself(shadow))
    if not isinstance(limits, Limits):
        limits = Limits.of(limits)
    try:
        ask = _known_question if is_known else question_of
        question = ask(keys, keys.generation, limits, resource, tenant, priority, shadow)
    except TypeError:  # something can't be looked up; if it is nonsense, that is said now
        question = question_of(keys, keys.generation, limits, resource, tenant, priority, shadow)
    return question.check(subject, cost, costs)


class Question(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What all checks of one resource by one plan have in common: only their subjects and costs differ. It holds for
    as long as the keys are of this `generation`.
    """

    keys: Keys
    generation: int
    plan: Plan
    candidate: Plan | None
    resource: str
    home: Home
    index: str
    """Of the overrides of its subjects."""
    start: str
    """What the key of every bucket starts with, up to the subject; empty if that is not the same for all."""

    def check(self, subject: str | bytes, cost: int, costs: Mapping[str, int] | None) -> Check:
        if type(cost) is not int or not 0 <= cost <= MAX_COUNT:
            cost = cost_of("cost", cost)
        if type(subject) is not str or len(subject) > MAX_BYTES or not subject.isascii():
            subject = text("subject", subject)
        plan = self.plan
        if not self.start or costs is not None or self.candidate is not None:
            return self._any_check(subject, cost, costs)
        return Check(
            None,
            plan.names,
            os.urandom(TOKEN_BYTES) if plan.leases else b"",
            plan.varies,
            plan.weight_us,
            self,
            subject,
            f"{self.start}{len(subject)}:{subject}:",
            cost,
        )

    def takes(self, subject: str, base: str, cost: int) -> list[Take]:
        overrides = self.keys.overrides(self.home.wide, subject)
        return [
            (rule, base + suffix, 1 if requests and cost else cost, self.resource, overrides if overridable else None)
            for rule, suffix, requests, overridable in self.plan.alike
        ]

    def _any_check(self, subject: str, cost: int, costs: Mapping[str, int] | None) -> Check:
        home, candidate = self.home.now(), self.candidate
        check = _plan_check(self.keys, self.plan, self.resource, subject, cost, costs, home)
        if candidate is not None:
            costs = _named_in(costs, candidate)
            check.shadow = _plan_check(self.keys, candidate, self.resource, subject, cost, costs, home)
            check.shadow.lease = check.lease = check.lease or check.shadow.lease
            check.weight_us += check.shadow.weight_us
        return check


def question_of(
    keys: Keys,
    generation: int,
    limits: Limits,
    resource: str | bytes,
    tenant: str | bytes,
    priority: str,
    shadow: LimitsLike | None = None,
) -> Question:
    """Worked out for all checks that ask it; `generation` is that of the keys."""
    resource = text("resource", resource)
    home, plan = keys.home(tenant), limits.plan(priority)
    candidate = None if shadow is None else Limits.of(shadow).plan(priority, Place.SHADOW)
    index = keys.override_index(home.wide)
    return Question(keys, generation, plan, candidate, resource, home, index, _start(plan, home, resource))


_known_question: Callable[..., Question] = lru_cache(maxsize=MAX_QUESTIONS)(question_of)


def _start(plan: Plan, home: Home, resource: str) -> str:
    if not plan.alike or plan.is_mixed or home.moves is not None or len(home.lanes) > 1:
        return ""
    scope, place = plan.rules[0].scope, plan.rules[0].place
    return Keys.start(scope, place, home.wide, resource) if scope in (Scope.SUBJECT, Scope.CALLER) else ""


def _plan_check(
    keys: Keys, plan: Plan, resource: str, subject: str, cost: int, costs: Mapping[str, int] | None, home: Home
) -> Check:
    own = home.of_subject(subject)
    takes = _takes(keys, plan, resource, subject, cost, home, own)
    lease = os.urandom(TOKEN_BYTES) if plan.leases else b""
    check = Check(takes, plan.names, lease, plan.varies, plan.weight_us, is_mixed=plan.is_mixed)
    if costs is not None:
        _cost_by_name(check, costs, plan)
    return check


def _takes(keys: Keys, plan: Plan, resource: str, subject: str, cost: int, home: Home, own: str) -> list[Take]:
    takes: list[Take] = []
    overrides = keys.overrides(own, subject)
    base, scope, place, bucket = "", None, "", keys.bucket
    for rule in plan.rules:
        if rule.scope is not scope or rule.place is not place:
            scope, place = rule.scope, rule.place
            base = bucket(scope, place, home, own, resource, subject)
        key = base + rule.suffix
        takes.append(
            (
                rule.at(keys.unprefixed(key)) if rule.varies else rule,
                key,
                1 if rule.requests and cost else cost,
                resource,
                overrides if rule.overridable else None,
            )
        )
    return takes


def _is_itself(limits: LimitsLike) -> bool:
    """Whether it is the same limits each time that it is given. A list is made into others with each check."""
    return isinstance(limits, Limits | str | Limit)


def charge_of(charges: Iterable[Take]) -> Check:
    """A check that takes without asking for room: what counted, or was admitted, while the store was not asked.

    If the store can't be reached it is lost, and says so: nothing is ever charged twice.
    """
    takes: list[Take] = [(rule.charged(), *rest) for rule, *rest in charges]  # type: ignore[misc]
    varies = any(rule.varies for rule, *_ in takes)
    names = tuple(rule.limit.name for rule, *_ in takes)
    weight = weight_us(rule for rule, *_ in takes)
    return Check(takes, names, varies=varies, failure=Failure.RAISE, weight_us=weight)


def failure_of(failure: object) -> Failure | None:
    """What a caller asked for, or None where it said nothing."""
    if failure is None or isinstance(failure, Failure):
        return failure
    try:
        return Failure(failure)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidInput("failure", f"must be one of {', '.join(Failure)}, got {shown(failure)}") from None


def check_of_entries(keys: Keys, entries: Iterable[Entry], *, tenant: str | bytes, priority: str) -> Check:
    """The general form. Entries of the same limit and key are merged, their costs added."""
    known = known_priority(priority)
    home = keys.home(tenant)
    wanted: dict[str, tuple[Entry, Rule, str, str, int]] = {}
    for at, entry in enumerate(entries):
        if not isinstance(entry, Entry) or not isinstance(entry.limit, Limit):
            raise InvalidInput(f"entries[{at}]", f"must be an Entry with a limit, got {shown(entry)}")
        if not isinstance(entry.place, Place):
            raise InvalidInput(f"entries[{at}].place", f"must be a Place, got {shown(entry.place)}")
        if entry.limit.mode is Mode.OFF:
            continue
        rule = Limits.of(entry.limit).plan(known, entry.place).rules[0]
        resource = text(f"entries[{at}].resource", entry.resource)
        subject = text(f"entries[{at}].subject", entry.subject)
        cost = cost_of(f"entries[{at}].cost", entry.cost)
        own = home.of_subject(subject)
        key = keys.bucket(rule.scope, rule.place, home, own, resource, subject) + rule.suffix
        if key in wanted:
            first, rule, resource, subject, earlier = wanted[key]
            if first.limit != entry.limit:
                raise InvalidInput(
                    f"entries[{at}].limit",
                    f"differs from an earlier limit called {entry.limit.name!r} with the same key",
                )
            cost += earlier
            if cost > MAX_COUNT:
                raise InvalidInput(f"entries[{at}].cost", f"the costs of one bucket may add up to at most {MAX_COUNT}")
            entry = first  # noqa: PLW2901 - the earlier one speaks for both
        wanted[key] = entry, rule, resource, subject, cost
    if len(wanted) > MAX_LIMITS:
        raise InvalidInput("entries", f"at most {MAX_LIMITS} buckets in one check, got {len(wanted)}")
    takes: list[Take] = [
        (
            rule.at(keys.unprefixed(key)) if rule.varies else rule,
            key,
            1 if rule.requests and cost else cost,
            resource,
            keys.overrides(home.of_subject(subject), subject) if rule.overridable else None,
        )
        for key, (_, rule, resource, subject, cost) in wanted.items()
    ]
    leases = any(rule.holds_lease for rule, *_ in takes)
    varies = any(rule.varies for rule, *_ in takes)
    names = reported([(rule.place, rule.limit.name) for rule, *_ in takes])
    weight = weight_us(rule for rule, *_ in takes)
    is_mixed = any(rule.leased or rule.local for rule, *_ in takes)
    return Check(takes, names, os.urandom(TOKEN_BYTES) if leases else b"", varies, weight, is_mixed=is_mixed)


def _cost_by_name(check: Check, costs: Mapping[str, int], plan: Plan) -> None:
    """Replace the costs of the limits that are named. A name with its place goes before the bare one."""
    if not isinstance(costs, Mapping):
        raise InvalidInput("costs", f"must map limit names to integers, got {shown(costs)}")
    named: set[int] = set()
    for name, given in costs.items():
        if name not in plan.known:
            known = ", ".join(sorted(plan.known)) or "none"
            raise InvalidInput(f"costs.{name!s:.64}", f"no limit of that name; there are {known}")
        cost = cost_of(f"costs.{name}", given)
        is_placed = name.partition(":")[0] in PLACE_WORDS
        for at in plan.known[name]:
            if is_placed:
                named.add(at)
            elif at in named:
                continue
            rule, key, _, resource, overrides = check.takes[at]
            check.takes[at] = (rule, key, 1 if rule.requests and cost else cost, resource, overrides)


def _named_in(costs: Mapping[str, int] | None, plan: Plan) -> Mapping[str, int] | None:
    """A candidate plan need not have every limit that the live one has."""
    return (
        costs if not isinstance(costs, Mapping) else {name: cost for name, cost in costs.items() if name in plan.known}
    )
