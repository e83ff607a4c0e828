"""What Redis refuses is translated once, and each refusal has a stated meaning."""

from pathlib import Path

import hiredis
import pytest

from limitforge import StoreCorrupt, StoreUnavailable
from limitforge.stores.redis.address import Address, parse_address
from limitforge.stores.redis.resp import (
    UNAVAILABLE_ERRORS,
    connection_error,
    handshake_error,
    is_script_missing,
    translate_error,
)

DOCS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()

SAID = {
    "LOADING": "LOADING Redis is loading the dataset in memory",
    "READONLY": "READONLY You can't write against a read only replica. script: 1, on @user_script:1.",
    "OOM": "OOM command not allowed when used memory > 'maxmemory'. script: 1, on @user_script:1.",
    "MASTERDOWN": "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "NOAUTH": "NOAUTH Authentication required.",
    "BUSY": "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
}


@pytest.mark.parametrize("word", SAID)
def test_each_refusal_of_a_redis_that_cant_serve_says_what_it_means(word: str) -> None:
    error = translate_error(hiredis.ReplyError(SAID[word]))
    assert isinstance(error, StoreUnavailable)
    assert not error.maybe_counted
    assert UNAVAILABLE_ERRORS[word] in str(error)
    assert word in str(error)


@pytest.mark.parametrize(
    "word",
    [word for word in UNAVAILABLE_ERRORS if word.isupper() and word not in ("UNKILLABLE", "CLUSTERDOWN", "TRYAGAIN")],
)
def test_each_refusal_is_documented(word: str) -> None:
    assert f"`{word}`" in DOCS


@pytest.mark.parametrize(
    "said", ["ERR Error running script: a bug", "WRONGTYPE Operation against a key", "ERR unknown"]
)
def test_any_other_refusal_is_a_bug_or_not_ours(said: str) -> None:
    assert isinstance(translate_error(hiredis.ReplyError(said)), StoreCorrupt)


def test_a_redis_that_refuses_the_greeting_cant_be_used_whatever_it_says() -> None:
    replies = [b"OK", hiredis.ReplyError("ERR DB index is out of range"), hiredis.ReplyError("NOAUTH")]
    error = handshake_error(replies)
    assert isinstance(error, StoreUnavailable)
    assert "DB index" in str(error)
    assert handshake_error([b"OK", b"sha"]) is None


def test_only_a_forgotten_script_is_sent_again() -> None:
    assert is_script_missing(hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL."))
    assert not is_script_missing(hiredis.ReplyError("LOADING"))
    assert not is_script_missing(b"NOSCRIPT")


def test_a_silent_network_may_have_carried_the_check() -> None:
    assert connection_error(TimeoutError(), maybe_counted=True).maybe_counted
    assert "TimeoutError" in str(connection_error(TimeoutError()))


def test_an_address_tells_where_it_leads_and_no_password() -> None:
    address = parse_address("redis://user:secret@db.example:6390/3?client_name=api")
    assert (address.host, address.port, address.path, address.tls) == ("db.example", 6390, None, None)
    assert repr(address) == "redis://db.example:6390"
    said = hiredis_commands(address)
    assert said[:3] == [[b"AUTH", b"user", b"secret"], [b"SELECT", b"3"], [b"CLIENT", b"SETNAME", b"api"]]
    assert said[3][:2] == [b"SCRIPT", b"LOAD"]


def test_a_password_alone_is_that_of_the_default_user() -> None:
    address = parse_address("redis://:p%40ss%2Fword@localhost")
    assert hiredis_commands(address)[0] == [b"AUTH", b"p@ss/word"]


def test_a_socket_on_this_machine_has_a_path_and_a_database() -> None:
    address = parse_address("unix://user:pw@/run/redis.sock?db=2")
    assert (address.path, repr(address)) == ("/run/redis.sock", "unix:///run/redis.sock")
    assert hiredis_commands(address)[:2] == [[b"AUTH", b"user", b"pw"], [b"SELECT", b"2"]]


def test_tls_is_verified_unless_the_url_says_otherwise() -> None:
    strict, lax = parse_address("rediss://host").tls, parse_address("rediss://host?ssl_cert_reqs=none").tls
    assert strict is not None
    assert strict.check_hostname
    assert lax is not None
    assert not lax.check_hostname


def hiredis_commands(address: Address) -> list[list[bytes]]:
    """What is said first: RESP requests have the form of replies."""
    reader = hiredis.Reader()
    reader.feed(address.handshake)
    found = []
    while (command := reader.gets()) is not False:
        found.append(command)
    assert len(found) == address.handshake_replies
    return found
