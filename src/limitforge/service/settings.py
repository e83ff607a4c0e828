"""Every setting of the service: from the environment (`LIMITFORGE_*`), or a TOML file, whose names are the same in
lower case. The environment goes before the file.
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
from limitforge.stores import connect
from limitforge.stores.options import StoreOptions

ENV_PREFIX = "LIMITFORGE_"
FILE_VARIABLE = "LIMITFORGE_SETTINGS"
# Of other programs of limitforge, which share the environment.
OTHER_VARIABLES = ("LIMITFORGE_ACTOR", "LIMITFORGE_TEST_PROFILE", FILE_VARIABLE)
MAX_WORKERS = 256
DEFAULT_NEW_BUCKETS = 60_000
NUMBER_OR_WORD = int | str
MASKED = "********"
_IN_QUERY = re.compile(r"([?&][^=&]*(?:password|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)


def _setting(default: Any, says: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"help": says, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the service is told at its start. Each part of it gets what it needs, and no more."""

    store_url: str = _setting("memory://", "Where decisions are kept: memory://, or the URL of a Redis.", secret=True)
    database_url: str = _setting(DEFAULT_URL, "Where tenants and plans are kept: sqlite or postgresql.", secret=True)
    config: str = _setting("", "A file with tenants and plans, in place of a database.")
    host: str = _setting("127.0.0.1", "The address to listen on.")
    port: int = _setting(8000, "The port to listen on; 0 for any that is free.")
    metrics_host: str = _setting("127.0.0.1", "The address of the port for metrics.")
    metrics_port: int = _setting(0, "A port that tells metrics without a token; 0 for none.")
    root_path: str = _setting("", "What every path starts with, such as /limitforge.")
    workers: int = _setting(1, "How many processes answer.")
    trusted_proxies: str = _setting("", "Which proxies are believed who asks: addresses and networks, 10.0.0.0/8,::1.")
    tls_cert: str = _setting("", "A certificate chain (PEM), to speak TLS.")
    tls_key: str = _setting("", "Its private key (PEM).")
    deadline_ms: float = _setting(50.0, "How long a check may wait for the store.")
    lookup_deadline_ms: float = _setting(
        1_000.0, "How long a check may wait for the database, for a key not yet known."
    )
    failure: str = _setting("open", "What happens when the store can't decide: open, closed or local.")
    processes: int = _setting(1, "How many processes share the limits, for failure: local.")
    breaker_failures: int = _setting(3, "After how many failures in a row the store is left alone for a while.")
    breaker_seconds: float = _setting(30.0, "How long it is left alone before one check tries it again.")
    wait_replicas: int = _setting(0, "How many replicas must have what was written before a decision is told.")
    new_buckets_per_minute: int | str = _setting(
        "auto",
        "How many buckets a tenant may begin; beyond that its new subjects share one: a number, none for any number, or"
        f" auto for {DEFAULT_NEW_BUCKETS:_}, and fewer on a Redis with little memory.",
    )
    denial_cache_ms: float = _setting(1_000.0, "How long a denial may be answered without asking the store.")
    peppers: str = _setting("", "What keys are hashed under: versions and secrets, 1:first,2:second.", secret=True)
    key_prefix: str = _setting("lf", "What every key in the store starts with.")
    headers: str = _setting("legacy,draft-11", "What tells of limits: any of legacy, draft-06 and draft-11, or none.")
    reset: str = _setting("epoch", "What X-RateLimit-Reset counts: epoch (seconds since 1970) or delta (from now).")
    max_connections: int = _setting(
        MAX_CONNECTIONS,
        "How many connections a process keeps; beyond that those that are quiet for longest are closed.",
    )
    idle_seconds: float = _setting(75.0, "How long a connection may be silent between requests.")
    shutdown_seconds: float = _setting(10.0, "How long a shutdown waits for what is in flight.")
    log_level: str = _setting("info", "What is logged: debug, info, warning or error.")

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
            raise InvalidInput("tls_key" if self.tls_cert else "tls_cert", "is needed too: TLS takes both")
        if self.failure not in ("open", "closed", "local"):
            raise InvalidInput("failure", f"must be open, closed or local, got {short_repr(self.failure)}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise InvalidInput("log_level", f"must be debug, info, warning or error, got {short_repr(self.log_level)}")
        if self.workers > 1 and self.store_url.startswith("memory:"):
            raise InvalidInput(
                "workers",
                f"{self.workers} processes can't share a store in memory: each would have limits of its own. "
                "Set LIMITFORGE_STORE_URL to a Redis, or LIMITFORGE_WORKERS to 1",
            )
        try:
            connect(self.store_url, keys=Keys(), options=self.store_options())  # which opens nothing yet
        except InvalidInput as error:
            raise InvalidInput("store_url" if error.field == "url" else error.field, error.problem) from None
        self.header_form()
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
        given = str(self.new_buckets_per_minute)
        if given in ("auto", "none"):
            return DEFAULT_NEW_BUCKETS if given == "auto" else None
        if not given.isdecimal() or not int(given):
            raise InvalidInput(
                "new_buckets_per_minute", f"must be a number above 0, auto or none, got {short_repr(given)}"
            )
        return int(given)

    def parse_proxies(self) -> TrustedProxies:
        return TrustedProxies.parse(self.trusted_proxies)

    def header_form(self) -> HeaderOptions:
        words = [word.strip() for word in self.headers.split(",")] if self.headers != "none" else []
        for name, told, known in (("headers", words, HeaderStyle), ("reset", [self.reset], ResetUnit)):
            for word in told:
                if word not in list(known):
                    raise InvalidInput(name, f"must be {' or '.join(known)}, got {short_repr(word)}")
        return HeaderOptions(frozenset(map(HeaderStyle, words)), ResetUnit(self.reset))

    def rows(self) -> list[tuple[str, Any, str]]:
        """For people: name, value and what it says."""
        values = self.masked()
        return [(f.name, values[f.name], f.metadata["help"]) for f in fields(self)]

    def masked(self) -> dict[str, Any]:
        """For people: secrets are masked, and of URLs only the password."""
        return {
            f.name: _mask(getattr(self, f.name)) if f.metadata["secret"] else getattr(self, f.name)
            for f in fields(self)
        }


def load_settings(environment: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """The settings of this process; `overrides` are from the command line, None where it says nothing."""
    environment = os.environ if environment is None else environment
    known = {f.name for f in fields(Settings)}
    kinds = get_type_hints(Settings)
    values: dict[str, Any] = {}
    if environment.get(FILE_VARIABLE):
        values |= _read_file(Path(environment[FILE_VARIABLE]), known)
    for name, text in environment.items():
        if name.startswith(ENV_PREFIX) and name not in OTHER_VARIABLES:
            own = name.removeprefix(ENV_PREFIX).lower()
            if own not in known:
                near = get_close_matches(own, known, 1)
                said = (
                    f"did you mean {ENV_PREFIX}{near[0].upper()}?" if near else "`limitforge settings` shows them all"
                )
                raise InvalidInput(name, f"is no setting; {said}")
            values[own] = text
    values |= {name: value for name, value in overrides.items() if value is not None}
    return Settings(**{name: _convert(name, value, kinds[name]) for name, value in values.items()})


def _read_file(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(FILE_VARIABLE, f"can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(FILE_VARIABLE, f"{path.name} is no TOML: {error}") from None
    for name in found:
        if name not in known:
            raise InvalidInput(name[:64], f"is no setting, in {path.name}; there are {', '.join(sorted(known))}")
    return found


def _convert(name: str, value: Any, kind: Any) -> Any:
    if kind is str or kind == NUMBER_OR_WORD:
        if isinstance(value, str) or (kind is not str and type(value) is int):
            return value
    else:
        try:
            if not isinstance(value, bool) and not (kind is int and isinstance(value, float)):
                return kind(value)
        except (TypeError, ValueError):
            pass
    words = {str: "text", int: "a whole number", float: "a number", NUMBER_OR_WORD: "a number or a word"}[kind]
    raise InvalidInput(name, f"must be {words}, got {short_repr(value)}")


def _mask(text: str) -> str:
    """A URL without its password; anything else not at all."""
    scheme, found, rest = text.partition("://")
    if not found:
        return MASKED if text else ""
    account, at, place = rest.rpartition("@")
    user, colon, _ = account.partition(":")
    place = _IN_QUERY.sub(rf"\1{MASKED}", place)
    return f"{scheme}://{user}{f':{MASKED}' if colon else ''}{at}{place}"
