"""How much of a request is anything but chunk hashes, before protobuf builds objects of it.

protobuf makes an object for every element of a repeated field, some 20 ns and up to 70 bytes for
2 bytes of message, and holds Python's lock meanwhile. Only the chunk hashes, one packed field, have
a reason to be large, so the rest is measured first, by walking over the fields' sizes.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

from kvserve.errors import InvalidRequest, MalformedMessage
from kvserve.format.frames import read_varint
from kvserve.format.messages import parse
from kvserve.v1 import kvserve_pb2 as pb

M = TypeVar("M", bound=Message)

BESIDE_HASHES_BYTES_MAX: Final = 128 << 10
"""4,096 different layers, their order and the names are some 100 KiB."""
_HASHES_PATHS: Final = {
    pb.LookupRequest: (1, 5),
    pb.VerifyRequest: (1, 5),
    pb.DeleteRequest: (1, 5),
    pb.PinRequest: (1, 5),
    pb.FetchRequest: (1, 5),
    pb.StoreRequest: (1, 1, 5),
}
"""Field numbers that lead to the chunk hashes."""


def parse_bounded(kind: type[M], raw: bytes) -> M:
    """Raises `MalformedMessage`, or `InvalidRequest` if too much of it is not chunk hashes."""
    at_most = BESIDE_HASHES_BYTES_MAX
    if len(raw) > at_most:
        path = _HASHES_PATHS.get(kind)
        if path is None or size_beside(raw, path, at_most) > at_most:
            raise InvalidRequest(
                f"a {kind.__name__} has more than {at_most} bytes beside its chunk_hashes: too "
                "many layout.layers, layer_order or layers, or fields unknown to this version"
            )
    return parse(kind, raw)


def size_beside(message: bytes, field_path: Sequence[int], at_most: int) -> int:
    """Bytes of `message` that are not the content of the field at `field_path`, tags included.

    Stops counting above `at_most`, so the walk is as short as that. Of a field on the path that is
    there twice each counts as on the path.

    Raises:
        MalformedMessage: the message ends inside a field.
    """
    view = memoryview(message)
    beside = 0
    # Spans to walk: start, stop, and how many fields of the path lead to them.
    spans = [(0, len(view), 0)]
    while spans and beside <= at_most:
        at, stop, depth = spans.pop()
        while at < stop and beside <= at_most:
            start = at
            tag, at = read_varint(view, at)
            content, at = _content(view, at, tag & 7)
            if at > stop:
                raise MalformedMessage(f"the message ends inside field {tag >> 3}")
            if tag & 7 != 2 or tag >> 3 != field_path[depth]:
                content = at
            elif depth + 1 < len(field_path):
                spans.append((content, at, depth + 1))
            beside += content - start
    return beside


def _content(view: memoryview, at: int, wire_type: int) -> tuple[int, int]:
    """Where the content of a field starts and ends whose tag ends at `at`."""
    if wire_type == 0:
        return at, read_varint(view, at)[1]
    if wire_type == 2:
        size, at = read_varint(view, at)
        return at, at + size
    if wire_type in (1, 5):
        return at, at + (8 if wire_type == 1 else 4)
    raise MalformedMessage(f"a field has wire type {wire_type}")
