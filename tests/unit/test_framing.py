"""The pieces of input that the parser gets."""

from hypothesis import given
from hypothesis import strategies as st

from limitforge.service.http.framing import (
    CHUNK_FRAMING_BYTES,
    HEAD_END,
    MAX_HEAD_BYTES,
    SMALL_PACKET_BYTES,
    InputBuffer,
)

HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def pieces(given: InputBuffer) -> list[bytes]:
    found = []
    while given.packet:
        found.append(given.next_piece())
    return found


def test_a_packet_with_one_request_is_one_piece() -> None:
    given = InputBuffer()
    given.append(HEAD + b"body")
    assert pieces(given) == [HEAD + b"body"]


def test_each_of_many_requests_is_a_piece() -> None:
    given = InputBuffer()
    given.append(HEAD * 3 + HEAD[:5])
    assert pieces(given) == [HEAD, HEAD, HEAD, HEAD[:5]]


def test_a_body_ends_where_it_was_announced() -> None:
    given = InputBuffer()
    given.append(HEAD + HEAD_END * 10 + HEAD + HEAD)
    assert given.next_piece() == HEAD
    given.is_in_body, given.body_left = True, 40
    assert given.next_piece() == HEAD_END * 10
    given.count_body(40)
    given.end_message()
    assert pieces(given) == [HEAD, HEAD]


def test_the_head_behind_a_request_in_a_large_packet_counts_as_its_own() -> None:
    given = InputBuffer()
    given.append(HEAD + b"GET /" + b"x" * SMALL_PACKET_BYTES)
    given.next_piece()
    given.end_message()
    given.next_piece()
    assert given.overhead == 5 + SMALL_PACKET_BYTES


def test_only_what_is_not_body_is_bounded() -> None:
    given = InputBuffer()
    given.append(b"x" * (MAX_HEAD_BYTES + 1_000))
    given.next_piece()
    assert given.is_too_large
    given.count_body(1_000)
    assert not given.is_too_large
    given.overhead += 2 * CHUNK_FRAMING_BYTES
    assert given.is_too_large
    given.chunks = 2
    assert not given.is_too_large


@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b"\r", b"\n", b"\r\n", HEAD_END, HEAD, b"x" * SMALL_PACKET_BYTES])
    )
)
def test_nothing_is_lost_and_nothing_comes_twice(packets: list[bytes]) -> None:
    given, found = InputBuffer(), b""
    for packet in packets:
        given.append(packet)
        if given.packet:  # the rest waits for the next packet
            found += given.next_piece()
    found += b"".join(pieces(given))
    assert found == b"".join(packets)
    assert given.overhead == len(found)
    assert given.size == 2 * min(len(found), MAX_HEAD_BYTES)
