"""The parts of overrides that are read to find those that a store has lost."""

from typing import Any

import msgspec


class OverrideRow(msgspec.Struct, frozen=True):
    """The key of an override, without its limits. `lanes` is the stored value of `tenants.lanes`."""

    id: str
    version: int
    tenant_id: str
    resource: str
    subject: str
    lanes: Any = 1


class DeletedOverride(msgspec.Struct, frozen=True):
    """An override that was deleted. `deletion_number` grows with each deletion."""

    deletion_number: int
    resource: str
    subject: str
