"""A check as a store receives it: debits (one rule, key and cost each) that are decided together, all or nothing."""

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
MAX_PREPARED_CHECKS = 16_384  # the size of the cache; one takes about 0.5 KB


class Failure(StrEnum):
    """How a check is decided when its store can't decide it: the failure behaviour.

    `open` allows it, `closed` denies it, `local` decides in memory by this process's part of the limit, and `raise`
    raises `StoreUnavailable`.
    """

    OPEN = "open"
    CLOSED = "closed"
    LOCAL = "local"
    RAISE = "raise"


class ResultKind(Enum):
    """What a store answers a check with, apart from errors."""

    DECISION = "decision"
    """A `Decision`."""
    OUTCOME = "outcome"
    """An `Outcome` or a `CompactOutcome`, before rounding. A `Decision` if the check has a shadow plan or takes several
    steps, or if the failure behaviour decided."""
    PART = "part"
    """An `Outcome` or an error: the check is a part of another one, whose caller decides what a failure means."""


FailureName = Literal["open", "closed", "local", "raise"]


class Entry(msgspec.Struct, frozen=True):
    """One limit with its own resource, subject and cost, for `check_entries`. Gateways need this form.

    `layer` is the layer of the plan that the limit belongs to. Limits of other layers have other buckets.
    """

    limit: Limit
    resource: str | bytes
    subject: str | bytes
    cost: int = 1
    layer: Layer = Layer.POLICY


Debit = tuple[Rule, str, int, str, str | None]
"""What a check takes from one bucket: rule, key, cost, resource, and the key of the subject's overrides if they apply.

It is a tuple because every check makes one for each limit."""


class Hold(msgspec.Struct, frozen=True):
    """What makes a check hold its cost.

    A reservation holds it until it is settled, a part of a check until the other parts are decided. A hold that does
    not end within `ttl_us` lapses, and its cost is refunded if `refund` is true.
    """

    key: str
    """The key of the reservation's record. If it is empty, there is no record, and nothing to settle."""
    token: bytes
    ttl_us: int
    refund: bool
    uses_tentative_ttl: bool = False
    """True for the part of a reservation in one slot: it is refunded after 5 s, unless it is confirmed within them.

    When it is confirmed, it gets `ttl_us`.
    """


class Check(msgspec.Struct, gc=False):
    """Debits that are decided together.

    A check that was bound from a `PreparedCheck` builds its debits when they are first read.
    """

    built_debits: list[Debit] | None
    names: tuple[str, ...]
    lease: bytes = b""
    """The token of the leases that this check may take from concurrency limits; empty without such limits."""
    is_dynamic: bool = False
    """True if a rule depends on the time or on its key, as in `Rule.is_dynamic`."""
    weight_us: int = 0
    """The estimated time that this check takes in Redis."""
    prepared: "PreparedCheck | None" = None
    subject: str = ""
    bucket_prefix: str = ""
    """What all bucket keys start with, if `prepared` is set."""
    cost: int = 0
    hold: Hold | None = None
    """Set if this check is a reservation, or if it is a part of a check whose other parts are decided elsewhere."""
    shadow: "Check | None" = None
    """The check of a candidate plan, decided in the same call and without effect on this one."""
    failure: Failure | None = None
    """The failure behaviour; None for that of the store."""
    result_kind: ResultKind = ResultKind.DECISION
    is_hybrid: bool = False
    """True if this process may decide some of the limits: those that are prepaid or local."""

    @property
    def debits(self) -> list[Debit]:
        if self.built_debits is None:
            self.built_debits = (
                [] if self.prepared is None else self.prepared.debits(self.subject, self.bucket_prefix, self.cost)
            )
        return self.built_debits

    @property
    def denial_cache_key(self) -> str:
        """The key under which the denial cache stores this check: that of the first subject or caller limit, if any."""
        if self.built_debits is None and self.prepared is not None:
            return self.bucket_prefix + self.prepared.plan.uniform_rules[0][1]
        for rule, key, *_ in self.debits:
            if rule.scope is Scope.SUBJECT or rule.scope is Scope.CALLER:
                return key
        return self.debits[0][1] if self.debits else ""

    def resolve_calendars(self, now_us: int) -> None:
        """Give every quota the calendar windows around `now_us`."""
        for index in range(len(self.debits)):
            self.resolve_calendar(index, now_us)

    def resolve_calendar(self, index: int, now_us: int) -> None:
        rule, *rest = self.debits[index]
        self.debits[index] = (rule.with_calendar_at(now_us), *rest)  # type: ignore[assignment]


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
    """Build the simple form of a check: one resource, one subject, and one cost for every limit (or one by name)."""
    is_cacheable = _is_cacheable(limits) and (shadow is None or _is_cacheable(shadow))
    if not isinstance(limits, Limits):
        limits = Limits.of(limits)
    try:
        prepare = _prepare_check_cached if is_cacheable else prepare_check
        prepared = prepare(keys, keys.generation, limits, resource, tenant, priority, shadow)
    except TypeError:  # an argument is not hashable; if it is invalid, this raises the right error
        prepared = prepare_check(keys, keys.generation, limits, resource, tenant, priority, shadow)
    return prepared.bind(subject, cost, costs)


class PreparedCheck(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What all checks of one resource by one plan have in common, like a prepared statement.

    `bind` adds the subject and the cost. `Limiter.prepare` makes one; prepare again once `is_current` is false.
    """

    keys: Keys
    generation: int
    """The generation of `keys` under which this was prepared."""
    plan: Plan
    shadow_plan: Plan | None
    resource: str
    tenant_keys: TenantKeys
    override_index_key: str
    """The key of the index of subjects that have overrides."""
    prefix_before_subject: str
    """What every bucket key starts with, up to the subject; empty if `bind` must build the debits one by one."""

    @property
    def is_current(self) -> bool:
        """False once the lanes of any tenant have changed: then prepare the check again."""
        return self.generation == self.keys.generation

    def bind(self, subject: str | bytes, cost: int = 1, costs: Mapping[str, int] | None = None) -> Check:
        """Return the check of one subject for one cost.

        `costs` gives limits costs of their own by name. Raise `InvalidInput` if an argument is invalid.
        """
        if type(cost) is not int or not 0 <= cost <= MAX_COUNT:
            cost = validate_cost("cost", cost)
        if type(subject) is not str or len(subject) > MAX_KEY_PART_BYTES or not subject.isascii():
            subject = parse_key_part("subject", subject)
        plan = self.plan
        if not self.prefix_before_subject or costs is not None or self.shadow_plan is not None:
            return self._bind_any(subject, cost, costs)
        return Check(
            None,
            plan.names,
            os.urandom(TOKEN_BYTES) if plan.takes_lease else b"",
            plan.is_dynamic,
            plan.weight_us,
            self,
            subject,
            f"{self.prefix_before_subject}{len(subject)}:{subject}:",
            cost,
        )

    def debits(self, subject: str, bucket_prefix: str, cost: int) -> list[Debit]:
        """Build the debits of a check that `bind` returned."""
        overrides_key = self.keys.overrides_key(self.tenant_keys.tenant_prefix, subject)
        return [
            (
                rule,
                bucket_prefix + suffix,
                1 if requests and cost else cost,
                self.resource,
                overrides_key if overridable else None,
            )
            for rule, suffix, requests, overridable in self.plan.uniform_rules
        ]

    def _bind_any(self, subject: str, cost: int, costs: Mapping[str, int] | None) -> Check:
        tenant_keys, shadow_plan = self.keys.current(self.tenant_keys), self.shadow_plan
        check = _check_of_plan(self.keys, self.plan, self.resource, subject, cost, costs, tenant_keys)
        if shadow_plan is not None:
            costs = _costs_in_plan(costs, shadow_plan)
            shadow = _check_of_plan(self.keys, shadow_plan, self.resource, subject, cost, costs, tenant_keys)
            shadow.lease = check.lease = check.lease or shadow.lease
            check.weight_us += shadow.weight_us
            check.shadow = shadow
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
    """Prepare what the checks of one resource by these limits share.

    `generation` is that of `keys`. It is an argument so that it is part of the key of the cache.
    """
    resource = parse_key_part("resource", resource)
    tenant_keys, plan = keys.tenant_keys(tenant), limits.plan(priority)
    shadow_plan = None if shadow is None else Limits.of(shadow).plan(priority, Layer.SHADOW)
    return PreparedCheck(
        keys,
        generation,
        plan,
        shadow_plan,
        resource,
        tenant_keys,
        keys.override_index_key(tenant_keys.tenant_prefix),
        _prefix_before_subject(plan, tenant_keys, resource),
    )


_prepare_check_cached: Callable[..., PreparedCheck] = lru_cache(maxsize=MAX_PREPARED_CHECKS)(prepare_check)


def _prefix_before_subject(plan: Plan, tenant_keys: TenantKeys, resource: str) -> str:
    if (
        not plan.uniform_rules
        or plan.is_hybrid
        or tenant_keys.scheduled_change is not None
        or len(tenant_keys.lane_prefixes) > 1
    ):
        return ""
    scope, layer = plan.rules[0].scope, plan.rules[0].layer
    return (
        Keys.subject_bucket_prefix(scope, layer, tenant_keys.tenant_prefix, resource)
        if scope in (Scope.SUBJECT, Scope.CALLER)
        else ""
    )


def _check_of_plan(
    keys: Keys,
    plan: Plan,
    resource: str,
    subject: str,
    cost: int,
    costs: Mapping[str, int] | None,
    tenant_keys: TenantKeys,
) -> Check:
    lane_prefix = tenant_keys.subject_prefix(subject)
    debits = _debits_of_plan(keys, plan, resource, subject, cost, tenant_keys, lane_prefix)
    lease = os.urandom(TOKEN_BYTES) if plan.takes_lease else b""
    check = Check(debits, plan.names, lease, plan.is_dynamic, plan.weight_us, is_hybrid=plan.is_hybrid)
    if costs is not None:
        _apply_costs(check, costs, plan)
    return check


def _debits_of_plan(
    keys: Keys, plan: Plan, resource: str, subject: str, cost: int, tenant_keys: TenantKeys, lane_prefix: str
) -> list[Debit]:
    debits: list[Debit] = []
    overrides_key = keys.overrides_key(lane_prefix, subject)
    prefix, scope, layer = "", None, ""
    for rule in plan.rules:
        if rule.scope is not scope or rule.layer is not layer:
            scope, layer = rule.scope, rule.layer
            prefix = keys.bucket_prefix(scope, layer, tenant_keys, lane_prefix, resource, subject)
        key = prefix + rule.key_suffix
        debits.append(
            (
                rule.for_key(keys.without_prefix(key)) if rule.is_dynamic else rule,
                key,
                1 if rule.counts_requests and cost else cost,
                resource,
                overrides_key if rule.overridable else None,
            )
        )
    return debits


def _is_cacheable(limits: LimitsLike) -> bool:
    """Return True if the same argument always means the same limits: a list may change between two checks."""
    return isinstance(limits, Limits | str | Limit)


def build_charge(debits: Iterable[Debit]) -> Check:
    """Build a check that takes its costs even without room, because they were admitted without the store.

    It fails if the store can't be reached, and is never repeated, so that nothing is charged twice.
    """
    charges: list[Debit] = [(rule.as_charge(), *rest) for rule, *rest in debits]  # type: ignore[misc]
    is_dynamic = any(rule.is_dynamic for rule, *_ in charges)
    names = tuple(rule.limit.name for rule, *_ in charges)
    weight = weight_us(rule for rule, *_ in charges)
    return Check(charges, names, is_dynamic=is_dynamic, failure=Failure.RAISE, weight_us=weight)


def parse_failure(failure: object) -> Failure | None:
    """Return the failure behaviour of this name, None for None. Raise `InvalidInput` for anything else."""
    if failure is None or isinstance(failure, Failure):
        return failure
    try:
        return Failure(failure)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidInput("failure", f"must be one of {', '.join(Failure)}, got {short_repr(failure)}") from None


def build_check_from_entries(keys: Keys, entries: Iterable[Entry], *, tenant: str | bytes, priority: str) -> Check:
    """Build the general form of a check. Entries with the same limit and key are merged, and their costs added."""
    known_priority = parse_priority(priority)
    tenant_keys = keys.tenant_keys(tenant)
    merged: dict[str, tuple[Entry, Rule, str, str, int]] = {}
    for index, entry in enumerate(entries):
        if not isinstance(entry, Entry) or not isinstance(entry.limit, Limit):
            raise InvalidInput(f"entries[{index}]", f"must be an Entry with a limit, got {short_repr(entry)}")
        if not isinstance(entry.layer, Layer):
            raise InvalidInput(f"entries[{index}].layer", f"must be a Layer, got {short_repr(entry.layer)}")
        if entry.limit.mode is Mode.OFF:
            continue
        rule = Limits.of(entry.limit).plan(known_priority, entry.layer).rules[0]
        resource = parse_key_part(f"entries[{index}].resource", entry.resource)
        subject = parse_key_part(f"entries[{index}].subject", entry.subject)
        cost = validate_cost(f"entries[{index}].cost", entry.cost)
        lane_prefix = tenant_keys.subject_prefix(subject)
        key = keys.bucket_prefix(rule.scope, rule.layer, tenant_keys, lane_prefix, resource, subject) + rule.key_suffix
        if key in merged:
            first, rule, resource, subject, earlier = merged[key]
            if first.limit != entry.limit:
                raise InvalidInput(
                    f"entries[{index}].limit",
                    f"differs from an earlier limit called {entry.limit.name!r} with the same key",
                )
            cost += earlier
            if cost > MAX_COUNT:
                raise InvalidInput(
                    f"entries[{index}].cost", f"the costs of one bucket may add up to at most {MAX_COUNT}"
                )
            entry = first  # noqa: PLW2901 - the merged entry is the earlier one
        merged[key] = entry, rule, resource, subject, cost
    if len(merged) > MAX_LIMITS:
        raise InvalidInput("entries", f"at most {MAX_LIMITS} buckets in one check, got {len(merged)}")
    debits: list[Debit] = [
        (
            rule.for_key(keys.without_prefix(key)) if rule.is_dynamic else rule,
            key,
            rule.cost_of(cost),
            resource,
            keys.overrides_key(tenant_keys.subject_prefix(subject), subject) if rule.overridable else None,
        )
        for key, (_, rule, resource, subject, cost) in merged.items()
    ]
    rules = [rule for rule, *_ in debits]
    return Check(
        debits,
        reported_names([(rule.layer, rule.limit.name) for rule in rules]),
        os.urandom(TOKEN_BYTES) if any(rule.holds_lease for rule in rules) else b"",
        any(rule.is_dynamic for rule in rules),
        weight_us(rules),
        is_hybrid=any(rule.prepaid or rule.local for rule in rules),
    )


def _apply_costs(check: Check, costs: Mapping[str, int], plan: Plan) -> None:
    """Replace the costs of the limits that `costs` names. A name with its layer takes precedence over a bare one."""
    if not isinstance(costs, Mapping):
        raise InvalidInput("costs", f"must map limit names to integers, got {short_repr(costs)}")
    named_with_layer: set[int] = set()
    for name, given in costs.items():
        if name not in plan.indexes_by_name:
            known = ", ".join(sorted(plan.indexes_by_name)) or "none"
            raise InvalidInput(f"costs.{name!s:.64}", f"no limit of that name; there are {known}")
        cost = validate_cost(f"costs.{name}", given)
        has_layer = name.partition(":")[0] in LAYER_WORDS
        for index in plan.indexes_by_name[name]:
            if has_layer:
                named_with_layer.add(index)
            elif index in named_with_layer:
                continue
            rule, key, _, resource, overrides_key = check.debits[index]
            check.debits[index] = (rule, key, rule.cost_of(cost), resource, overrides_key)


def _costs_in_plan(costs: Mapping[str, int] | None, plan: Plan) -> Mapping[str, int] | None:
    """Return the costs for limits of `plan`: a candidate plan need not have every limit of the live one."""
    if not isinstance(costs, Mapping):
        return costs
    return {name: cost for name, cost in costs.items() if name in plan.indexes_by_name}
