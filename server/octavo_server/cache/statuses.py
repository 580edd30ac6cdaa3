"""The protocol's statuses as plain integers: columns of them are arrays of bytes."""

from typing import Final

from octavo_proto.v1 import cache_pb2

STORED: Final = int(cache_pb2.STATUS_STORED)
ALREADY_PRESENT: Final = int(cache_pb2.STATUS_ALREADY_PRESENT)
PENDING: Final = int(cache_pb2.STATUS_PENDING)
RESERVED: Final = int(cache_pb2.STATUS_RESERVED)
QUOTA_EXCEEDED: Final = int(cache_pb2.STATUS_QUOTA_EXCEEDED)
TOO_LARGE: Final = int(cache_pb2.STATUS_TOO_LARGE)
NO_ROOM: Final = int(cache_pb2.STATUS_NO_ROOM)
REJECTED: Final = int(cache_pb2.STATUS_REJECTED)
EXPIRED: Final = int(cache_pb2.STATUS_EXPIRED)
MISSING: Final = int(cache_pb2.STATUS_MISSING)
CORRUPT: Final = int(cache_pb2.STATUS_CORRUPT)
UNAVAILABLE: Final = int(cache_pb2.STATUS_UNAVAILABLE)
GRANTED: Final = int(cache_pb2.STATUS_GRANTED)
DONE: Final = int(cache_pb2.STATUS_DONE)
