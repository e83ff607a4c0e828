"""API keys and admin tokens: their format, typos, and verification."""

import copy
import hmac
import math
import pickle
import random
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.pretty import pretty_repr

from limitforge.catalog.credentials import (
    ALPHABET,
    CHECKSUM_LENGTH,
    CRC_LENGTH,
    ID_LENGTH,
    MAX_PEPPERS,
    PREFIXES,
    SECRET_LENGTH,
    Credential,
    Peppers,
    fingerprint,
    new_id,
)
from limitforge.catalog.model import Key, SecretHash, Token
from limitforge.errors import InvalidInput, UnknownKey
from tests.catalog.replicas import old_credential

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
FIRST, SECOND = "1:the first pepper of the tests", "2:the second pepper of the tests"


PEPPERS = Peppers.parse(FIRST)
OLD_ID = "0123456789abcdef"
OLD_KEY = f"lf_live_{OLD_ID}6huWet3Wzdtfb0Pv0ZODq2fJElrK4MvkT9"
OLD_HASH = "dba68163f38cee7e376b5d737837e9148fa7a5c89da24100290a39cc16e2e7b0"


def new_credential(prefix: str = "lf_live_", peppers: Peppers = PEPPERS) -> Credential:
    return Credential.generate(prefix, new_id("key").removeprefix("key_"), peppers)


def key_with(*stored: SecretHash, **fields: Any) -> Key:
    return Key(id="key_x", tenant_id="ten_x", name="web", secrets=stored, **fields)


# -- shape


@pytest.mark.parametrize(("kind", "prefix"), [("live", "lf_live_"), ("test", "lf_test_"), ("admin", "lf_admin_")])
def test_a_key_is_a_prefix_an_id_a_secret_and_a_checksum(kind: str, prefix: str) -> None:
    credential = new_credential(PREFIXES[kind])
    assert credential.text.startswith(prefix + credential.id)
    rest = credential.text.removeprefix(prefix)
    assert len(rest) == ID_LENGTH + SECRET_LENGTH + CHECKSUM_LENGTH
    assert set(rest) <= set(ALPHABET)
    assert credential.has_keyed_checksum
    assert Credential.parse(credential.text, PEPPERS) == credential


def test_a_secret_has_160_bits_or_more() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 62
    assert SECRET_LENGTH * math.log2(len(ALPHABET)) >= 160
    assert ID_LENGTH * math.log2(len(ALPHABET)) >= 90


def test_secrets_come_from_the_systems_own_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each secret is one draw from as many numbers as there are secrets."""
    drawn: list[int] = []

    def randbelow(bound: int) -> int:
        drawn.append(bound)
        return len(drawn) - 1

    monkeypatch.setattr(secrets, "randbelow", randbelow)
    texts = {Credential.generate("lf_live_", "0" * ID_LENGTH, PEPPERS).text for _ in range(200)}
    assert drawn == 200 * [len(ALPHABET) ** SECRET_LENGTH]
    assert len(texts) == 200


def test_no_two_are_alike() -> None:
    texts = {new_credential().text for _ in range(2_500)}
    assert len(texts) == 2_500
    parts = [text.removeprefix("lf_live_")[ID_LENGTH:-CHECKSUM_LENGTH] for text in texts]
    assert all({part[at] for part in parts} == set(ALPHABET) for at in range(SECRET_LENGTH))


# -- typos


def is_refused(text: Any) -> bool:
    try:
        Credential.parse(text, PEPPERS)
    except UnknownKey:
        return True
    return False


@pytest.mark.parametrize("prefix", PREFIXES.values())
def test_a_wrong_character_anywhere_is_refused(prefix: str) -> None:
    text = new_credential(prefix).text
    for at, right in enumerate(text):
        for wrong in (*ALPHABET, "_", "-", " ", "é", "\0"):
            if wrong != right:
                assert is_refused(text[:at] + wrong + text[at + 1 :]), (text, at, wrong)


def test_swapped_neighbours_are_refused() -> None:
    for _ in range(50):
        text = new_credential().text
        for at in range(len(text) - 1):
            if text[at] != text[at + 1]:
                assert is_refused(text[:at] + text[at + 1] + text[at] + text[at + 2 :]), (text, at)


def test_a_missing_or_an_extra_character_is_refused() -> None:
    text = new_credential().text
    for at in range(len(text) + 1):
        assert is_refused(text[:at] + text[at + 1 :] if at < len(text) else "")
        assert all(is_refused(text[:at] + extra + text[at:]) for extra in ("a", "0", " ", "\n"))


@pytest.mark.parametrize(
    "text",
    ["", "lf_live_", "lf_admin_", "x" * 10_000_000, "\ud800" * 58, "sk_live_" + "0" * 50, None, 5, b"lf_live_", []],
)
def test_text_that_is_not_a_key_is_refused(text: Any) -> None:
    assert is_refused(text)


@pytest.mark.parametrize("prefix", PREFIXES.values())
def test_a_typo_in_an_old_key_is_refused_too(prefix: str) -> None:
    text = old_credential(prefix, "0" * ID_LENGTH).text
    assert not is_refused(text)
    for at, right in enumerate(text):
        for wrong in (*ALPHABET, "_", "é"):
            if wrong != right:
                assert is_refused(text[:at] + wrong + text[at + 1 :]), (text, at, wrong)


def test_a_test_key_can_not_be_passed_off_as_a_live_one() -> None:
    text = new_credential("lf_test_").text
    assert is_refused(text.replace("lf_test_", "lf_live_"))
    assert is_refused(text.replace("lf_test_", "lf_admin_"))


# -- the keyed checksum


def test_the_checksum_is_64_bits_of_an_hmac_under_a_key_of_its_own() -> None:
    """It is computed here from the definition, on which keys of customers depend."""
    text = new_credential().text
    body, checksum = text[:-CHECKSUM_LENGTH], text[-CHECKSUM_LENGTH:]
    key = hmac.new(FIRST[2:].encode(), b"limitforge key checksum", "sha256").digest()
    number = 0
    for digit in checksum:
        number = number * 62 + ALPHABET.index(digit)
    assert number == int.from_bytes(hmac.new(key, body.encode(), "sha256").digest()[:8])
    assert 62**CHECKSUM_LENGTH >= 2**64


def test_a_key_is_recognised_without_a_look_up_under_any_pepper_that_is_known() -> None:
    both = Peppers.parse(f"{FIRST},{SECOND}")
    old, new = new_credential(), new_credential(peppers=both)
    assert Credential.parse(old.text, both) == old
    assert Credential.parse(new.text, both) == Credential.parse(new.text, Peppers.parse(SECOND)) == new
    for text, peppers in ((new.text, FIRST), (old.text, SECOND), (old.text, "1:quite another pepper")):
        with pytest.raises(UnknownKey):
            Credential.parse(text, Peppers.parse(peppers))


def test_no_forgery_without_the_pepper_is_taken_for_an_issued_key() -> None:
    chance = random.Random(1)
    for _ in range(5_000):
        prefix = chance.choice(list(PREFIXES.values()))
        body = prefix + "".join(chance.choices(ALPHABET, k=ID_LENGTH + SECRET_LENGTH))
        crc = old_credential(prefix, "0" * ID_LENGTH).text[-CRC_LENGTH:]
        stolen = new_credential(prefix).text[-CHECKSUM_LENGTH:]
        guessed = "".join(chance.choices(ALPHABET, k=CHECKSUM_LENGTH))
        for checksum in (guessed, stolen, crc.rjust(CHECKSUM_LENGTH, "0"), crc.ljust(CHECKSUM_LENGTH, "0")):
            assert is_refused(body + checksum)
        assert not Credential.parse(old_credential(prefix, "0" * ID_LENGTH).text, PEPPERS).has_keyed_checksum


def test_a_keyed_checksum_can_not_be_cut_to_that_of_an_old_key() -> None:
    for _ in range(1_000):
        text = new_credential().text
        body, checksum = text[:-CHECKSUM_LENGTH], text[-CHECKSUM_LENGTH:]
        assert is_refused(body + checksum[:CRC_LENGTH])
        assert is_refused(body + checksum[-CRC_LENGTH:])


def test_checksums_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = new_credential().text
    wrong = text[:-1] + ("a" if text[-1] != "a" else "b")
    compared: list[Any] = []
    compare = hmac.compare_digest

    def watched(*texts: str) -> bool:
        compared.append(texts)
        return compare(*texts)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    assert is_refused(wrong)
    assert compared == [(text[-CHECKSUM_LENGTH:], wrong[-CHECKSUM_LENGTH:])]


def test_a_key_of_the_first_release_is_still_good() -> None:
    """The code of that release generated this key, without a keyed checksum."""
    peppers = Peppers.parse(f"{FIRST},{SECOND}")
    credential = Credential.parse(OLD_KEY, peppers)
    assert (credential.prefix, credential.id, credential.has_keyed_checksum) == ("lf_live_", OLD_ID, False)
    key = key_with(SecretHash(OLD_HASH, 1))
    assert peppers.authenticate(credential, key, NOW) is key


# -- what leaves a credential


def test_the_text_of_a_credential_is_shown_only_on_request() -> None:
    credential = new_credential()
    secret = credential.text.removeprefix("lf_live_" + credential.id)
    for shown in (repr(credential), str(credential), f"{credential}", repr([credential]), pretty_repr(credential)):
        assert credential.id in shown
        assert secret not in shown
    assert secret not in repr(UnknownKey(credential))


def test_a_pepper_is_not_shown() -> None:
    peppers = Peppers.parse(f"{FIRST},{SECOND}")
    for shown in (repr(peppers), str(peppers), pretty_repr(peppers), repr({"peppers": peppers})):
        assert "pepper of the tests" not in shown
        assert "[1, 2]" in shown


def test_a_fingerprint_does_not_contain_the_text() -> None:
    text = new_credential().text
    assert text.encode() not in fingerprint(text)
    assert fingerprint(text) == fingerprint(text) != fingerprint(text + "x")
    assert fingerprint("\udcff") != fingerprint("\udcfe")


# -- verification


def test_what_is_kept_is_an_hmac_of_the_whole_text_under_the_newest_pepper() -> None:
    credential = new_credential()
    kept = Peppers.parse(f"{SECOND},{FIRST}").hash_credential(credential)
    assert kept.pepper == 2
    assert kept.hash == hmac.new(SECOND[2:].encode(), credential.text.encode(), "sha256").hexdigest()
    assert kept.expires_at is None


def test_a_key_is_recognised_by_its_secret_and_by_no_other() -> None:
    peppers = Peppers.parse(FIRST)
    credential, other = new_credential(), new_credential()
    key = key_with(peppers.hash_credential(credential))
    assert peppers.authenticate(credential, key, NOW) is key
    with pytest.raises(UnknownKey):
        peppers.authenticate(other, key, NOW)
    with pytest.raises(UnknownKey):
        peppers.authenticate(credential, None, NOW)
    with pytest.raises(UnknownKey):
        peppers.authenticate(credential, key_with(), NOW)


def test_a_new_pepper_makes_and_the_old_one_still_recognises() -> None:
    before, after, later = Peppers.parse(FIRST), Peppers.parse(f"{FIRST},{SECOND}"), Peppers.parse(SECOND)
    old, new = new_credential(), new_credential()
    of_old, of_new = key_with(before.hash_credential(old)), key_with(after.hash_credential(new))
    assert [key.secrets[0].pepper for key in (of_old, of_new)] == [1, 2]
    assert after.authenticate(old, of_old, NOW) is of_old
    assert after.authenticate(new, of_new, NOW) is of_new
    assert later.authenticate(new, of_new, NOW) is of_new
    with pytest.raises(UnknownKey):
        later.authenticate(old, of_old, NOW)
    with pytest.raises(UnknownKey):
        before.authenticate(new, of_new, NOW)


def test_another_pepper_of_the_same_version_recognises_nothing() -> None:
    credential = new_credential()
    key = key_with(Peppers.parse(FIRST).hash_credential(credential))
    with pytest.raises(UnknownKey):
        Peppers.parse("1:quite another pepper").authenticate(credential, key, NOW)


def test_hashes_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    peppers = Peppers.parse(FIRST)
    credential, other = new_credential(), new_credential()
    key = key_with(peppers.hash_credential(other), peppers.hash_credential(credential))
    compared: list[tuple[Any, Any]] = []
    compare = hmac.compare_digest

    def watched(one: Any, another: Any) -> bool:
        compared.append((one, another))
        return compare(one, another)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    peppers.authenticate(credential, key, NOW)
    assert [kept for _, kept in compared] == [secret.hash for secret in key.secrets]


@pytest.mark.parametrize("holder", ["key", "secret"])
def test_a_key_or_secret_is_good_until_exactly_its_end(holder: str) -> None:
    peppers = Peppers.parse(FIRST)
    credential = new_credential()
    ends = NOW + timedelta(hours=1)
    if holder == "key":
        key = key_with(peppers.hash_credential(credential), expires_at=ends)
    else:
        key = key_with(peppers.hash_credential(credential, ends))
    for now in (NOW, ends - MICROSECOND):
        assert peppers.authenticate(credential, key, now) is key
    for now in (ends, ends + MICROSECOND, ends + timedelta(days=1)):
        with pytest.raises(UnknownKey):
            peppers.authenticate(credential, key, now)


def test_a_disabled_key_is_recognised_and_it_is_for_others_to_refuse_it() -> None:
    """A disabled key gets a 403 that says so; a guess gets a 401 without a reason."""
    peppers = Peppers.parse(FIRST)
    credential = new_credential()
    key = key_with(peppers.hash_credential(credential), disabled=True)
    assert peppers.authenticate(credential, key, NOW) is key


def test_wrong_expired_and_deleted_keys_get_the_same_error() -> None:
    peppers = Peppers.parse(FIRST)
    credential, other = new_credential(), new_credential()
    errors = set()
    for key in (
        None,
        key_with(),
        key_with(peppers.hash_credential(other)),
        key_with(peppers.hash_credential(credential), expires_at=NOW),
    ):
        with pytest.raises(UnknownKey) as refused:
            peppers.authenticate(credential, key, NOW)
        errors.add(str(refused.value))
    assert len(errors) == 1


def test_a_token_is_recognised_as_a_key_is() -> None:
    peppers = Peppers.parse(FIRST)
    credential = new_credential("lf_admin_")
    token = Token(id="tok_x", name="ci", secrets=(peppers.hash_credential(credential),), expires_at=NOW)
    assert peppers.authenticate(credential, token, NOW - MICROSECOND) is token
    with pytest.raises(UnknownKey):
        peppers.authenticate(credential, token, NOW)


# -- peppers


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a pepper without a version",
        "1",
        "1:",
        ":a pepper without a version",
        "0:version 0 is not above 0",
        "-1:a version below 0 is not",
        "1:short",
        "one:a version that is not a number",
        "1:the same version twice,1:the same version twice",
        "²:a version that is not ASCII",
        "1.5:a version that is not whole",
        f"{2**31}:a version that no column can hold",
        f"{'9' * 5_000}:a version that is absurd",
        "1:" + "\udcff" * 32,
    ],
    ids=lambda text: text[:24],
)
def test_invalid_peppers_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Peppers.parse(text)
    assert refused.value.field == "peppers"
    assert "pepper" not in refused.value.problem.replace("peppers", "")  # the error does not quote them


def test_there_are_so_many_peppers_at_most() -> None:
    texts = [f"{version}:a pepper of the tests" for version in range(1, MAX_PEPPERS + 2)]
    assert Peppers.parse(",".join(texts[:-1])).newest_version == MAX_PEPPERS
    with pytest.raises(InvalidInput) as refused:
        Peppers.parse(",".join(texts))
    assert refused.value.field == "peppers"


def test_a_pepper_may_hold_colons() -> None:
    credential = new_credential()
    kept = Peppers.parse("3:with:colons:in:it, 2:another pepper of it").hash_credential(credential)
    assert kept.pepper == 3
    assert kept.hash == hmac.new(b"with:colons:in:it", credential.text.encode(), "sha256").hexdigest()


def test_a_generated_pepper_can_be_used() -> None:
    first, second = Peppers.generate_text(), Peppers.generate_text()
    assert first != second
    assert Peppers.parse(first).newest_version == 1
    assert (len(first) - 2) * math.log2(62) > 250


def test_a_credential_survives_a_copy() -> None:
    credential = new_credential()
    assert copy.deepcopy(credential) == credential
    assert pickle.loads(pickle.dumps(credential)) == credential  # noqa: S301
