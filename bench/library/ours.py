"""limitforge as a contestant: one check with any number of limits, and every field of the decision is read."""

from bench.harness import OURS
from bench.library.contestants import CheckFunction, Contestant, OpenLimiter, Sizes, unique_prefix
from bench.ours import RESOURCE, TENANT
from limitforge import Limiter, Limits, StoreOptions

_KINDS = ("burst=token", "daily=fixed", "recent=counter")


def contestant(name: str = OURS, *, denial_cache_ms: int = 0) -> Contestant:
    """Use a long deadline and no fallback: a busy machine must not cause decisions without Redis."""
    options = StoreOptions(failure="raise", deadline_ms=2_000, denial_cache_ms=denial_cache_ms)

    async def open_(url: str, sizes: Sizes) -> OpenLimiter:
        limiter = Limiter.connect(url, key_prefix=unique_prefix(), options=options)
        each = [f"{kind}:{size}/day" for kind, size in zip(_KINDS, sizes, strict=False)]
        return OpenLimiter(
            _make_check(limiter, Limits.parse("; ".join(each))),
            _make_check(limiter, Limits.parse(each[0])),
            limiter.close,
        )

    return Contestant(name, open_, full_decision=True)


def _make_check(limiter: Limiter, limits: Limits) -> CheckFunction:
    check = limiter.check

    async def check_subject(subject: str) -> bool:
        d = await check(RESOURCE, subject, limits=limits, tenant=TENANT)
        _ = (d.limit, d.remaining, d.reset_after_ms, d.retry_after_ms, d.limits)
        return d.allowed

    return check_subject
