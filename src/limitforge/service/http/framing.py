"""The unparsed input of a connection, cut into pieces for the parser, and the bounds of the current message.

Each piece contains the end of at most one message, so the connection can stop between two messages. There is one
exception: if a packet ends within a blank line (CR LF CR), the next piece starts with the LF that ends this message,
and may contain the end of the next one.
"""

MAX_HEAD_BYTES = 32_768  # bytes of a message besides its body: request line, header fields, chunk extensions, trailers
MAX_FIELDS = 100  # in head and trailers together
MAX_CHUNKS = 2_048  # in a body; each takes a call of the parser
CHUNK_FRAMING_BYTES = 16  # bytes that each chunk may have besides its data: its size and two line ends
SMALL_PACKET_BYTES = 8_192
CHUNKED = -1
HEAD_END = b"\r\n\r\n"


class InputBuffer:
    """The input of one connection."""

    __slots__ = ("_offset", "body_left", "chunks", "fields", "is_in_body", "overhead", "packet")

    def __init__(self) -> None:
        self.packet = b""
        """The last packet, or what is unparsed of all packets; empty if everything is parsed."""
        self._offset = 0
        self.is_in_body = False
        self.body_left = 0
        """Bytes of the body still to come if the request has a Content-Length; `CHUNKED` for a chunked body."""
        self.overhead = 0
        """Bytes of the current message that are not its body."""
        self.chunks = self.fields = 0

    def append(self, data: bytes) -> None:
        self.packet, self._offset = self.packet[self._offset :] + data, 0

    def next_piece(self) -> bytes:
        """Remove and return the next piece: the rest of a body of known length, else everything up to a blank line."""
        packet, start = self.packet, self._offset
        end = len(packet)
        if self.is_in_body and self.body_left > 0:
            end = min(start + self.body_left, end)
        elif start or end > SMALL_PACKET_BYTES or packet.count(HEAD_END) > 1:
            found = packet.find(HEAD_END, start)
            end = end if found < 0 else found + len(HEAD_END)
        self.packet, self._offset = (packet, end) if end < len(packet) else (b"", 0)
        self.overhead += end - start
        return packet[start:end]

    def compact(self) -> None:
        """Free the parsed part of the packet, because the rest may wait for long."""
        self.packet, self._offset = self.packet[self._offset :], 0

    def count_body(self, size: int) -> None:
        """Count so many bytes of the last piece as body instead of overhead."""
        self.overhead -= size
        self.body_left -= size

    def end_message(self) -> None:
        self.is_in_body = False
        self.overhead = self.chunks = self.body_left = 0

    def clear(self) -> None:
        self.packet, self._offset = b"", 0
        self.overhead = 0

    @property
    def is_too_large(self) -> bool:
        return self.overhead > MAX_HEAD_BYTES + CHUNK_FRAMING_BYTES * self.chunks

    @property
    def size(self) -> int:
        """Bytes in memory: the unparsed packet, and the header fields of the current message, which take twice their
        size once parsed.
        """
        return len(self.packet) + 2 * min(self.overhead, MAX_HEAD_BYTES)
