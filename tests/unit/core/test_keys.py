"""Keys: no two different buckets share one, and all of a tenant's lie in one slot of a cluster."""

from enum import Enum
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from limitforge import Entry, InvalidInput, Limit, SyncLimiter, limit_from_fields
from limitforge.core.keys import Keys, Layer, decode_key, encode_key
from limitforge.core.limits import Scope
from limitforge.stores.memory.store import MemoryStore

KEYS = Keys("lf")
NUMBERS: dict[str, dict[str, Any]] = {
    "token_bucket": {"bucket_capacity": 5, "refill_rate_per_sec": 1},
    "leaky_bucket": {"bucket_capacity": 5, "leak_rate_per_sec": 1},
    "fixed_window": {"limit": 5, "window_seconds": 1},
    "sliding_window": {"limit": 5, "window_seconds": 1},
    "sliding_window_counter": {"limit": 5, "window_seconds": 1},
    "concurrency": {"max_concurrent": 5, "lease_ttl_seconds": 1},
    "quota": {"limit": 5, "period": "day"},
}
WINDOWS: list[dict[str, Any]] = [{"window_seconds": seconds} for seconds in (1, 10, 60, "0.1", "0.001", "1.000001")]
SHAPES: dict[str, list[dict[str, Any]]] = {
    "fixed_window": [window | kind for window in WINDOWS for kind in ({}, {"align": "first_hit"}, {"spread": True})],
    "sliding_window_counter": WINDOWS,
    "quota": [
        *({"period": period} for period in ("day", "week", "month", "year")),
        *({"period": "month", "anchor_day": day} for day in (3, 13, 31)),
        *({"period": "day", "time_zone": zone} for zone in ("Europe/Paris", "Etc/GMT+1", "Etc/GMT-1", "Etc/GMT+11")),
        {"period": "month", "anchor_day": 3, "time_zone": "Europe/Paris"},
        {"period": "year", "anchor_day": 3},
    ],
}
"""What distinguishes two buckets of one algorithm."""


class BucketName(NamedTuple):
    """Everything that names a bucket."""

    scope: Scope
    place: Layer
    tenant: str | bytes
    resource: str | bytes
    subject: str | bytes
    name: str
    algorithm: str
    shape: int = 0
    """Which of the shapes of its algorithm it has."""

    def limit(self) -> Limit:
        fields = {"algorithm": self.algorithm, "name": self.name, "scope": self.scope, **NUMBERS[self.algorithm]}
        return limit_from_fields(fields | self._shape())

    def _shape(self) -> dict[str, Any]:
        shapes = SHAPES.get(self.algorithm, [{}])
        return shapes[self.shape % len(shapes)]

    def key(self) -> str:
        store = MemoryStore()
        entry = Entry(self.limit(), self.resource, self.subject, 1, self.place)
        SyncLimiter(store).check_entries([entry], tenant=self.tenant)
        [key] = store._states
        return key

    def identity(self) -> tuple[object, ...]:
        """What the bucket is, by its scope: what the scope does not want plays no part."""
        tenant, resource, subject = map(as_bytes, (self.tenant, self.resource, self.subject))
        parts: dict[Scope, tuple[bytes, ...]] = {
            Scope.SUBJECT: (tenant, resource, subject),
            Scope.CALLER: (tenant, subject),
            Scope.RESOURCE: (tenant, resource),
            Scope.TENANT: (tenant,),
            Scope.GLOBAL: (),
        }
        shape = tuple(self._shape().items())
        return (self.scope, self.place, self.name, self.algorithm, shape, *parts[self.scope])


def as_bytes(part: str | bytes) -> bytes:
    return part if isinstance(part, bytes) else part.encode()


SPECIAL = st.text(alphabet=":{}%0123456789/-\0\nastpo\u00e9\u2028", max_size=8)
BYTES = st.one_of(
    st.binary(max_size=6), st.lists(st.sampled_from([b"\xff", b"\xc3", b"\xa9", b":", b"1", b"\0"])).map(b"".join)
)
PARTS = st.one_of(SPECIAL, SPECIAL, BYTES, st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
NAMES = st.sampled_from(["a", "b", "1", "a/1", "minute", "0.25-seconds", "a.t", "-"])
BUCKET_NAMES = st.builds(
    BucketName,
    st.sampled_from(Scope),
    st.sampled_from(Layer),
    PARTS,
    PARTS,
    PARTS,
    NAMES,
    st.sampled_from(sorted(NUMBERS)),
    st.integers(0, 17),
)


# -- injective


@given(one=BUCKET_NAMES, two=BUCKET_NAMES, same=st.sets(st.integers(0, 7)))
def test_equal_keys_are_keys_of_the_same_bucket(one: BucketName, two: BucketName, same: set[int]) -> None:
    """The second tuple shares some parts with the first, so that not all pairs differ everywhere."""
    two = BucketName._make(one[at] if at in same else two[at] for at in range(8))
    assert (one.key() == two.key()) == (one.identity() == two.identity())
    assert (encode_key(one.key()) == encode_key(two.key())) == (one.identity() == two.identity())


@given(text=st.text(alphabet=":0123456789{}%a", max_size=12), cuts=st.tuples(*[st.integers(0, 12)] * 4))
def test_the_borders_between_parts_make_a_difference(text: str, cuts: tuple[int, int, int, int]) -> None:
    def split(at: int, then: int) -> BucketName:
        at, then = min(at, then), max(at, then)
        return BucketName(Scope.SUBJECT, Layer.POLICY, text[:at], text[at:then], text[then:], "a", "token_bucket")

    one, two = split(*cuts[:2]), split(*cuts[2:])
    assert (one.key() == two.key()) == (one.identity() == two.identity())


@given(name=BUCKET_NAMES)
@example(BucketName(Scope.SUBJECT, Layer.POLICY, "}:sp:", "3:abc", "1:a:b:t", "minute", "token_bucket"))
def test_a_key_can_be_read_back(name: BucketName) -> None:
    assert read(encode_key(name.key())) == name.identity()


def read(key: bytes) -> tuple[object, ...]:
    """The bucket that a key belongs to; that this can be written at all shows that no two share a key."""
    rest = decode_key(key).removeprefix("lf:{")
    tag, _, rest = rest.partition("}:")
    head, _, rest = rest.partition(":")
    scopes = {"s": Scope.SUBJECT, "c": Scope.CALLER, "r": Scope.RESOURCE, "t": Scope.TENANT, "g": Scope.GLOBAL}
    scope, place = scopes[head[0]], Layer(head[1])
    parts = []
    for _ in range({Scope.SUBJECT: 2, Scope.CALLER: 1, Scope.RESOURCE: 1}.get(scope, 0)):
        size, _, rest = rest.partition(":")
        parts.append(encode_key(rest[: int(size)]))
        rest = rest[int(size) + 1 :]
    if scope is not Scope.GLOBAL:
        tenant = "" if tag == "%-" else tag
        for sign in "/}{%":
            tenant = tenant.replace(f"%{ord(sign):02X}", sign)
        parts.insert(0, encode_key(tenant))
    name, _, kind = rest.rpartition(":")
    letters = {limit_from_fields({"algorithm": each, **NUMBERS[each]}).compiled.letter: each for each in NUMBERS}
    algorithm = letters[kind[0]]
    return (scope, place, name, algorithm, shape_in(algorithm, kind[1:]), *parts)


def shape_in(algorithm: str, text: str) -> tuple[tuple[str, Any], ...]:
    """The fields that a shape is written from, as `SHAPES` has them."""
    for fields in SHAPES.get(algorithm, []):
        given = {"anchor_day": 1, "time_zone": "UTC"} | fields
        if algorithm == "quota":
            written = f"{given['period']}/{given['anchor_day']}/{given['time_zone']}"
        else:
            written = f"{given['window_seconds']}{'s' if 'spread' in given else 'h' if 'align' in given else ''}"
        if text == written:
            return tuple(fields.items())
    assert text == ""
    return ()


@given(part=PARTS)
def test_bytes_are_sent_unchanged(part: str | bytes) -> None:
    name = BucketName(Scope.SUBJECT, Layer.POLICY, "t", part, "s", "a", "token_bucket")
    assert as_bytes(part) in encode_key(name.key())
    assert decode_key(encode_key(name.key())) == name.key()


def test_text_and_its_utf8_bytes_are_the_same_subject(limiter: SyncLimiter) -> None:
    assert limiter.check("r", "é", limits="5/minute").remaining == 4
    assert limiter.check(b"r", "é".encode(), limits="5/minute", tenant=b"default").remaining == 3
    assert limiter.check("r", "é".encode("latin-1"), limits="5/minute").remaining == 4


def test_a_name_from_an_enum_of_strings_is_its_value(limiter: SyncLimiter) -> None:
    class Name(str, Enum):  # noqa: UP042 - whose str() is not its value
        ACME = "acme"

    assert limiter.check("acme", "acme", limits="5/minute", tenant="acme").remaining == 4
    assert limiter.check(Name.ACME, Name.ACME, limits="5/minute", tenant=Name.ACME).remaining == 3


# -- slots


def hash_tag(key: bytes) -> bytes:
    """Redis's rule: what stands between the first `{` and the next `}`, unless that is nothing."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            return key[start + 1 : end]
    return key


@given(tenant=PARTS, other=PARTS, resource=PARTS, subject=PARTS, token=st.binary(min_size=8, max_size=8))
@example("", "%-", "", "", b"01234567")
@example("{}", "", "{x}", "{y}", b"01234567")
@example("%", "%25", "", "", b"01234567")
def test_all_keys_of_a_tenant_lie_in_one_slot_and_global_ones_in_their_own(
    tenant: str | bytes, other: str | bytes, resource: str | bytes, subject: str | bytes, token: bytes
) -> None:
    tenant_key = KEYS.tenant_keys(tenant).tenant_prefix
    buckets = [
        BucketName(scope, place, tenant, resource, subject, "a", "quota").key()
        for scope in Scope
        if scope is not Scope.GLOBAL
        for place in Layer
    ]
    beside = [
        KEYS.overrides_key(tenant_key, decode_key(as_bytes(subject))),
        KEYS.override_index_key(tenant_key),
        KEYS.reservation_key(tenant_key, token),
    ]
    assert len({*buckets, *beside}) == len(buckets) + len(beside)
    [tag] = {hash_tag(encode_key(key)) for key in (*buckets, *beside)}
    shared = {
        hash_tag(encode_key(BucketName(Scope.GLOBAL, place, each, resource, subject, "a", "quota").key()))
        for place in Layer
        for each in (tenant, other)
    }
    assert len(shared) == 1
    assert tag not in shared
    assume(as_bytes(tenant) != as_bytes(other))
    assert hash_tag(encode_key(KEYS.tenant_keys(other).tenant_prefix)) != tag


# -- bounds


@pytest.mark.parametrize("field", ["tenant", "resource", "subject"])
def test_a_part_has_at_most_512_bytes(field: str, limiter: SyncLimiter) -> None:
    def check(part: str | bytes) -> None:
        limiter.check(**{"resource": "r", "subject": "s", "limits": "5/minute", field: part})  # type: ignore[arg-type]

    for fits in ("x" * 512, "é" * 256, b"\xff" * 512):
        check(fits)
    for too_long in ("x" * 513, "é" * 256 + "x", b"\xff" * 513, "x" * 10**6):
        with pytest.raises(InvalidInput) as refused:
            check(too_long)
        assert refused.value.field == field
        assert "512" in refused.value.problem
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize("field", ["tenant", "resource", "subject"])
@pytest.mark.parametrize("part", ["\ud800", "a\udcffb", None, 5, 1.5, ["a"], {}, bytearray(b"a")])
def test_a_part_that_is_neither_unicode_nor_bytes_is_refused(field: str, part: Any, limiter: SyncLimiter) -> None:
    with pytest.raises(InvalidInput) as refused:
        limiter.check(**{"resource": "r", "subject": "s", "limits": "5/minute", field: part})
    assert refused.value.field == field


@pytest.mark.parametrize("prefix", ["", "a{b}", "a b", "é", "x" * 65, "a\n", None, 5, b"lf"])
def test_a_key_prefix_holds_nothing_that_could_end_it(prefix: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        SyncLimiter.connect("memory://", key_prefix=prefix)
    assert refused.value.field == "key_prefix"


@pytest.mark.parametrize("prefix", ["lf", "my-app:prod_1.x", "x" * 64])
def test_every_key_starts_with_the_key_prefix(prefix: str) -> None:
    keys = Keys(prefix)
    assert keys.tenant_keys("acme").tenant_prefix == f"{prefix}:{{acme}}:"
    assert keys.bucket_prefix(Scope.GLOBAL, Layer.OPERATOR, keys.tenant_keys("acme"), "", "r", "s").startswith(
        f"{prefix}:{{"
    )
