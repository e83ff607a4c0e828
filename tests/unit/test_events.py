"""Log events: a fixed name, a constant sentence, and fields."""

import logging

import pytest

from limitforge.observability.events import log_event

_log = logging.getLogger(__name__)


def test_an_event_is_logged_with_its_name_its_sentence_and_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    log_event(_log, logging.WARNING, "store.breaker_open", "circuit breaker open", server="redis-1", retry_in_s=30.0)

    assert caplog.messages == ["store.breaker_open: circuit breaker open server=redis-1 retry_in_s=30"]


def test_a_handler_finds_the_event_and_its_fields_on_the_record(caplog: pytest.LogCaptureFixture) -> None:
    log_event(_log, logging.ERROR, "catalog.change_rejected", "could not apply a change", revision=7)

    record = caplog.records[0]
    assert (record.__dict__["event"], record.__dict__["fields"]) == ("catalog.change_rejected", {"revision": 7})
    assert record.funcName == "test_a_handler_finds_the_event_and_its_fields_on_the_record"


@pytest.mark.parametrize(
    ("value", "shown"),
    [("two words", '"two words"'), ("a\nb", '"a\\nb"'), ("x=1", '"x=1"'), ("", '""'), ('"', '"\\""'), (0.25, "0.25")],
)
def test_a_value_cannot_forge_a_field_or_a_line(value: object, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    log_event(_log, logging.WARNING, "a.b", "message", value=value)

    assert caplog.messages == [f"a.b: message value={shown}"]


def test_an_exception_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log_event(_log, logging.ERROR, "a.b", "failed", exc_info=ValueError("lost"))

    assert "ValueError: lost" in caplog.text


def test_two_events_of_one_logger_have_different_format_strings(caplog: pytest.LogCaptureFixture) -> None:
    log_event(_log, logging.WARNING, "a.b", "first")
    log_event(_log, logging.WARNING, "a.c", "second")

    assert len({record.msg for record in caplog.records}) == 2
