"""What a client was made with: what it asks of every node, and how it packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.codec import NamespaceProfiles, Profile, RawCodec
from octavo.errors import InvalidRequest
from octavo_proto.layout import KvKind, Layout
from octavo_proto.limits import LAYOUTS_PER_SESSION_MAX, NAMESPACES_PER_SESSION_MAX

TransportChoice = Literal["auto", "shm", "bulk", "grpc"]


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What a client asks of every node it connects to."""

    layouts: tuple[Layout, ...]
    namespaces: tuple[str, ...]
    variants: tuple[int, ...]
    transport: TransportChoice

    def layout(self, name: str | None) -> Layout:
        """The layout of that name; None means the first. Raises InvalidRequest: there is none."""
        return self.layouts[self.layout_index(name)]

    def layout_index(self, name: str | None) -> int:
        """Its place among the layouts, which is its name on the wire."""
        return _index("layout", name, [layout.name for layout in self.layouts])

    def namespace(self, name: str | None) -> str:
        """``name``, checked; None means the first. Raises InvalidRequest: there is none."""
        return self.namespaces[self.namespace_index(name)]

    def namespace_index(self, name: str | None) -> int:
        """Its place among the namespaces, which is its name on the wire."""
        return _index("namespace", name, self.namespaces)


def _index(what: str, name: str | None, names: Sequence[str]) -> int:
    if name is None:
        return 0
    if name not in names:
        raise InvalidRequest(f"{what} {name!r} is none of {', '.join(names)}")
    return names.index(name)


def checked_terms(
    layouts: Sequence[Layout],
    namespaces: Sequence[str],
    variants: Sequence[int],
    transport: TransportChoice,
) -> SessionTerms:
    """What a client asks for, if it may be asked.

    Raises:
        InvalidRequest: names the argument that is wrong.
    """
    if not 0 < len(layouts) <= LAYOUTS_PER_SESSION_MAX:
        raise InvalidRequest(f"{len(layouts)} layouts, allowed: 1 to {LAYOUTS_PER_SESSION_MAX}")
    if not 0 < len(namespaces) <= NAMESPACES_PER_SESSION_MAX:
        raise InvalidRequest(
            f"{len(namespaces)} namespaces, allowed: 1 to {NAMESPACES_PER_SESSION_MAX}"
        )
    if len({layout.name for layout in layouts}) < len(layouts) or len(set(namespaces)) < len(
        namespaces
    ):
        raise InvalidRequest("two layouts or two namespaces have the same name")
    if transport not in ("auto", "shm", "bulk", "grpc"):
        raise InvalidRequest(f"transport is {transport!r}, allowed: auto, shm, bulk, grpc")
    return SessionTerms(tuple(layouts), tuple(namespaces), tuple(variants), transport)


def checked_profiles(
    terms: SessionTerms, profile: str, profiles: Mapping[str, str] | None
) -> NamespaceProfiles:
    """How pages of each namespace are packed: as ``profiles`` says, else as ``profile``.

    Raises:
        InvalidRequest: a profile that does not exist, one for a namespace that the client does
            not have, or one whose pages the client could not read itself.
    """
    for namespace in profiles or {}:
        if namespace not in terms.namespaces:
            raise InvalidRequest(
                f"profiles names namespace {namespace!r}, which is none of "
                f"{', '.join(terms.namespaces)}"
            )
    found = NamespaceProfiles.parsed(profile, profiles)
    for namespace in terms.namespaces if terms.variants else ():
        for layout in terms.layouts:
            _check_readable(found.of(namespace), layout, terms.variants)
    return found


def _check_readable(profile: Profile, layout: Layout, variants: Sequence[int]) -> None:
    """What a client puts it must be able to get, or it would put it again and again."""
    if profile.codec_name == RawCodec.name or layout.kind is KvKind.FOREIGN:
        return  # what is not packed has whatever variant its source says
    for position in (0, 1):  # a chain's first page, and any other
        codec = profile.codec_at(layout, position)
        if codec.variant not in variants:
            raise InvalidRequest(
                f"profile {profile.name!r} packs layout {layout.name!r} with variant "
                f"{codec.variant} ({codec.name}), which is none of variants {list(variants)}"
            )
