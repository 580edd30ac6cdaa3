"""Bounds that are part of the protocol. A node may allow less, and says so in ``OpenSession``."""

from typing import Final

KEY_BYTES: Final = 16
"""A page key, a fingerprint, a session id and a broker ticket are all this long."""

NAMESPACE_KEY_BYTES: Final = 32

UNITS_MAX: Final = 64
"""Units of a page: a set of them is one 64-bit mask."""

PAGE_TOKENS_STEP: Final = 16
PAGE_TOKENS_MAX: Final = 256

CHAIN_PAGES_MAX: Final = 65_536
"""A 1M-token prompt at 16 tokens a page; its key column is 1 MiB."""

MESSAGE_BYTES_MAX: Final = 16 << 20
"""Largest gRPC message. Inline data is cut into pieces well below it."""

INLINE_PIECE_BYTES: Final = 1 << 20
"""Inline data travels in pieces of this size; measured fastest between 512 KiB and 2 MiB."""

BULK_STREAMS_MAX: Final = 8
"""Bulk streams of one session, and tickets for more that it has not used."""

SEGMENTS_MAX: Final = 64
"""Segments of an arena: a worker gets a descriptor for each, and a message carries up to 253."""

NAMESPACES_PER_SESSION_MAX: Final = 64
LAYOUTS_PER_SESSION_MAX: Final = 16
VARIANTS_MAX: Final = 64

NAME_BYTES_MAX: Final = 256
"""Names of namespaces and layouts, and each text field of a layout except ``rope``."""

TEXT_BYTES_MAX: Final = 4096
"""The longest text field of a layout."""

TTL_S_MAX: Final = 366 * 86_400
"""The longest time to live of a page; a longer one is most likely a mistake of units."""

PIN_S_MAX: Final = 86_400
"""The longest pin: whoever needs it longer asks again, so none outlives its reason for long."""

PAUSE_S_MAX: Final = 30 * 86_400
"""The longest pause of a conversation that a hint may tell."""

CONVERSATION_BYTES_MAX: Final = 256
"""A conversation's name, in UTF-8."""
