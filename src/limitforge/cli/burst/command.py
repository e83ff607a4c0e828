"""The command `limitforge burst`."""

import re
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from limitforge.cli.burst.chart import ASCII, UNICODE, ChartSpec, render_chart
from limitforge.cli.burst.results import BurstResults, Timeline
from limitforge.cli.burst.schedule import RequestRate, send_times
from limitforge.cli.store_option import STORE_HELP, describe_store, open_limiter
from limitforge.core.algorithms.level import LevelAlgorithm
from limitforge.core.exact import US_PER_SECOND, validate_cost
from limitforge.core.limits import LeakyBucket
from limitforge.core.plan import Limits

TENANT, RESOURCE = "burst", "burst"
MIN_SLICE_US = 100.0


class Algorithm(StrEnum):
    """The algorithms that a limit in text form can name."""

    TOKEN_BUCKET = "token_bucket"  # noqa: S105 - not a password
    LEAKY_BUCKET = "leaky_bucket"
    FIXED_WINDOW = "fixed_window"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_COUNTER = "sliding_window_counter"


_ALGORITHM_PREFIXES = {
    Algorithm.TOKEN_BUCKET: "token",
    Algorithm.LEAKY_BUCKET: "leaky",
    Algorithm.FIXED_WINDOW: "fixed",
    Algorithm.SLIDING_WINDOW: "sliding",
    Algorithm.SLIDING_WINDOW_COUNTER: "counter",
}
_LIMIT_WITHOUT_PREFIX = re.compile(r"(?P<before>(?:^|;)\s*(?:[^=;]*=\s*)?)(?=[0-9])")


def burst(
    limits: Annotated[str, typer.Argument(metavar="LIMITS", help='The limits, such as "100/minute; 10/second".')],
    requests: Annotated[int, typer.Option(metavar="N", min=1, max=1_000_000, help="The number of checks.")] = 100,
    rate: Annotated[str, typer.Option(metavar="RATE", help="The rate of checks: 50/s, 20/minute, or max.")] = "20/s",
    algorithm: Annotated[
        Algorithm | None,
        typer.Option(metavar="NAME", help=f"The algorithm of limits that name none: {', '.join(Algorithm)}."),
    ] = None,
    cost: Annotated[int, typer.Option(metavar="N", help="The cost of each check.")] = 1,
    subject: Annotated[
        str, typer.Option(metavar="NAME", help="The subject. On Redis, bursts of one subject share their counters.")
    ] = "demo",
    store: Annotated[str, typer.Option(metavar="URL", help=STORE_HELP)] = "memory",
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON instead of the chart.")] = False,
) -> None:
    """Send checks in real time, and draw which are allowed, delayed and denied.

    LIMITS is one limit or several, separated by semicolons: 100/minute, or
    100 per 15 minutes, with a name as in login=5/minute, or with an algorithm
    as in token:10/second (also leaky:, fixed:, sliding: and counter:).

    Ctrl-C stops the burst and shows the results so far.

    Examples:
      limitforge burst "100/minute" --requests 150 --rate 50/s
      limitforge burst "100/minute; 10/second" --rate 25/s
      limitforge burst "30/minute" --algorithm leaky_bucket --requests 40
      limitforge burst "1000/hour" --requests 5000 --rate max --json
      limitforge burst "100/minute" --store redis://localhost:6379/0

    """
    parsed = parse_limits(limits, algorithm)
    request_rate = RequestRate.parse(rate)
    cost = validate_cost("--cost", cost)
    with open_limiter(store) as limiter:
        console = Console(highlight=False)
        spec = ChartSpec(
            limits_text=" ".join(limits.split()),
            limits=parsed,
            store_text=describe_store(store),
            rate_text=request_rate.text,
            requests=requests,
            expected_us=requests * request_rate.interval_s * US_PER_SECOND + _max_delay_us(parsed, requests * cost),
            glyphs=ASCII if console.options.ascii_only else UNICODE,
        )
        results = BurstResults(Timeline(max(request_rate.interval_s * US_PER_SECOND, MIN_SLICE_US)))
        screen = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None

        def show(now_s: float | None) -> None:
            if screen is not None:
                screen.update(render_chart(replace(spec, width=console.width), results, now_s=now_s), refresh=True)

        with screen or nullcontext():
            with suppress(KeyboardInterrupt):
                for at_s in send_times(request_rate, requests, show):
                    results.add(at_s, limiter.check(RESOURCE, subject, limits=parsed, cost=cost, tenant=TENANT))
            show(None)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(json_summary(requests, results)) + b"\n")
        sys.stdout.buffer.flush()
    elif screen is None:
        console.print(render_chart(replace(spec, width=console.width), results, now_s=None))


def parse_limits(text: str, algorithm: Algorithm | None) -> Limits:
    """Parse limits; `algorithm` applies to those that name none."""
    limits = Limits.parse(text)  # unchanged, so that an error points at the user's own text
    if algorithm is None:
        return limits
    return Limits.parse(_LIMIT_WITHOUT_PREFIX.sub(rf"\g<before>{_ALGORITHM_PREFIXES[algorithm]}:", text))


def json_summary(requests: int, results: BurstResults) -> dict[str, Any]:
    """Return the results for programs. `last` is the last decision."""
    last = results.last_decision
    return {
        "requests": requests,
        "sent": results.sent,
        "allowed": results.allowed,
        "delayed": results.delayed,
        "denied": results.denied,
        "elapsed_ms": round(results.elapsed_s * 1_000),
        "first_denial_after_ms": None if results.first_denial_s is None else round(results.first_denial_s * 1_000),
        "longest_delay_ms": results.longest_delay_ms,
        "last": None
        if last is None
        else {
            "allowed": last.allowed,
            "retry_after_ms": last.retry_after_ms,
            "binding": last.binding,
            "limit": last.limit,
            "remaining": last.remaining,
            "reset_after_ms": last.reset_after_ms,
            "limits": last.limits,
        },
    }


def _max_delay_us(limits: Limits, cost: int) -> float:
    """Return the longest delay that a leaky bucket can cause, so that the chart has space for it from the start."""
    return max(
        (
            min(limit.size or 0, cost) * limit.compiled.per_us / limit.compiled.tokens
            for limit in limits
            if isinstance(limit, LeakyBucket) and isinstance(limit.compiled, LevelAlgorithm)
        ),
        default=0.0,
    )
