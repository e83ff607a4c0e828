"""The text of a secret is returned once, when it is created, and is stored nowhere."""

import logging
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.pretty import pretty_repr
from sqlalchemy.engine import make_url

from limitforge import ManualClock
from limitforge.catalog.credentials import Credential, Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Key, Token, to_public_dict
from limitforge.errors import CatalogError
from tests.catalog.conftest import PEPPERS
from tests.catalog.environments import one_database
from tests.catalog.factories import ACTOR, audit_of, delete, new_key, new_tenant, new_token, open_database, rows
from tests.postgres import PostgresServer

TALKATIVE = (
    "sqlalchemy.engine",
    "sqlalchemy.pool",
    "sqlalchemy.dialects",
    "aiosqlite",
    "asyncpg",
    "alembic",
    "asyncio",
)


class Results:
    """Everything that was created and returned while secrets were created and deleted."""

    def __init__(self) -> None:
        self.credentials: list[Credential] = []
        self.answers: list[Any] = []
        self.hashes: set[str] = set()

    def keep(self, answer: tuple[Key | Token, Credential]) -> Key | Token:
        holder, credential = answer
        self.credentials.append(credential)
        self.answers.append(answer)
        self.hashes |= {secret.hash for secret in holder.secrets}
        return holder

    def texts(self) -> list[str]:
        """Return each text, and the secret part of it."""
        whole = [credential.text for credential in self.credentials]
        return whole + [text.partition("_")[2].partition("_")[2][16:44] for text in whole]


async def use_secrets(catalog: Catalog) -> Results:
    """Create, rotate, disable, use, refuse and delete keys and tokens, and keep some of each."""
    results = Results()
    tenant = await new_tenant(catalog)
    for fate in ("kept", "deleted"):
        key = results.keep(await new_key(catalog, tenant.id, fate, metadata={"fate": fate}))
        test = results.keep(await new_key(catalog, tenant.id, fate, type="test"))
        token = results.keep(await new_token(catalog, fate, tenant_id=tenant.id))
        for grace in (3_600, 0, 60):
            async with catalog.edit(ACTOR) as edit:
                results.keep(await edit.rotate_key(key.id, grace))
        async with catalog.edit(ACTOR) as edit:
            results.answers.append(await edit.set_key_disabled(test.id, disabled=True))
        results.answers.append(await catalog.authenticate_token(results.credentials[2].text))
        if fate == "deleted":
            for holder in (key, test, token):
                results.answers.append(await delete(catalog, holder))
    for attempt in results.credentials:
        with pytest.raises(CatalogError) as refused:
            await catalog.authenticate_token(attempt.text[:-1])
        results.answers += [refused.value, refused.value.args]
    stored = await catalog.get(Key, f"key_{results.credentials[0].id}")
    with pytest.raises(CatalogError) as refused:  # by the database: another key has that secret
        async with catalog.edit(ACTOR) as edit:
            await edit.add_key(msgspec.structs.replace(stored, id="key_0000000000000000"))
    results.answers += [refused.value, refused.value.__cause__]
    results.answers += [
        await catalog.list_page(Key),
        await catalog.list_page(Token),
        await catalog.audit_page(size=1_000),
    ]
    return results


def dump_of(database: Database, postgres_server: PostgresServer | None) -> str:
    """Return all rows, and for a file also its bytes, which may contain deleted rows."""
    if postgres_server is not None:
        return postgres_server.dump(make_url(database.url).database or "")
    file = Path(database.url.database or "")
    with sqlite3.connect(file) as connection:
        lines = "\n".join(connection.iterdump())
    connection.close()
    bytes_ = [path.read_bytes().decode("latin-1") for path in file.parent.glob(f"{file.name}*")]
    return "\n".join([lines, *bytes_])


async def test_a_secrets_text_is_neither_in_the_database_nor_in_the_logs(
    database_url: str, clock: ManualClock, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in TALKATIVE:
        caplog.set_level(logging.DEBUG, logger=name)  # before the engine is created, which reads the level once
    async with open_database(database_url) as database:
        await database.upgrade()
        results = await use_secrets(Catalog(database, peppers=Peppers.parse(PEPPERS), clock=clock))
        server = None if database.is_sqlite else request.getfixturevalue("postgres_server")
        dump = dump_of(database, server)
    assert "INSERT INTO secrets" in caplog.text  # the driver does log statements
    assert "CREATE TABLE" in dump
    assert all(credential.id in dump for credential in results.credentials)
    for text in results.texts():
        assert len(text) >= 28
        assert text not in dump
        assert text not in caplog.text
    assert PEPPERS[2:] not in dump + caplog.text
    for record in caplog.records:  # what a handler with another format would log
        assert not any(text in repr(record.__dict__) for text in results.texts())


@one_database
async def test_a_secrets_text_is_in_no_answer_but_the_one(catalog: Catalog) -> None:
    results = await use_secrets(catalog)
    for answer in results.answers:
        for shown in (repr(answer), str(answer), f"{answer}", pretty_repr(answer)):
            assert not any(text in shown for text in results.texts())
    for credential in results.credentials:
        assert catalog.parse_credential(credential.text) == credential


async def test_neither_a_secrets_text_nor_its_hash_is_in_the_audit_log(catalog: Catalog, database: Database) -> None:
    results = await use_secrets(catalog)
    entries = repr(await audit_of(catalog)) + repr(await rows(database, "SELECT * FROM audit"))
    assert "key.rotate" in entries
    assert "key.delete" in entries
    assert len(results.hashes) >= 10
    for hidden in (*results.texts(), *results.hashes):
        assert hidden not in entries
    assert "'pepper'" in entries  # its version and expiry are recorded


@one_database
async def test_public_fields_contain_no_hash(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    key, _ = await new_key(catalog, tenant.id)
    token, _ = await new_token(catalog)
    for holder in (key, token):
        assert "hash" not in repr(to_public_dict(holder))
        assert holder.secrets[0].hash not in repr(to_public_dict(holder))


async def test_only_a_hash_is_kept_and_it_can_not_be_turned_back(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    key, credential = await new_key(catalog, tenant.id)
    ((kept,),) = await rows(database, "SELECT hash FROM secrets WHERE key_id = :key", key=key.id)
    assert len(kept) == 64
    assert int(kept, 16) > 0
    peppers = Peppers.parse("1:a guess at the pepper")
    assert peppers.hash_credential(credential).hash != kept
    assert catalog.peppers is not None
    assert catalog.peppers.hash_credential(credential).hash == kept
