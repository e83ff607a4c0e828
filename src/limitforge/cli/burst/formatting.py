"""Format times, counts and the summary of a burst."""

from limitforge.cli.burst.results import BurstResults


def format_wait(ms: int | None) -> str:
    """Format a time to wait, rounded up, so that waiting for the shown time is enough."""
    if ms is None:
        return "never"
    if ms < 1_000:
        return f"{ms} ms"
    if ms < 10_000:
        return f"{-(-ms // 100) / 10:.1f} s"
    seconds = -(-ms // 1_000)
    if seconds < 100:
        return f"{seconds} s"
    if seconds < 3_600:
        return f"{seconds // 60} m {seconds % 60:02} s"
    minutes = -(-seconds // 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} m"
    hours = -(-minutes // 60)
    return f"{hours // 24} d {hours % 24:02} h"


def format_elapsed(seconds: float) -> str:
    """Format a time that has passed, rounded to the nearest."""
    if 0 < seconds < 0.0095:
        return f"{seconds * 1_000:.2g} ms"
    if seconds < 0.9995:
        return f"{seconds * 1_000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return format_wait(round(seconds) * 1_000)


def format_count(count: int) -> str:
    """Format a count in full, or in short form if it has eight digits or more."""
    return f"{count:,}" if count < 10_000_000 else format_short_count(count)


def format_short_count(count: int) -> str:
    """Format a count in about four characters, rounded down."""
    for power, unit in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k")):
        size = 1_000**power
        if count >= size:
            return f"{count * 10 // size / 10:.1f}{unit}" if count < 10 * size else f"{count // size}{unit}"
    return str(count)


def summary_sentence(results: BurstResults, requests: int) -> str:
    """Summarise the burst in one sentence."""
    sent, last = results.sent, results.last_decision
    if last is None:
        return "Stopped before the first request."
    allowed = f"{results.allowed:,}" if results.allowed else "none"
    summary = f"all {sent:,} allowed" if results.allowed == sent else f"{allowed} of {sent:,} allowed"
    if results.delayed:
        summary += f", {results.delayed:,} of them delayed by up to {format_wait(results.longest_delay_ms)}"
    if results.first_denial_s is not None and results.allowed:
        summary += f"; the first denial came after {format_elapsed(results.first_denial_s)}"
    if not last.allowed:
        never = last.retry_after_ms is None
        summary += "; waiting does not help" if never else f"; retry in {format_wait(last.retry_after_ms)}"
    elif not results.denied and last.limit is not None:
        summary += f"; {format_count(last.remaining or 0)} of {format_count(last.limit)} left"
    if sent < requests:
        return f"Stopped after {sent:,} of {requests:,} requests: {summary}."
    return f"{summary[0].upper()}{summary[1:]}."
