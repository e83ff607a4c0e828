"""Overrides in the memory store."""

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
    check_override_count,
    decode_cursor,
    encode_cursor,
    expiry_seconds,
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
    """Overrides by subject and resource. They are never evicted: a full store refuses new ones."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self.by_key: dict[str, dict[str, _StoredOverride]] = {}  # by override key, then resource
        self._subjects_by_prefix: dict[str, set[str]] = {}  # by lane prefix

    def algorithm_resolver(self, now_us: int, shared: Container[tuple[Rule, str | None]] = ()) -> AlgorithmFor:
        """Return a function that applies the live overrides to a rule.

        `shared` holds the (rule, override key) pairs that an overflow bucket decides. Several subjects share that
        bucket, so an override changes only the limit there, not the window or the rate.
        """

        def find_live(overrides: dict[str, _StoredOverride], resource: str, rule: Rule) -> CompiledOverride | None:
            override = overrides.get(resource)
            if override is None or now_us >= override.expires_us:
                return None
            matching = (
                one for one in override.compiled if one.name == rule.limit.name and one.code == rule.algorithm.code
            )
            return next(matching, None)

        def algorithm_for(rule: Rule, resource: str, override_key: str) -> Algorithm:
            overrides = self.by_key.get(override_key)
            if not overrides:
                return rule.algorithm
            exact = None if resource == ANY_RESOURCE else find_live(overrides, resource, rule)
            any_resource = find_live(overrides, ANY_RESOURCE, rule)
            algorithm = apply_overrides(rule.algorithm, rule.scope, exact, any_resource)
            if (rule, override_key) in shared:
                return rule.algorithm.with_parameters((algorithm.limit,))
            return algorithm

        return algorithm_for

    def set(self, command: SetOverride, now_us: int) -> Override:
        key = Keys.overrides_key(command.lane_prefix, command.subject)
        live = {r: o for r, o in self.by_key.get(key, {}).items() if o.expires_us > now_us}
        check_override_count(len(live.keys() | {command.resource}))
        if key not in self.by_key:
            self._ensure_room(now_us)
        expires_us = now_us + command.ttl_us
        live[command.resource] = _StoredOverride(command.changes, command.compiled, expires_us)
        self.by_key[key] = live
        self._subjects_by_prefix.setdefault(command.lane_prefix, set()).add(command.subject)
        return Override(command.tenant, command.resource, command.subject, command.changes, expiry_seconds(expires_us))

    def get(self, command: GetOverrides, now_us: int) -> list[Override]:
        return self._live_overrides(command.lane_prefix, command.tenant, command.subject, now_us)

    def list_page(self, command: ListOverrides, now_us: int) -> OverridePage:
        after = decode_cursor(command.cursor)
        subjects = sorted(
            (encode_key(subject), prefix)
            for prefix in command.lane_prefixes
            for subject in self._subjects_by_prefix.get(prefix, ())
            if after is None or encode_key(subject) > after
        )
        page = subjects[: command.page_size]
        overrides = [
            override
            for subject, prefix in page
            for override in self._live_overrides(prefix, command.tenant, decode_key(subject), now_us)
        ]
        return OverridePage(overrides, encode_cursor(page[-1][0]) if len(subjects) > len(page) else None)

    def find_missing(self, command: FindMissingOverrides, now_us: int) -> list[int]:
        def is_live(prefix: str, resource: str, subject: str) -> bool:
            override = self.by_key.get(Keys.overrides_key(prefix, subject), {}).get(resource)
            return override is not None and now_us < override.expires_us

        return [index for index, target in enumerate(command.targets) if not is_live(*target)]

    def delete(self, command: DeleteOverride, now_us: int) -> bool:
        live = {o.resource for o in self._live_overrides(command.lane_prefix, "", command.subject, now_us)}
        existed = command.resource in live
        if existed:
            del self.by_key[Keys.overrides_key(command.lane_prefix, command.subject)][command.resource]
        self._live_overrides(command.lane_prefix, "", command.subject, now_us)  # forgets a subject without overrides
        return existed

    def clear(self, command: ClearOverrides, now_us: int) -> int:
        cleared = 0
        for prefix in command.lane_prefixes:
            for subject in list(self._subjects_by_prefix.get(prefix, ())):
                cleared += bool(self._live_overrides(prefix, "", subject, now_us))
                self.by_key.pop(Keys.overrides_key(prefix, subject), None)
            self._subjects_by_prefix.pop(prefix, None)
        return cleared

    def _live_overrides(self, prefix: str, tenant: str, subject: str, now_us: int) -> list[Override]:
        """Return a subject's overrides, sorted by resource, and remove those that have expired."""
        key = Keys.overrides_key(prefix, subject)
        live = {r: o for r, o in self.by_key.get(key, {}).items() if o.expires_us > now_us}
        if live:
            self.by_key[key] = live
        else:
            self.by_key.pop(key, None)
            subjects = self._subjects_by_prefix.get(prefix, set())
            subjects.discard(subject)
            if not subjects:
                self._subjects_by_prefix.pop(prefix, None)
        return [
            Override(tenant, resource, subject, override.changes, expiry_seconds(override.expires_us))
            for resource, override in sorted(live.items(), key=lambda item: encode_key(item[0]))
        ]

    def _ensure_room(self, now_us: int) -> None:
        if len(self.by_key) >= self._max_keys:
            for prefix, subjects in list(self._subjects_by_prefix.items()):
                for subject in list(subjects):
                    self._live_overrides(prefix, "", subject, now_us)
            if len(self.by_key) >= self._max_keys:
                raise StoreUnavailable(
                    f"the memory store is full: it holds overrides of {self._max_keys} subjects; raise max_keys"
                )
