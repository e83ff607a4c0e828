"""redis-py with a minimal script: the lower bound for one call per check.

It keeps one number per limit (GCRA) and returns the wait. It supports no plan changes, overrides or remaining.
"""

from redis.asyncio import Redis

from bench.library.contestants import CheckFunction, Contestant, OpenLimiter, Sizes, unique_prefix
from bench.ours import RESOURCE, TENANT

_DAY_US = 86_400_000_000

# KEYS: for each limit, when it will be empty again. ARGV: for each limit, the microseconds of one hit; then the length
# of a day. Returns the wait in microseconds, 0 if admitted. Takes from all limits or from none.
_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local day = tonumber(ARGV[#ARGV])
local kept = redis.call('MGET', unpack(KEYS))
for at = 1, #KEYS do
  local empty = kept[at] and tonumber(kept[at]) or now
  kept[at] = (empty > now and empty or now) + ARGV[at]
  if kept[at] - now > day then
    return kept[at] - now - day
  end
end
for at = 1, #KEYS do
  redis.call('SET', KEYS[at], string.format('%.0f', kept[at]), 'PX', math.ceil((kept[at] - now) / 1000))
end
return 0
"""


def contestant() -> Contestant:
    return Contestant("redis-py, one EVALSHA (GCRA)", _open)


async def _open(url: str, sizes: Sizes) -> OpenLimiter:
    redis = Redis.from_url(url)
    sha: str = await redis.script_load(_SCRIPT)
    mine = unique_prefix()
    return OpenLimiter(_make_check(redis, sha, mine, sizes), _make_check(redis, sha, mine, sizes[:1]), redis.aclose)


def _make_check(redis: Redis, sha: str, mine: str, sizes: Sizes) -> CheckFunction:
    evalsha = redis.evalsha
    names = [f"{mine}:{at}:{TENANT}:{RESOURCE}:" for at in range(len(sizes))]
    args = [*(str(_DAY_US // size) for size in sizes), str(_DAY_US)]

    async def check_subject(subject: str) -> bool:
        wait: int = await evalsha(sha, len(names), *[name + subject for name in names], *args)
        return wait == 0

    return check_subject
