"""The overrides of the memory store."""

from collections.abc import Container
from dataclasses import dataclass

from limitforge.core.algorithms.base import Algorithm
from limitforge.core.evaluate import AlgorithmFor
from limitforge.core.keys import Keys, decode_key, encode_key
from limitforge.core.overrides import (
    ANY_RESOURCE,
    CompiledOverride,
    Override,
    OverridePage,
    apply_overrides,
    decode_cursor,
    encode_cursor,
    expiry_seconds,
    require_room_for_override,
)
from limitforge.core.plan import Rule
from limitforge.errors import StoreUnavailable
from limitforge.stores.protocol import (
    ClearOverrides,
    DeleteOverride,
    FindMissingOverrides,
    GetOverrides,
    ListOverrides,
    SetOverride,
)


@dataclass(frozen=True, slots=True)
class _StoredOverride:
    changes: dict[str, object]
    compiled: tuple[CompiledOverride, ...]
    expires_us: int


class MemoryOverrides:
    """Overrides by subject and resource. They are never evicted: when there are too many, new ones are refused."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self.by_key: dict[str, dict[str, _StoredOverride]] = {}  # by override key, then resource; empty for most
        self._subjects_by_prefix: dict[str, set[str]] = {}  # by what the keys of a lane start with

    def steps_resolver(self, now_us: int, shared: Container[tuple[Rule, str | None]] = ()) -> AlgorithmFor:
        """The rule's own numbers, or those of the most specific live override that names its limit.

        `shared` are rules, with the overrides of who asks, that an overflow bucket decides: subjects share its window
        and its rate.
        """

        def live(found: dict[str, _StoredOverride], resource: str, rule: Rule) -> CompiledOverride | None:
            override = found.get(resource)
            if override is None or now_us >= override.expires_us:
                return None
            named = (
                one for one in override.compiled if one.name == rule.limit.name and one.code == rule.algorithm.code
            )
            return next(named, None)

        def steps_for(rule: Rule, resource: str, overrides: str) -> Algorithm:
            found = self.by_key.get(overrides)
            if not found:
                return rule.algorithm
            exact = None if resource == ANY_RESOURCE else live(found, resource, rule)
            steps = apply_overrides(rule.algorithm, rule.scope, exact, live(found, ANY_RESOURCE, rule))
            if (rule, overrides) in shared:
                return rule.algorithm.with_numbers((steps.limit,))
            return steps

        return steps_for

    def set(self, command: SetOverride, now_us: int) -> Override:
        key = Keys.overrides(command.lane_prefix, command.subject)
        found = {r: o for r, o in self.by_key.get(key, {}).items() if o.expires_us > now_us}
        require_room_for_override(len(found.keys() | {command.resource}))
        if key not in self.by_key:
            self._ensure_room(now_us)
        expires_us = now_us + command.ttl_us
        found[command.resource] = _StoredOverride(command.changes, command.compiled, expires_us)
        self.by_key[key] = found
        self._subjects_by_prefix.setdefault(command.lane_prefix, set()).add(command.subject)
        return Override(command.tenant, command.resource, command.subject, command.changes, expiry_seconds(expires_us))

    def get(self, command: GetOverrides, now_us: int) -> list[Override]:
        return self._live_overrides(command.lane_prefix, command.tenant, command.subject, now_us)

    def list_page(self, command: ListOverrides, now_us: int) -> OverridePage:
        after = decode_cursor(command.cursor)
        subjects = sorted(
            (encode_key(subject), own)
            for own in command.key_prefixes
            for subject in self._subjects_by_prefix.get(own, ())
            if after is None or encode_key(subject) > after
        )
        page = subjects[: command.subjects]
        overrides = [o for s, own in page for o in self._live_overrides(own, command.tenant, decode_key(s), now_us)]
        return OverridePage(overrides, encode_cursor(page[-1][0]) if len(subjects) > len(page) else None)

    def find_missing(self, command: FindMissingOverrides, now_us: int) -> list[int]:
        def is_live(own: str, resource: str, subject: str) -> bool:
            found = self.by_key.get(Keys.overrides(own, subject), {}).get(resource)
            return found is not None and now_us < found.expires_us

        return [at for at, place in enumerate(command.targets) if not is_live(*place)]

    def delete(self, command: DeleteOverride, now_us: int) -> bool:
        live = {o.resource for o in self._live_overrides(command.lane_prefix, "", command.subject, now_us)}
        doomed = live & {command.resource}
        key = Keys.overrides(command.lane_prefix, command.subject)
        for resource in doomed:
            del self.by_key[key][resource]
        self._live_overrides(command.lane_prefix, "", command.subject, now_us)
        return bool(doomed)

    def clear(self, command: ClearOverrides, now_us: int) -> int:
        cleared = 0
        for own in command.key_prefixes:
            for subject in list(self._subjects_by_prefix.get(own, ())):
                cleared += bool(self._live_overrides(own, "", subject, now_us))
                self.by_key.pop(Keys.overrides(own, subject), None)
            self._subjects_by_prefix.pop(own, None)
        return cleared

    def _live_overrides(self, own: str, tenant: str, subject: str, now_us: int) -> list[Override]:
        """A subject's overrides, by resource; those that have expired are dropped on the way."""
        key = Keys.overrides(own, subject)
        found = {r: o for r, o in self.by_key.get(key, {}).items() if o.expires_us > now_us}
        if found:
            self.by_key[key] = found
        else:
            self.by_key.pop(key, None)
            subjects = self._subjects_by_prefix.get(own, set())
            subjects.discard(subject)
            if not subjects:
                self._subjects_by_prefix.pop(own, None)
        return [
            Override(tenant, resource, subject, override.changes, expiry_seconds(override.expires_us))
            for resource, override in sorted(found.items(), key=lambda item: encode_key(item[0]))
        ]

    def _ensure_room(self, now_us: int) -> None:
        if len(self.by_key) >= self._max_keys:
            for own, subjects in list(self._subjects_by_prefix.items()):
                for subject in list(subjects):
                    self._live_overrides(own, "", subject, now_us)
            if len(self.by_key) >= self._max_keys:
                raise StoreUnavailable(
                    f"the memory store is full: it holds overrides of {self._max_keys} subjects; raise max_keys"
                )
