"""A tenant that is denied for thousands of subjects can't hide those of another tenant from the throttled list."""

from pathlib import Path

import pytest

from tests.service.seeded_service import SeededService, TenantClient, run_seeded_service

pytestmark = pytest.mark.slow

BATCH = 1_000
FLOOD = 15_000
"""Denied subjects of the attacker, many times the capacity of the list."""
LIMIT = {"name": "a", "algorithm": "fixed_window", "limit": 1, "window_seconds": 3_600}


def denied(service: SeededService, query: str) -> dict[tuple[str, str], int]:
    items = service.admin("GET", f"throttled?{query}").json["items"]
    return {(item["tenant_id"], item["subject_hash"]): item["denied"] for item in items}


def flood(attacker: TenantClient) -> None:
    for first in range(0, FLOOD, BATCH):
        subjects = [f"{'x' * 480}{number}" for number in range(first, first + BATCH)]
        checks = [{"resource": "GET:/orders", "subject": subject} for subject in subjects]
        answer = attacker.post("check/batch", checks=checks)
        assert sum(not decision["allowed"] for decision in answer.json["decisions"]) >= BATCH - 1


def test_a_flood_of_denied_subjects_hides_none_of_another_tenant(tmp_path: Path) -> None:
    with run_seeded_service(f"sqlite:///{tmp_path}/crowd.db") as service:
        victim, attacker = service.tenant(LIMIT), service.tenant({**LIMIT, "scope": "tenant"})
        for subject in ("user:1", "user:2"):
            assert [victim.check(subject=subject).status for _ in range(3)] == [200, 429, 429]
        before = denied(service, f"tenant_id={victim.id}")
        assert list(before.values()) == [2, 2]
        flood(attacker)
        assert denied(service, f"tenant_id={victim.id}") == before
        everyone = denied(service, "limit=10")  # each tenant has a fair share of it
        assert {name: count for name, count in everyone.items() if name[0] == victim.id} == before
        assert {name[0] for name in everyone} == {victim.id, attacker.id}
