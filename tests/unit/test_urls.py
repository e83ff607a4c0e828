"""A URL that can't be used is refused when a limiter is made, not by the first check."""

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


def test_a_wrong_password_in_a_url_is_not_told() -> None:
    with pytest.raises(InvalidInput) as refused:
        SyncLimiter.connect("redis://user:secret@localhost/abc")
    assert "secret" not in str(refused.value)
