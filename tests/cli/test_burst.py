"""`limitforge burst`, in a pipe and in a terminal. Limits are per day, so that they do not refill during a test."""

import json
import os
import pty
import signal
import subprocess
from typing import Any, Self

import pytest

from limitforge.cli.burst.command import Algorithm, parse_limits
from tests.cli.command import ENVIRONMENT, INSTALLED_PROGRAM, SECONDS, run_cli, run_installed_cli
from tests.servers import RedisServer


def summary(*arguments: str) -> dict[str, Any]:
    done = run_cli("burst", *arguments, "--rate", "max", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    answer: dict[str, Any] = json.loads(line)
    return answer


@pytest.mark.parametrize(
    "algorithm", [None, "token_bucket", "fixed_window", "sliding_window", "sliding_window_counter"]
)
def test_a_burst_is_admitted_up_to_its_limit(algorithm: str | None) -> None:
    chosen = ("--algorithm", algorithm) if algorithm else ()
    results = summary("100/day", "--requests", "150", *chosen)
    assert (results["sent"], results["allowed"], results["delayed"], results["denied"]) == (150, 100, 0, 50)
    assert results["last"]["allowed"] is False
    assert results["last"]["remaining"] == 0
    assert results["last"]["retry_after_ms"] > 0


def test_a_leaky_bucket_delays_all_but_the_first() -> None:
    results = summary("100/day", "--requests", "150", "--algorithm", "leaky_bucket")
    assert (results["allowed"], results["delayed"], results["denied"]) == (100, 99, 50)
    assert results["longest_delay_ms"] > 80_000_000


def test_the_strictest_of_several_limits_binds() -> None:
    results = summary("100/day; few=7/hour", "--requests", "20")
    assert (results["allowed"], results["denied"]) == (7, 13)
    assert results["last"]["binding"] == "few"
    assert results["last"]["limits"]["day"]["remaining"] == 93


def test_a_cost_is_taken_by_each_check() -> None:
    results = summary("100/day", "--requests", "20", "--cost", "30")
    assert (results["allowed"], results["denied"], results["last"]["remaining"]) == (3, 17, 10)


def test_bursts_of_one_subject_share_a_redis(redis_url: str) -> None:
    first = summary("100/day", "--requests", "80", "--store", redis_url)
    second = summary("100/day", "--requests", "80", "--store", redis_url)
    other = summary("100/day", "--requests", "80", "--store", redis_url, "--subject", "other")
    assert [results["allowed"] for results in (first, second, other)] == [80, 20, 80]


def test_in_a_pipe_the_final_chart_is_plain_text() -> None:
    done = run_installed_cli("burst", "100/day", "--requests", "150", "--rate", "max")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "█ allowed 100     ▒ of them delayed   0     ░ denied  50" in done.stdout
    assert "100/day" in done.stdout
    assert "150 requests at full speed" in done.stdout
    assert "0 of 100" in done.stdout
    sentence = " ".join(done.stdout.split("\n\n")[-1].split())
    assert sentence.startswith("100 of 150 allowed; the first denial came after ")
    assert "retry in " in sentence


def test_a_terminal_shows_the_chart_and_the_summary() -> None:
    with Terminal("burst", "2/day", "--requests", "3", "--rate", "max") as terminal:
        screen = terminal.read_until("retry in")
        assert "\x1b[" in screen
        assert terminal.status() == 0


def test_ctrl_c_stops_a_burst_and_shows_the_results() -> None:
    with Terminal("burst", "5/day", "--requests", "1000", "--rate", "1/hour") as terminal:
        terminal.read_until("1 of 1,000")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("Stopped after 1 of 1,000 requests: all 1 allowed; 4 of 5 left.")
        assert terminal.status() == 0


def test_an_invalid_limit_is_marked() -> None:
    done = run_cli("burst", "100/minute; 10/sekond")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "Error: limits: expected a unit: second, minute, hour or day, got 'sekond' at character 16",
        "  100/minute; 10/sekond",
        "                 ^^^^^^",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("[red]x=1/day",), "Error: name: must be 1 to 64 letters, digits or -_./ characters, got '[red]x'"),
        (("2000/day", "--algorithm", "sliding_window"), "Error: limit: must be from 0 to 1000, got 2000"),
        (("1/day", "--rate", "fast"), "Error: --rate: must be a rate such as 50/s or 20/minute, or max, got 'fast'"),
        (("1/day", "--cost", "-1"), "Error: --cost: must be from 0 to"),
        (("1/day", "--subject", "x" * 600), "Error: subject: at most 512 bytes, got 600"),
        (("1/day", "--store", "nowhere"), "Error: --store: must start with memory://"),
        (("1/day", "--requests", "0"), "--requests"),
        (("1/day", "--requests", "1000001"), "--requests"),
        (("1/day", "--algorithm", "concurrency"), "--algorithm"),
    ],
)
def test_an_invalid_option_is_named(arguments: tuple[str, ...], message: str) -> None:
    done = run_cli("burst", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_an_unavailable_store_has_an_exit_status_of_its_own(own_redis_server: RedisServer) -> None:
    own_redis_server.kill()
    done = run_cli("burst", "1/day", "--store", own_redis_server.url)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("Error: Redis did not answer: ")


def test_a_store_that_becomes_unavailable_stops_a_burst(own_redis_server: RedisServer) -> None:
    arguments = ("5/day", "--requests", "100000", "--rate", "20/s", "--store", own_redis_server.url)
    with Terminal("burst", *arguments) as terminal:
        terminal.read_until("1 of 100,000")
        own_redis_server.kill()
        terminal.read_until("Error: Redis did not answer: ")
        assert terminal.status() == 3


@pytest.mark.parametrize(
    ("text", "algorithm", "named"),
    [
        ("100/minute", None, {"minute": "sliding_window_counter"}),
        ("100/minute", Algorithm.TOKEN_BUCKET, {"minute": "token_bucket"}),
        ("100 per 2 minutes", Algorithm.LEAKY_BUCKET, {"2-minutes": "leaky_bucket"}),
        (
            " a = 1/day ;fixed:2/day; 3/hour;",
            Algorithm.TOKEN_BUCKET,
            {"a": "token_bucket", "day": "fixed_window", "hour": "token_bucket"},
        ),
        ("5/second", Algorithm.SLIDING_WINDOW, {"second": "sliding_window"}),
    ],
)
def test_an_algorithm_is_for_the_limits_that_name_none(
    text: str, algorithm: Algorithm | None, named: dict[str, str]
) -> None:
    limits = {limit.name: limit.algorithm for limit in parse_limits(text, algorithm)}
    assert limits.items() >= named.items()


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._screen, inside = pty.openpty()
        self.process = subprocess.Popen(
            [INSTALLED_PROGRAM, *arguments], stdin=inside, stdout=inside, stderr=inside, env=ENVIRONMENT
        )
        os.close(inside)
        self._output = ""

    def read_until(self, text: str) -> str:
        """Return all output up to `text`. Fail if the command ends without it."""
        while text not in " ".join(self._output.split()):
            try:
                self._output += os.read(self._screen, 65_536).decode(errors="replace")
            except OSError:  # the command has closed its end
                pytest.fail(f"{text!r} never came:\n{self._output}")
        return self._output

    def status(self) -> int:
        return self.process.wait(SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)
