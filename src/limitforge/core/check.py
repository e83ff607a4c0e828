"""A check as a store takes it: takes (one rule, one key, one cost each) that decide together, all or nothing."""

import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Literal

import msgspec

from limitforge.core.exact import MAX_COUNT, short_repr, validate_cost
from limitforge.core.join import LAYER_WORDS, reported_names
from limitforge.core.keys import MAX_KEY_PART_BYTES, Keys, Layer, parse_key_part
from limitforge.core.lanes import TenantKeys
from limitforge.core.limits import Limit, Mode, Scope
from limitforge.core.plan import MAX_LIMITS, Limits, LimitsLike, Plan, Rule, parse_priority, weight_us
from limitforge.errors import InvalidInput

TOKEN_BYTES = 8
MAX_PREPARED_CHECKS = 16_384  # that are known, each in half a kilobyte


class Failure(StrEnum):
    """How a check is decided when its store can't: let it pass, deny it, decide by this node's share of the limit in
    memory, or leave it to the caller (`StoreUnavailable`).
    """

    OPEN = "open"
    CLOSED = "closed"
    LOCAL = "local"
    RAISE = "raise"


class ResultKind(Enum):
    """What a store answers a check with, if it can decide it."""

    DECISION = "decision"
    """A `Decision`."""
    OUTCOME = "outcome"
    """The numbers of the store, an `Outcome` or a `CompactOutcome`. A `Decision` if the check has a shadow plan."""
    PART = "part"
    """An `Outcome`, always: the check is a part of another one, whose caller decides what a failure means."""


FailureName = Literal["open", "closed", "local", "raise"]


class Entry(msgspec.Struct, frozen=True):
    """One limit with what it is asked for: gateways give each limit a resource, a subject and a cost of its own."""

    limit: Limit
    resource: str | bytes
    subject: str | bytes
    cost: int = 1
    layer: Layer = Layer.POLICY


Debit = tuple[Rule, str, int, str, str | None]
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
    needs_confirmation: bool = False


class Check(msgspec.Struct, gc=False):
    """What decides together. `lease` is the token of the slots that it may take, `varies` tells that a rule depends
    on the time, `hold` makes it a reservation, `shadow` is a candidate plan that is judged beside it, `failure` says
    what happens when the store can't decide (None: as the store is set), `weight_us` estimates what it takes in Redis.

    One that has a `question` is that about its subject, for its cost: what it takes is written out when somebody asks.
    """

    built_debits: list[Debit] | None
    names: tuple[str, ...]
    lease: bytes = b""
    is_dynamic: bool = False
    weight_us: int = 0
    prepared: "PreparedCheck | None" = None
    subject: str = ""
    bucket_prefix: str = ""
    """What the keys of its buckets start with."""
    cost: int = 0
    hold: Hold | None = None
    shadow: "Check | None" = None
    failure: Failure | None = None
    result_kind: ResultKind = ResultKind.DECISION
    is_partly_local: bool = False
    """True if this process may decide some of the limits: those that are prepaid or local."""

    @property
    def debits(self) -> list[Debit]:
        if self.built_debits is None:
            self.built_debits = (
                [] if self.prepared is None else self.prepared.debits(self.subject, self.bucket_prefix, self.cost)
            )
        return self.built_debits

    @property
    def routing_key(self) -> str:
        """One of its buckets, by which it is found: the first that is its subject's own, if there is one."""
        if self.built_debits is None and self.prepared is not None:
            return self.bucket_prefix + self.prepared.plan.uniform_rules[0][1]
        for rule, key, *_ in self.debits:
            if rule.scope is Scope.SUBJECT or rule.scope is Scope.CALLER:
                return key
        return self.debits[0][1] if self.debits else ""

    def resolve_calendars(self, now_us: int) -> None:
        """Lay every quota's windows around a time."""
        for at in range(len(self.debits)):
            self.resolve_calendar(at, now_us)

    def resolve_calendar(self, at: int, now_us: int) -> None:
        rule, *rest = self.debits[at]
        self.debits[at] = (rule.at_time(now_us), *rest)  # type: ignore[assignment]


def build_check(
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
    is_known = _is_cacheable(limits) and (shadow is None or _is_cacheable(shadow))
    if not isinstance(limits, Limits):
        limits = Limits.of(limits)
    try:
        ask = _prepare_check_cached if is_known else prepare_check
        question = ask(keys, keys.generation, limits, resource, tenant, priority, shadow)
    except TypeError:  # something can't be looked up; if it is nonsense, that is said now
        question = prepare_check(keys, keys.generation, limits, resource, tenant, priority, shadow)
    return question.bind(subject, cost, costs)


class PreparedCheck(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What all checks of one resource by one plan have in common: only their subjects and costs differ. It holds for
    as long as the keys are of this `generation`.
    """

    keys: Keys
    generation: int
    plan: Plan
    shadow_plan: Plan | None
    resource: str
    tenant_keys: TenantKeys
    override_index: str
    """Of the overrides of its subjects."""
    bucket_prefix: str
    """What the key of every bucket starts with, up to the subject; empty if that is not the same for all."""

    @property
    def is_current(self) -> bool:
        """False once any tenant's lanes have changed: then prepare the check again."""
        return self.generation == self.keys.generation

    def bind(self, subject: str | bytes, cost: int = 1, costs: Mapping[str, int] | None = None) -> Check:
        """Return the check of one subject for one cost. Raise `InvalidInput` if an argument is invalid."""
        if type(cost) is not int or not 0 <= cost <= MAX_COUNT:
            cost = validate_cost("cost", cost)
        if type(subject) is not str or len(subject) > MAX_KEY_PART_BYTES or not subject.isascii():
            subject = parse_key_part("subject", subject)
        plan = self.plan
        if not self.bucket_prefix or costs is not None or self.shadow_plan is not None:
            return self._bind_any(subject, cost, costs)
        return Check(
            None,
            plan.names,
            os.urandom(TOKEN_BYTES) if plan.takes_lease else b"",
            plan.is_dynamic,
            plan.weight_us,
            self,
            subject,
            f"{self.bucket_prefix}{len(subject)}:{subject}:",
            cost,
        )

    def debits(self, subject: str, base: str, cost: int) -> list[Debit]:
        overrides = self.keys.overrides(self.tenant_keys.tenant_prefix, subject)
        return [
            (rule, base + suffix, 1 if requests and cost else cost, self.resource, overrides if overridable else None)
            for rule, suffix, requests, overridable in self.plan.uniform_rules
        ]

    def _bind_any(self, subject: str, cost: int, costs: Mapping[str, int] | None) -> Check:
        home, candidate = self.tenant_keys.current(), self.shadow_plan
        check = _check_of_plan(self.keys, self.plan, self.resource, subject, cost, costs, home)
        if candidate is not None:
            costs = _costs_in_plan(costs, candidate)
            check.shadow = _check_of_plan(self.keys, candidate, self.resource, subject, cost, costs, home)
            check.shadow.lease = check.lease = check.lease or check.shadow.lease
            check.weight_us += check.shadow.weight_us
        return check


def prepare_check(
    keys: Keys,
    generation: int,
    limits: Limits,
    resource: str | bytes,
    tenant: str | bytes,
    priority: str,
    shadow: LimitsLike | None = None,
) -> PreparedCheck:
    """Worked out for all checks that ask it; `generation` is that of the keys."""
    resource = parse_key_part("resource", resource)
    home, plan = keys.tenant_keys(tenant), limits.plan(priority)
    candidate = None if shadow is None else Limits.of(shadow).plan(priority, Layer.SHADOW)
    index = keys.override_index(home.tenant_prefix)
    return PreparedCheck(keys, generation, plan, candidate, resource, home, index, _bucket_prefix(plan, home, resource))


_prepare_check_cached: Callable[..., PreparedCheck] = lru_cache(maxsize=MAX_PREPARED_CHECKS)(prepare_check)


def _bucket_prefix(plan: Plan, home: TenantKeys, resource: str) -> str:
    if (
        not plan.uniform_rules
        or plan.is_partly_local
        or home.scheduled_change is not None
        or len(home.lane_prefixes) > 1
    ):
        return ""
    scope, place = plan.rules[0].scope, plan.rules[0].layer
    return (
        Keys.subject_bucket_prefix(scope, place, home.tenant_prefix, resource)
        if scope in (Scope.SUBJECT, Scope.CALLER)
        else ""
    )


def _check_of_plan(
    keys: Keys, plan: Plan, resource: str, subject: str, cost: int, costs: Mapping[str, int] | None, home: TenantKeys
) -> Check:
    own = home.subject_prefix(subject)
    takes = _debits_of_plan(keys, plan, resource, subject, cost, home, own)
    lease = os.urandom(TOKEN_BYTES) if plan.takes_lease else b""
    check = Check(takes, plan.names, lease, plan.is_dynamic, plan.weight_us, is_partly_local=plan.is_partly_local)
    if costs is not None:
        _apply_costs(check, costs, plan)
    return check


def _debits_of_plan(
    keys: Keys, plan: Plan, resource: str, subject: str, cost: int, home: TenantKeys, own: str
) -> list[Debit]:
    takes: list[Debit] = []
    overrides = keys.overrides(own, subject)
    base, scope, place, bucket = "", None, "", keys.bucket_prefix
    for rule in plan.rules:
        if rule.scope is not scope or rule.layer is not place:
            scope, place = rule.scope, rule.layer
            base = bucket(scope, place, home, own, resource, subject)
        key = base + rule.key_suffix
        takes.append(
            (
                rule.for_key(keys.without_prefix(key)) if rule.is_dynamic else rule,
                key,
                1 if rule.counts_requests and cost else cost,
                resource,
                overrides if rule.overridable else None,
            )
        )
    return takes


def _is_cacheable(limits: LimitsLike) -> bool:
    """Whether it is the same limits each time that it is given. A list is made into others with each check."""
    return isinstance(limits, Limits | str | Limit)


def build_charge(charges: Iterable[Debit]) -> Check:
    """A check that takes without asking for room: what counted, or was admitted, while the store was not asked.

    If the store can't be reached it is lost, and says so: nothing is ever charged twice.
    """
    takes: list[Debit] = [(rule.as_charge(), *rest) for rule, *rest in charges]  # type: ignore[misc]
    varies = any(rule.is_dynamic for rule, *_ in takes)
    names = tuple(rule.limit.name for rule, *_ in takes)
    weight = weight_us(rule for rule, *_ in takes)
    return Check(takes, names, is_dynamic=varies, failure=Failure.RAISE, weight_us=weight)


def parse_failure(failure: object) -> Failure | None:
    """What a caller asked for, or None where it said nothing."""
    if failure is None or isinstance(failure, Failure):
        return failure
    try:
        return Failure(failure)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidInput("failure", f"must be one of {', '.join(Failure)}, got {short_repr(failure)}") from None


def build_check_from_entries(keys: Keys, entries: Iterable[Entry], *, tenant: str | bytes, priority: str) -> Check:
    """The general form. Entries of the same limit and key are merged, their costs added."""
    known = parse_priority(priority)
    home = keys.tenant_keys(tenant)
    wanted: dict[str, tuple[Entry, Rule, str, str, int]] = {}
    for at, entry in enumerate(entries):
        if not isinstance(entry, Entry) or not isinstance(entry.limit, Limit):
            raise InvalidInput(f"entries[{at}]", f"must be an Entry with a limit, got {short_repr(entry)}")
        if not isinstance(entry.layer, Layer):
            raise InvalidInput(f"entries[{at}].place", f"must be a Place, got {short_repr(entry.layer)}")
        if entry.limit.mode is Mode.OFF:
            continue
        rule = Limits.of(entry.limit).plan(known, entry.layer).rules[0]
        resource = parse_key_part(f"entries[{at}].resource", entry.resource)
        subject = parse_key_part(f"entries[{at}].subject", entry.subject)
        cost = validate_cost(f"entries[{at}].cost", entry.cost)
        own = home.subject_prefix(subject)
        key = keys.bucket_prefix(rule.scope, rule.layer, home, own, resource, subject) + rule.key_suffix
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
    takes: list[Debit] = [
        (
            rule.for_key(keys.without_prefix(key)) if rule.is_dynamic else rule,
            key,
            1 if rule.counts_requests and cost else cost,
            resource,
            keys.overrides(home.subject_prefix(subject), subject) if rule.overridable else None,
        )
        for key, (_, rule, resource, subject, cost) in wanted.items()
    ]
    leases = any(rule.holds_lease for rule, *_ in takes)
    varies = any(rule.is_dynamic for rule, *_ in takes)
    names = reported_names([(rule.layer, rule.limit.name) for rule, *_ in takes])
    weight = weight_us(rule for rule, *_ in takes)
    is_partly_local = any(rule.prepaid or rule.local for rule, *_ in takes)
    return Check(
        takes, names, os.urandom(TOKEN_BYTES) if leases else b"", varies, weight, is_partly_local=is_partly_local
    )


def _apply_costs(check: Check, costs: Mapping[str, int], plan: Plan) -> None:
    """Replace the costs of the limits that are named. A name with its place goes before the bare one."""
    if not isinstance(costs, Mapping):
        raise InvalidInput("costs", f"must map limit names to integers, got {short_repr(costs)}")
    named: set[int] = set()
    for name, given in costs.items():
        if name not in plan.indexes_by_name:
            known = ", ".join(sorted(plan.indexes_by_name)) or "none"
            raise InvalidInput(f"costs.{name!s:.64}", f"no limit of that name; there are {known}")
        cost = validate_cost(f"costs.{name}", given)
        is_placed = name.partition(":")[0] in LAYER_WORDS
        for at in plan.indexes_by_name[name]:
            if is_placed:
                named.add(at)
            elif at in named:
                continue
            rule, key, _, resource, overrides = check.debits[at]
            check.debits[at] = (rule, key, 1 if rule.counts_requests and cost else cost, resource, overrides)


def _costs_in_plan(costs: Mapping[str, int] | None, plan: Plan) -> Mapping[str, int] | None:
    """A candidate plan need not have every limit that the live one has."""
    return (
        costs
        if not isinstance(costs, Mapping)
        else {name: cost for name, cost in costs.items() if name in plan.indexes_by_name}
    )
