"""Join the limits of several plans into one check: those of the operator, a tenant and a policy."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from limitforge.core.exact import short_repr
from limitforge.core.keys import Layer
from limitforge.core.limits import Limit, Mode, Priority
from limitforge.core.plan import MAX_LIMITS, Limits, LimitsLike, Plan, Rule, parse_priority
from limitforge.errors import InvalidInput, InvalidLimit

LAYER_NAMES = {Layer.OPERATOR: "operator", Layer.TENANT: "tenant", Layer.POLICY: "policy", Layer.SHADOW: "shadow"}
"""The prefix that a name may have, before a colon, for the layer of its limit. No limit name starts like this."""
LAYER_WORDS = frozenset(LAYER_NAMES.values())


class PlanPart(NamedTuple):
    """The limits of one plan and its layer. No limit gets a mode that is stronger than `mode`."""

    limits: LimitsLike
    layer: Layer
    mode: Mode = Mode.ON


def join_limits(*parts: PlanPart) -> Limits:
    """Return one set of limits from several plans, each with buckets of its own layer.

    A limit is reported, and may get a cost, by its name. If several have the same name, they are reported as
    `operator:name`, `tenant:name` and `policy:name`, and a cost for the bare name applies to all of them. Joining is
    cheap, since the compiled plans of the parts are used again. Raises `InvalidInput` or `InvalidLimit` if a part is
    invalid.
    """
    return _JoinedLimits(tuple(_validate(index, part) for index, part in enumerate(parts)))


class _ValidPart(NamedTuple):
    limits: Limits
    layer: Layer
    mode: Mode


class _JoinedLimits(Limits):
    """Several plans as one. Iteration returns the limits of the parts with their own modes."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[_ValidPart, ...]) -> None:
        super().__init__()
        self._parts = parts
        self._limits = tuple(limit for part in parts for limit in part.limits)
        if len(self._limits) > MAX_LIMITS:
            raise InvalidLimit("limits", f"at most {MAX_LIMITS} in one check, got {len(self._limits)}")
        if len({layer for _, layer, _ in parts}) < len(parts):
            _refuse_duplicates(parts)

    def plan(self, priority: str, layer: Layer = Layer.POLICY, mode: Mode = Mode.ON) -> Plan:
        """Return the compiled plans of all parts as one, compiled once for each priority.

        Raises `InvalidLimit` for another layer, such as the shadow layer: each part has a layer of its own.
        """
        if layer is not Layer.POLICY or mode is not Mode.ON:
            raise InvalidLimit("limits", "joined limits keep the layers and modes of their parts")
        try:
            return self.plans[priority]
        except (KeyError, TypeError):
            known = parse_priority(priority)
        return self.plans.setdefault(known, _join_plans(self._parts, known))

    def all_on(self) -> Limits:
        return _JoinedLimits(tuple(_ValidPart(limits.all_on(), layer, Mode.ON) for limits, layer, _ in self._parts))

    def overridable(self, names: Collection[object]) -> Limits:
        """Return all limits except the operator's.

        An override names no layer, so a name must be unique. `names` that is not a collection of names is refused when
        the override is compiled.
        """
        overridable = [limit for limits, layer, _ in self._parts if layer is not Layer.OPERATOR for limit in limits]
        for name, count in Counter(limit.name for limit in overridable).items():
            if count > 1 and isinstance(names, Collection) and name in names:
                raise InvalidInput(
                    f"limits.{name}", "several of the joined plans have a limit of this name, and all would be changed"
                )
        return Limits(*{limit.name: limit for limit in overridable}.values())

    def __getitem__(self, name: str) -> Limit:
        """Return a limit by its name if the name is unique, or by its name with its layer."""
        word, colon, rest = name.partition(":")
        has_layer = colon and word in LAYER_WORDS
        found = [
            limit
            for limits, layer, _ in self._parts
            if not has_layer or LAYER_NAMES[layer] == word
            for limit in limits
            if limit.name == (rest if has_layer else name)
        ]
        if len(found) != 1:
            raise KeyError(name)
        return found[0]

    def __repr__(self) -> str:
        return f"join_limits({', '.join(map(repr, self._parts))})"


def reported_names(named: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names under which the limits, given as (layer, name), are reported.

    A unique name is bare, others have their layer. Names that are still equal (one limit with several keys) get a
    number.
    """
    bare = Counter(name for _, name in named)
    if len(bare) == len(named):
        return tuple(bare)
    names: dict[str, None] = {}
    for layer, own_name in named:
        name = first = own_name if bare[own_name] == 1 else f"{LAYER_NAMES[Layer(layer)]}:{own_name}"
        number = 2
        while name in names:
            name = f"{first}#{number}"
            number += 1
        names[name] = None
    return tuple(names)


def aliases(name: str, layer: Layer | None) -> tuple[str, ...]:
    """Return all names that mean a limit which was reported as `name`, the most specific first."""
    word, colon, bare = name.partition(":")
    if colon and word in LAYER_WORDS:
        return name, bare
    return (name,) if layer is None else (f"{LAYER_NAMES[layer]}:{name}", name)


def _validate(index: int, part: PlanPart) -> _ValidPart:
    limits, layer, mode = part
    if not isinstance(layer, Layer) or layer is Layer.SHADOW:
        raise InvalidInput(
            f"parts[{index}].layer", f"must be Layer.OPERATOR, TENANT or POLICY, got {short_repr(layer)}"
        )
    if not isinstance(mode, Mode):
        raise InvalidInput(f"parts[{index}].mode", f"must be a Mode, got {short_repr(mode)}")
    if isinstance(limits, _JoinedLimits):
        raise InvalidLimit("limits", "are joined already; join all parts at once")
    return _ValidPart(Limits.of(limits), layer, mode)


def _refuse_duplicates(parts: Sequence[_ValidPart]) -> None:
    """Raise `InvalidLimit` if two limits have the same name and layer: they would share their bucket."""
    counted = Counter((layer, limit.name) for limits, layer, _ in parts for limit in limits)
    for (layer, name), count in counted.items():
        if count > 1:
            raise InvalidLimit("limits", f"two limits of the {LAYER_NAMES[layer]} layer are called {name!r}")


def _join_plans(parts: Sequence[_ValidPart], priority: Priority) -> Plan:
    rules: list[Rule] = []
    indexes_by_name: dict[str, tuple[int, ...]] = {}
    for limits, layer, mode in parts:
        plan = limits.plan(priority, layer, mode)
        for name, indexes in plan.indexes_by_name.items():
            joined = tuple(len(rules) + index for index in indexes)
            for alias in (name, f"{LAYER_NAMES[layer]}:{name}"):
                indexes_by_name[alias] = indexes_by_name.get(alias, ()) + joined
        rules += plan.rules
    names = reported_names([(rule.layer, rule.limit.name) for rule in rules])
    return Plan.from_rules(tuple(rules), names, indexes_by_name)
