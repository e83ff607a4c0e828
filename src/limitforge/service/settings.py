"""The settings of the service, from the environment (`LIMITFORGE_*`) or a TOML file.

The file has the same names in lower case, without the prefix. Environment variables take precedence over the file.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.core.exact import short_repr
from limitforge.core.headers import HeaderOptions, HeaderStyle, ResetUnit
from limitforge.core.keys import Keys
from limitforge.errors import InvalidInput
from limitforge.service.http.connections import MAX_CONNECTIONS
from limitforge.service.http.trusted_proxies import TrustedProxies
from limitforge.stores.connect import connect
from limitforge.stores.options import StoreOptions

ENV_PREFIX = "LIMITFORGE_"
FILE_VARIABLE = "LIMITFORGE_SETTINGS"
# Variables of the command line and of the tests. They are not settings, but may be in the environment of the service.
OTHER_VARIABLES = ("LIMITFORGE_ACTOR", "LIMITFORGE_TEST_PROFILE", FILE_VARIABLE)
MAX_WORKERS = 256
DEFAULT_NEW_BUCKETS = 60_000
INTEGER_OR_WORD = int | str
MASKED = "********"
_SECRET_PARAMETER = re.compile(r"([?&][^=&]*(?:password|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)


def _setting(default: Any, description: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"help": description, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the service. Raises InvalidInput, which names the setting, if one is invalid."""

    store_url: str = _setting(
        "memory://", "The store of the counters: memory:// or the URL of a Redis server.", secret=True
    )
    database_url: str = _setting(
        DEFAULT_URL, "The database of tenants and plans: a SQLite or PostgreSQL URL.", secret=True
    )
    config: str = _setting("", "A file with tenants and plans, instead of a database.")
    host: str = _setting("127.0.0.1", "The address to listen on.")
    port: int = _setting(8000, "The port to listen on; 0 for any free port.")
    metrics_host: str = _setting("127.0.0.1", "The address of the metrics port.")
    metrics_port: int = _setting(0, "A port that serves metrics without a token; 0 for none.")
    root_path: str = _setting("", "A prefix of every path, such as /limitforge.")
    workers: int = _setting(1, "The number of worker processes.")
    trusted_proxies: str = _setting(
        "",
        "Proxies whose Forwarded and X-Forwarded-For fields are trusted: addresses and networks, such as "
        "10.0.0.0/8,::1.",
    )
    tls_cert: str = _setting("", "A certificate chain (PEM) to serve TLS.")
    tls_key: str = _setting("", "The private key of the certificate (PEM).")
    deadline_ms: float = _setting(50.0, "How long a check waits for the store.")
    lookup_deadline_ms: float = _setting(
        1_000.0, "How long a check waits for the database to look up a key that is not cached."
    )
    failure: str = _setting("open", "What happens to a check that the store does not decide: open, closed or local.")
    processes: int = _setting(1, "How many processes share the limits while the failure behaviour local applies.")
    breaker_failures: int = _setting(3, "How many consecutive failures open the circuit breaker of the store.")
    breaker_seconds: float = _setting(30.0, "How long the circuit breaker stays open before it probes the store.")
    wait_replicas: int = _setting(0, "How many replicas must confirm a write before a check is answered.")
    new_buckets_per_minute: int | str = _setting(
        "auto",
        "How many buckets a tenant may create per minute; beyond that its new subjects share one: a number, auto"
        f" ({DEFAULT_NEW_BUCKETS}, less on a Redis server with little memory), or none for no bound.",
    )
    denial_cache_ms: float = _setting(1_000.0, "How long a denial may be answered from memory.")
    peppers: str = _setting(
        "", "Secrets that API keys are hashed with, each after its version: 1:first,2:second.", secret=True
    )
    key_prefix: str = _setting("lf", "The prefix of every key in the store.")
    headers: str = _setting(
        "legacy,draft-11", "The rate limit header fields to send: any of legacy, draft-06 and draft-11, or none."
    )
    reset: str = _setting("epoch", "The unit of X-RateLimit-Reset: epoch (seconds since 1970) or delta (from now).")
    max_connections: int = _setting(
        MAX_CONNECTIONS, "How many connections a process keeps open; beyond that it closes the longest idle ones."
    )
    idle_seconds: float = _setting(75.0, "How long a connection may be idle between requests.")
    shutdown_seconds: float = _setting(10.0, "How long a shutdown waits for requests in flight.")
    log_level: str = _setting("info", "The lowest level that is logged: debug, info, warning or error.")

    def __post_init__(self) -> None:
        for name, lowest, highest in (
            ("port", 0, 65_535),
            ("metrics_port", 0, 65_535),
            ("workers", 1, MAX_WORKERS),
            ("lookup_deadline_ms", 10, 60_000),
            ("max_connections", 16, 1_000_000),
            ("idle_seconds", 1, 3_600),
            ("shutdown_seconds", 0, 3_600),
        ):
            if not lowest <= getattr(self, name) <= highest:
                raise InvalidInput(name, f"must be from {lowest} to {highest}, got {getattr(self, name)}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidInput("root_path", "must start with a slash and not end with one, such as /limitforge")
        if bool(self.tls_cert) != bool(self.tls_key):
            missing, given = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise InvalidInput(missing, f"is required if {given} is set")
        if self.failure not in ("open", "closed", "local"):
            raise InvalidInput("failure", f"must be open, closed or local, got {short_repr(self.failure)}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise InvalidInput("log_level", f"must be debug, info, warning or error, got {short_repr(self.log_level)}")
        if self.workers > 1 and self.store_url.startswith("memory:"):
            raise InvalidInput(
                "workers",
                f"{self.workers} processes can't share a store in memory: each would count separately. "
                "Set LIMITFORGE_STORE_URL to a Redis server, or LIMITFORGE_WORKERS to 1",
            )
        try:
            connect(self.store_url, keys=Keys(), options=self.store_options())  # opens no connection yet
        except InvalidInput as error:
            raise InvalidInput("store_url" if error.field == "url" else error.field, error.problem) from None
        self.header_options()
        self.parse_proxies()
        if self.peppers:
            Peppers.parse(self.peppers)

    def store_options(self) -> StoreOptions:
        return StoreOptions(
            failure=self.failure,  # type: ignore[arg-type]
            deadline_ms=self.deadline_ms,
            processes=self.processes,
            breaker_failures=self.breaker_failures,
            breaker_seconds=self.breaker_seconds,
            wait_replicas=self.wait_replicas,
            denial_cache_ms=self.denial_cache_ms,
            new_buckets_per_minute=self._parse_new_buckets(),
            cap_budget_by_memory=self.new_buckets_per_minute == "auto",
        )

    def _parse_new_buckets(self) -> int | None:
        text = str(self.new_buckets_per_minute)
        if text in ("auto", "none"):
            return DEFAULT_NEW_BUCKETS if text == "auto" else None
        if not text.isdecimal() or not int(text):
            raise InvalidInput(
                "new_buckets_per_minute", f"must be a number above 0, auto or none, got {short_repr(text)}"
            )
        return int(text)

    def parse_proxies(self) -> TrustedProxies:
        return TrustedProxies.parse(self.trusted_proxies)

    def header_options(self) -> HeaderOptions:
        styles = [word.strip() for word in self.headers.split(",")] if self.headers != "none" else []
        for name, words, valid in (("headers", styles, HeaderStyle), ("reset", [self.reset], ResetUnit)):
            for word in words:
                if word not in list(valid):
                    raise InvalidInput(name, f"must be {' or '.join(valid)}, got {short_repr(word)}")
        return HeaderOptions(frozenset(map(HeaderStyle, styles)), ResetUnit(self.reset))

    def describe_rows(self) -> list[tuple[str, Any, str]]:
        """Return name, masked value and description of each setting."""
        values = self.masked()
        return [(f.name, values[f.name], f.metadata["help"]) for f in fields(self)]

    def masked(self) -> dict[str, Any]:
        """Return all settings with secrets masked: the password in a URL, otherwise the whole value."""
        return {
            f.name: _mask(getattr(self, f.name)) if f.metadata["secret"] else getattr(self, f.name)
            for f in fields(self)
        }


def load_settings(environment: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Return the settings of this process. Raises InvalidInput.

    `overrides` are command-line options, None if not given. They take precedence over environment variables, which take
    precedence over the file.
    """
    environment = os.environ if environment is None else environment
    known = {f.name for f in fields(Settings)}
    types = get_type_hints(Settings)
    values: dict[str, Any] = {}
    if environment.get(FILE_VARIABLE):
        values |= _read_file(Path(environment[FILE_VARIABLE]), known)
    for variable, text in environment.items():
        if variable.startswith(ENV_PREFIX) and variable not in OTHER_VARIABLES:
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in known:
                similar = get_close_matches(name, known, 1)
                hint = f"did you mean {ENV_PREFIX}{similar[0].upper()}?" if similar else "list: limitforge settings"
                raise InvalidInput(variable, f"unknown setting; {hint}")
            values[name] = text
    values |= {name: value for name, value in overrides.items() if value is not None}
    return Settings(**{name: _convert(name, value, types[name]) for name, value in values.items()})


def _read_file(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(FILE_VARIABLE, f"can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(FILE_VARIABLE, f"{path.name} is not valid TOML: {error}") from None
    for name in values:
        if name not in known:
            raise InvalidInput(name[:64], f"unknown setting in {path.name}; valid are {', '.join(sorted(known))}")
    return values


def _convert(name: str, value: Any, setting_type: Any) -> Any:
    if setting_type is str or setting_type == INTEGER_OR_WORD:
        if isinstance(value, str) or (setting_type is not str and type(value) is int):
            return value
    else:
        try:
            if not isinstance(value, bool) and not (setting_type is int and isinstance(value, float)):
                return setting_type(value)
        except (TypeError, ValueError):
            pass
    type_names = {str: "text", int: "a whole number", float: "a number", INTEGER_OR_WORD: "a number or a word"}
    raise InvalidInput(name, f"must be {type_names[setting_type]}, got {short_repr(value)}")


def _mask(text: str) -> str:
    """Mask the password and secret parameters of a URL, and any other text as a whole."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return MASKED if text else ""
    account, at, location = rest.rpartition("@")
    user, colon, _ = account.partition(":")
    location = _SECRET_PARAMETER.sub(rf"\1{MASKED}", location)
    return f"{scheme}://{user}{f':{MASKED}' if colon else ''}{at}{location}"
