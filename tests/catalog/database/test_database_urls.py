"""The URLs of databases, and the errors for a database that can't be used."""

import contextlib

import pytest

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Tenant
from limitforge.errors import CatalogUnavailable, InvalidInput
from tests.catalog.factories import open_database


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "mysql://localhost/x",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "postgresql+psycopg2://localhost/x",
        "redis://localhost",
        "postgresql://localhost:port/x",
    ],
)
def test_an_unsupported_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Database(url)
    assert refused.value.field == "database"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
async def test_a_postgres_is_called_in_several_ways(postgres_url: str, scheme: str) -> None:
    async with open_database(postgres_url.replace("postgresql+asyncpg", scheme)) as database:
        assert await database.schema_version() is None


@pytest.mark.parametrize("options", ["sslmode=disable", "sslmode=prefer", "application_name=limitforge", "bogus=1"])
async def test_options_that_others_put_into_urls_are_understood_or_refused(postgres_url: str, options: str) -> None:
    """Hosted Postgres services give out such URLs; the driver would fail on them with a TypeError."""
    url = postgres_url.replace("postgresql+asyncpg", "postgresql")
    with contextlib.suppress(InvalidInput):
        async with open_database(f"{url}?{options}") as database:
            assert await database.schema_version() is None


async def test_a_database_that_is_not_there_is_unavailable_and_says_which() -> None:
    async with open_database("postgresql://someone:a-password@127.0.0.1:1/nowhere") as database:
        with pytest.raises(CatalogUnavailable, match=r"nowhere at 127\.0\.0\.1:1") as refused:
            await Catalog(database).get(Tenant, "operator")
        assert "a-password" not in str(refused.value)
        assert "a-password" not in repr(database.url)
        assert refused.value.__cause__ is None


async def test_a_database_that_does_not_exist_is_not_one_without_a_schema(postgres_url: str) -> None:
    """The error does not suggest an upgrade, which would not help."""
    async with open_database(f"{postgres_url.rpartition('/')[0]}/nowhere") as database:
        with pytest.raises(CatalogUnavailable, match="nowhere") as refused:
            await Catalog(database).get(Tenant, "operator")
    assert "db upgrade" not in str(refused.value)


async def test_nothing_is_opened_before_the_first_use() -> None:
    Database("sqlite:////no/such/folder/x.db")
    async with open_database("sqlite:////no/such/folder/x.db") as database:
        with pytest.raises(CatalogUnavailable, match="unable to open"):
            await database.ensure_schema()
