"""Where settings come from, and what a wrong one is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies
from pydantic import ValidationError

from octavo_server.addresses import parse_address
from octavo_server.quantities import parse_bytes, parse_seconds
from octavo_server.settings import Settings
from octavo_server.settings_sources import SettingsError, load_settings


def refusal(flags: dict[str, object], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, environ or {})
    return str(caught.value)


def write_config(folder: Path, text: str) -> Path:
    path = folder / "octavo.toml"
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = write_config(tmp_path, 'lease_s = 1\nhold_s = "2s"\nsessions_max = 3\n')
    environ = {"OCTAVO_HOLD_S": "20", "OCTAVO_SESSIONS_MAX": "30"}
    found = load_settings({"sessions_max": "300"}, environ, config)
    assert (found.lease_s, found.hold_s, found.sessions_max) == (1.0, 20.0, 300)
    assert found.io_threads == Settings().io_threads


def test_environment_may_name_the_file(tmp_path: Path) -> None:
    config = write_config(tmp_path, 'node_id = "n7"')
    assert load_settings({}, {"OCTAVO_CONFIG": str(config)}).node_id == "n7"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Settings().lease_s = 5.0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_unknown_key_is_refused_by_name_with_the_closest_one(source: str, tmp_path: Path) -> None:
    flags: dict[str, object] = {"memry_bytes": "1GiB"} if source == "flag" else {}
    environ = {"OCTAVO_MEMRY_BYTES": "1GiB"} if source == "environment" else {}
    config = write_config(tmp_path, 'memry_bytes = "1GiB"') if source == "file" else None
    with pytest.raises(SettingsError, match=r"(?i)memry.bytes.*did you mean 'memory_bytes'"):
        load_settings(flags, environ, config)


def test_variables_that_others_own_are_left_alone() -> None:
    environ = {
        "OCTAVO_ADDRESS": "unix:/x",
        "OCTAVO_PORT": "tcp://10.0.0.1:9470",
        "OCTAVO_PORT_9470_TCP": "tcp://10.0.0.1:9470",
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_TEST_SEED": "1",
    }
    assert load_settings({}, environ) == Settings()


def test_every_wrong_setting_is_named_with_where_it_came_from() -> None:
    text = refusal({"memory_bytes": "lots", "lease_s": "-1"}, {"OCTAVO_IO_THREADS": "none"})
    assert len(text.splitlines()) == 3
    for expected in ("--memory-bytes: 'lots'", "--lease-s: '-1'", "OCTAVO_IO_THREADS: 'none'"):
        assert expected in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_bytes", "0"),
        ("memory_bytes", "99999TiB"),
        ("memory_bytes", "1.5B"),
        ("memory_bytes", "nan"),
        ("slab_bytes", "5000"),
        ("slab_bytes", "8GiB"),
        ("segment_bytes", "1MiB"),
        ("lease_s", "0"),
        ("lease_s", "1e9"),
        ("lease_s", "3 weeks"),
        ("io_threads", "0"),
        ("io_threads", "10000000"),
        ("sessions_max", "-1"),
        ("http", "127.0.0.1"),
        ("http", "127.0.0.1:http"),
        ("http", "127.0.0.1:70000"),
        ("http", "127.0.0.1:94 70"),
        ("http", "http://127.0.0.1:9470"),
        ("node_id", "a/b"),
        ("node_id", ""),
        ("node_id", "ü" * 10),
        ("listen_unix", "/x\n/y.sock"),
        ("listen_unix", "/" + "x" * 200),
        ("listen_unix", ""),
        ("nvme_dir", "/x\0y"),
        ("state_dir", ""),
        ("master_key_file", " /x"),
        ("huge_pages", "perhaps"),
        ("prefault", "maybe"),
        ("log_level", "loud"),
        ("nvme_bytes", "1GiB"),
        ("nvme_dir", "/x"),
        ("listen_tcp", "127.0.0.1:9471"),
    ],
)
def test_wrong_value_is_refused_in_one_line_that_names_it(name: str, value: str) -> None:
    text = refusal({name: value})
    assert len(text.splitlines()) == 1
    assert name in text.replace("-", "_")


def test_tcp_needs_a_word_of_consent_while_there_are_no_credentials() -> None:
    assert "allow_unauthenticated_tcp" in refusal({"listen_tcp": "127.0.0.1:0"})
    flags: dict[str, object] = {"listen_tcp": "127.0.0.1:0", "allow_unauthenticated_tcp": "true"}
    address = load_settings(flags, {}).tcp_address
    assert address is not None
    assert (address.host, address.port) == ("127.0.0.1", 0)


def test_bulk_streams_have_a_port_beside_tcp_unless_told_otherwise() -> None:
    assert load_settings({}, {}).bulk_address is None
    tcp: dict[str, object] = {"listen_tcp": "10.0.0.7:9471", "allow_unauthenticated_tcp": "true"}
    assert load_settings(tcp, {}).bulk_address == ("10.0.0.7", 0)
    assert load_settings({**tcp, "listen_bulk": "10.9.0.7:9472"}, {}).bulk_address == (
        "10.9.0.7",
        9472,
    )
    assert load_settings({**tcp, "listen_bulk": "off"}, {}).bulk_address is None
    assert "allow_unauthenticated_tcp" in refusal({"listen_bulk": "127.0.0.1:0"})
    assert "listen-bulk" in refusal({**tcp, "listen_bulk": "nowhere"})


@pytest.mark.parametrize("value", ["off", "OFF", ""])
def test_http_port_can_be_switched_off(value: str) -> None:
    assert load_settings({"http": value}, {}).http_address is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"= 1", "is no TOML"), (b"\xff\xfe", "is no TOML"), (b"#" * (1 << 21), "has more than")],
)
def test_file_that_is_no_settings_file_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "octavo.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        load_settings({}, {}, path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml: cannot be read"):
        load_settings({}, {}, tmp_path / "absent.toml")


def test_table_in_the_file_is_no_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="server is no setting"):
        load_settings({}, {}, write_config(tmp_path, "[server]\nlease_s = 1"))


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("8GiB", 8 << 30), ("1.5 KiB", 1536), ("2kB", 2000), (7, 7)],
)
def test_byte_sizes(text: object, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"), [("30", 30.0), ("500ms", 0.5), ("10m", 600.0), ("1h", 3600.0), (2, 2)]
)
def test_durations(text: object, duration_s: float) -> None:
    assert parse_seconds(text) == duration_s


@pytest.mark.parametrize("value", [True, None, "", "GiB", "-1", "1e3", [1], float("inf"), -1])
def test_no_quantity(value: object) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_bytes(value)
    with pytest.raises(ValueError, match="is not a"):
        parse_seconds(value)


@settings(derandomize=True, deadline=None)
@given(strategies.text(max_size=40))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        found = parse_address(text)
    except ValueError:
        return
    assert str(found).rpartition(":")[0] == text.rpartition(":")[0]
    assert 0 <= found.port <= 65_535
    assert not set(found.host) & set(" \t\n/@,")


@settings(derandomize=True, deadline=None)
@given(
    strategies.dictionaries(
        strategies.sampled_from(sorted(Settings.model_fields)),
        strategies.one_of(
            strategies.text(max_size=20),
            strategies.integers(),
            strategies.floats(),
            strategies.booleans(),
            strategies.none(),
            strategies.lists(strategies.integers(), max_size=2),
        ),
        max_size=4,
    )
)
def test_any_values_make_settings_or_a_refusal(values: dict[str, object]) -> None:
    try:
        found = load_settings(values, {})
    except SettingsError:
        return
    assert found.memory_bytes >= 1 << 20
    assert found.lease_s > 0
