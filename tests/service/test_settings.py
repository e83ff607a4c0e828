"""Settings from the environment, a file and the command line, and the errors of invalid ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from limitforge.core.headers import HeaderStyle, ResetUnit
from limitforge.errors import InvalidInput
from limitforge.service.settings import MASKED, Settings, load_settings
from tests.cli.command import run_cli
from tests.servers import find_free_port
from tests.service.program import run_service

PEPPERS = "1:a pepper that the tests alone know"

# -- from where


def test_nothing_is_needed() -> None:
    assert load_settings({}) == Settings()
    assert (Settings().host, Settings().store_url, Settings().failure) == ("127.0.0.1", "memory://", "open")


def test_the_environment_goes_before_a_file_and_the_command_line_before_both(tmp_path: Path) -> None:
    file = tmp_path / "limitforge.toml"
    file.write_text('port = 1\nworkers = 2\nstore_url = "redis://a"\ndeadline_ms = 20\n')
    environment = {"LIMITFORGE_SETTINGS": str(file), "LIMITFORGE_PORT": "3", "LIMITFORGE_WORKERS": "4", "HOME": "/"}
    found = load_settings(environment, port=5, host=None)
    assert (found.port, found.workers, found.store_url, found.deadline_ms) == (5, 4, "redis://a", 20.0)


@pytest.mark.parametrize(
    ("name", "value", "field", "says"),
    [
        ("LIMITFORGE_PROT", "1", "LIMITFORGE_PROT", "did you mean LIMITFORGE_PORT?"),
        ("LIMITFORGE_TRUSTED_PROXIES", "nginx", "trusted_proxies", "such as 10.0.0.0/8"),
        ("LIMITFORGE_PORT", "http", "port", "a whole number"),
        ("LIMITFORGE_PORT", "1.5", "port", "a whole number"),
        ("LIMITFORGE_PORT", "65536", "port", "from 0 to 65535"),
        ("LIMITFORGE_PORT", "-1", "port", "from 0 to 65535"),
        ("LIMITFORGE_WORKERS", "0", "workers", "from 1 to 256"),
        ("LIMITFORGE_WORKERS", "2", "workers", "LIMITFORGE_STORE_URL to a Redis"),
        ("LIMITFORGE_DEADLINE_MS", "nan", "deadline_ms", "deadline_ms"),
        ("LIMITFORGE_DEADLINE_MS", "0", "deadline_ms", "deadline_ms"),
        ("LIMITFORGE_FAILURE", "panic", "failure", "open, closed or local"),
        ("LIMITFORGE_ROOT_PATH", "limitforge", "root_path", "start with a slash"),
        ("LIMITFORGE_ROOT_PATH", "/limitforge/", "root_path", "not end with one"),
        ("LIMITFORGE_TLS_CERT", "a.pem", "tls_key", "is required if tls_cert is set"),
        ("LIMITFORGE_TLS_KEY", "a.pem", "tls_cert", "is required if tls_key is set"),
        ("LIMITFORGE_LOG_LEVEL", "loud", "log_level", "debug, info"),
        ("LIMITFORGE_HEADERS", "draft-07", "headers", "legacy or draft-06 or draft-11"),
        ("LIMITFORGE_HEADERS", "", "headers", "legacy"),
        ("LIMITFORGE_RESET", "soon", "reset", "epoch or delta"),
        ("LIMITFORGE_PEPPERS", "no version", "peppers", "pepper"),
        ("LIMITFORGE_IDLE_SECONDS", "0", "idle_seconds", "from 1"),
        ("LIMITFORGE_STORE_URL", "http://redis:6379", "store_url", "must start with memory://"),
        ("LIMITFORGE_STORE_URL", "redis://localhost:port/0", "store_url", "host, port and options"),
        ("LIMITFORGE_STORE_URL", "redis://localhost/first", "store_url", "the database must be a number"),
        ("LIMITFORGE_STORE_URL", "memory://?keys=5", "store_url", "has only the parameter max_keys"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(name: str, value: str, field: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        load_settings({name: value})
    assert refused.value.field.lower() == field.lower()
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("port = ", "LIMITFORGE_SETTINGS"),
        ("prot = 1", "prot"),
        ("port = true", "port"),
        ("port = 'a'", "port"),
        ("port = 8000.7", "port"),
    ],
)
def test_a_file_is_read_as_strictly(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "limitforge.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput) as refused:
        load_settings({"LIMITFORGE_SETTINGS": str(file)})
    assert refused.value.field == field


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(InvalidInput, match="can't be read: No such file"):
        load_settings({"LIMITFORGE_SETTINGS": "nowhere.toml"})


# -- what is shown


def test_secrets_are_masked_where_settings_are_shown() -> None:
    result = run_cli(
        "settings",
        "--json",
        LIMITFORGE_PEPPERS=PEPPERS,
        LIMITFORGE_STORE_URL="rediss://forge:hunter2@redis.example:6379/0",
        LIMITFORGE_DATABASE_URL="postgresql+asyncpg://forge:hunter3@db.example/forge",
    )
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown["store_url"] == f"rediss://forge:{MASKED}@redis.example:6379/0"
    assert shown["database_url"] == f"postgresql+asyncpg://forge:{MASKED}@db.example/forge"
    assert shown["peppers"] == MASKED
    assert shown["port"] == 8000
    assert shown.keys() == {row[0] for row in Settings().describe_rows()}


def test_passwords_in_a_query_are_masked_too() -> None:
    store, database = "redis+sentinel://h/forge?sentinel_password=hunter2&db=1", "postgresql://h/d?password=hunter3"
    shown = Settings(store_url=store, database_url=database).masked()
    assert shown["store_url"] == f"redis+sentinel://h/forge?sentinel_password={MASKED}&db=1"
    assert shown["database_url"] == f"postgresql://h/d?password={MASKED}"


def test_settings_are_a_table_for_people() -> None:
    result = run_cli("settings", LIMITFORGE_PEPPERS=PEPPERS, COLUMNS="160")
    assert "LIMITFORGE_DEADLINE_MS" in result.stdout
    assert "How long a check waits for the store." in result.stdout
    assert PEPPERS not in result.stdout


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "LIMITFORGE_PEPPERS"),
        ({"LIMITFORGE_WORKERS": "3", "LIMITFORGE_PEPPERS": PEPPERS}, "3 processes can't share a store in memory"),
        ({"LIMITFORGE_PROT": "1"}, "LIMITFORGE_PROT"),
    ],
)
def test_serve_reports_an_invalid_setting_at_once(environment: dict[str, Any], says: str) -> None:
    result = run_cli("serve", "--port", str(find_free_port()), **environment)
    assert result.returncode != 0
    assert says in result.stderr
    assert "Traceback" not in result.stderr


# -- header fields


def test_header_styles_are_read() -> None:
    form = Settings(headers="draft-06, draft-11", reset="delta").header_options()
    assert form.styles == {HeaderStyle.DRAFT_06, HeaderStyle.DRAFT_11}
    assert form.reset is ResetUnit.DELTA
    assert not Settings(headers="none").header_options().styles


LEGACY = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}
DRAFT_06 = {"ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"}
DRAFT_11 = {"ratelimit", "ratelimit-policy"}


@pytest.mark.parametrize(
    ("environment", "fields", "reset"),
    [
        ({}, LEGACY | DRAFT_11, None),
        ({"LIMITFORGE_RESET": "delta"}, LEGACY | DRAFT_11, "60"),
        ({"LIMITFORGE_HEADERS": "draft-06", "LIMITFORGE_RESET": "delta"}, DRAFT_06, None),
        ({"LIMITFORGE_HEADERS": "none"}, set(), None),
    ],
)
def test_the_service_sends_the_configured_fields(
    tmp_path: Path, environment: dict[str, str], fields: set[str], reset: str | None
) -> None:
    made: dict[str, Any] = json.loads(
        run_cli("keys", "make", "--name", "a", "--json", LIMITFORGE_PEPPERS=PEPPERS).stdout
    )
    plan = {
        "name": "free",
        "limits": [{"name": "a", "algorithm": "fixed_window", "limit": 1, "window_seconds": 60, "align": "first_hit"}],
    }
    tenant = {"name": "acme", "default_plan": "free", "plans": [plan], "keys": [made["entry"]]}
    file = tmp_path / "plans.json"
    file.write_text(json.dumps({"tenants": [tenant]}))
    with run_service(
        find_free_port(), "--config", str(file), environment={"LIMITFORGE_PEPPERS": PEPPERS, **environment}
    ) as service:
        for status in (200, 429):
            answer = service.check(key=made["key"])
            assert answer.status == status
            assert {name for name in answer.headers if "ratelimit" in name} == fields
            assert "retry-after" in answer.headers
            if reset is not None:
                assert answer.headers["x-ratelimit-reset"] == reset
