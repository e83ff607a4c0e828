"""What arrived on a connection and was not parsed yet, and the bounds of the message that is being parsed.

The parser gets pieces of what arrived, so that at most one message ends in each. (Two may, if a packet ends within the
blank line behind the first.) So the connection can stop between two messages.
"""

MAX_HEAD = 32_768  # bytes of a message that are not its body: request line, header fields, chunk extensions, trailers
MAX_FIELDS = 100  # of head and trailers together
MAX_CHUNKS = 2_048  # of a body; each is a call of the parser
CHUNK_FRAMING = 16  # bytes that each chunk may have besides: its size and two line ends
SMALL_PACKET = 8_192
CHUNKED = -1
HEAD_END = b"\r\n\r\n"


class InputBuffer:
    """The input of one connection."""

    __slots__ = ("_offset", "body_left", "chunks", "fields", "is_in_body", "overhead", "packet")

    def __init__(self) -> None:
        self.packet = b""
        """What arrived last, if some of it is not parsed yet."""
        self._offset = 0
        self.is_in_body = False
        self.body_left = 0
        """How many bytes are left of a body whose length was announced; below 0 for one in chunks."""
        self.overhead = 0
        """Bytes of the current message that are not its body."""
        self.chunks = self.fields = 0

    def append(self, data: bytes) -> None:
        self.packet, self._offset = self.packet[self._offset :] + data, 0

    def next_piece(self) -> bytes:
        """Take what the parser gets next: the rest of a body whose length is known; else all up to a blank line."""
        packet, at = self.packet, self._offset
        end = len(packet)
        if self.is_in_body and self.body_left > 0:
            end = min(at + self.body_left, end)
        elif at or end > SMALL_PACKET or packet.count(HEAD_END) > 1:
            found = packet.find(HEAD_END, at)
            end = end if found < 0 else found + len(HEAD_END)
        self.packet, self._offset = (packet, end) if end < len(packet) else (b"", 0)
        self.overhead += end - at
        return packet[at:end]

    def compact(self) -> None:
        """Let go of what is parsed: the rest may wait for long."""
        self.packet, self._offset = self.packet[self._offset :], 0

    def count_body(self, size: int) -> None:
        """So many bytes of what was fed were body."""
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
        return self.overhead > MAX_HEAD + CHUNK_FRAMING * self.chunks

    @property
    def size(self) -> int:
        """Bytes that it holds: the packet that is not parsed yet, and the fields of the current message, which take
        twice their size.
        """
        return len(self.packet) + 2 * min(self.overhead, MAX_HEAD)
