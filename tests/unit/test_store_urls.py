"""An invalid URL is refused when a limiter is created, not by the first check."""

import subprocess
import sys

import pytest

from limitforge import InvalidInput, Limiter, SyncLimiter


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        "http://localhost",
        "redis://localhost:notaport",
        "redis://localhost:99999",
        "redis://[::1",
        "redis://localhost/abc",
        "redis://localhost/0?foo=1",
        "redis://localhost/0?max_connections=many",
        "memory://?size=5",
        42,
        None,
    ],
)
@pytest.mark.parametrize("kind", [Limiter, SyncLimiter])
def test_a_wrong_url_is_refused_by_name(kind: type[Limiter], url: str) -> None:
    with pytest.raises(InvalidInput, match=r"^url: "):
        kind.connect(url)


@pytest.mark.parametrize("prefix", ["", "a b", "{x}", "ü", "x" * 65, None])
def test_a_wrong_prefix_is_refused_by_name(prefix: str) -> None:
    with pytest.raises(InvalidInput, match=r"^key_prefix: "):
        SyncLimiter.connect("memory://", key_prefix=prefix)


@pytest.mark.parametrize(
    "url",
    ["redis://user:secret@localhost/abc", "redis://:top/secret@localhost:6379/0", "redis://:sec#ret@localhost:1/0"],
)
def test_no_part_of_a_password_leaks(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        SyncLimiter.connect(url)
    assert not any(piece in str(refused.value) for piece in ("secret", "'sec", "top"))


@pytest.mark.parametrize("max_keys", ["0", "many", "-1", ""])
def test_a_wrong_bound_of_the_memory_store_is_refused_by_name(max_keys: str) -> None:
    with pytest.raises(InvalidInput, match=r"^max_keys: "):
        SyncLimiter.connect(f"memory://?max_keys={max_keys}")


async def test_a_memory_store_may_be_bounded_by_its_url() -> None:
    limiter = Limiter.connect("memory://?max_keys=5")
    for number in range(8):
        await limiter.check("r", str(number), limits="5/minute")
    assert limiter._store.evictions == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["Limiter", "SyncLimiter"])
def test_without_redis_py_the_error_says_what_to_install(kind: str) -> None:
    program = (
        f"import sys; sys.modules['redis'] = None; from limitforge import {kind}, InvalidInput\n"
        f"try: {kind}.connect('redis://localhost')\n"
        "except InvalidInput as refused: print(refused)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "pip install 'limitforge[redis]'" in output
