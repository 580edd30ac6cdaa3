"""Addresses say what kind of Redis it is; what is wrong is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo_server.addresses import HostPort
from octavo_server.index.errors import IndexSettingsError
from octavo_server.index.redis_settings import Form, RedisSettings, Tls, parse_redis_address

A = HostPort("a", 6379)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://a", RedisSettings(addresses=(A,))),
        ("redis://a:1/3", RedisSettings(addresses=(HostPort("a", 1),), database=3)),
        (
            "rediss://me:p%40ss@[::1]:7",
            RedisSettings(
                addresses=(HostPort("::1", 7),), username="me", password="p@ss", tls=Tls()
            ),
        ),
        (
            "redis+sentinel://s:26379,t/main/2",
            RedisSettings(
                form=Form.SENTINEL,
                addresses=(HostPort("s", 26379), HostPort("t", 26379)),
                service="main",
                database=2,
            ),
        ),
        (
            "rediss+cluster://:secret@a,b:7000",
            RedisSettings(
                form=Form.CLUSTER, addresses=(A, HostPort("b", 7000)), password="secret", tls=Tls()
            ),
        ),
        ("unix:///run/redis.sock", RedisSettings(socket_path=Path("/run/redis.sock"))),
        (
            "unix:///run/redis.sock?db=5",
            RedisSettings(socket_path=Path("/run/redis.sock"), database=5),
        ),
    ],
)
def test_address_says_what_to_reach(text: str, expected: RedisSettings) -> None:
    assert parse_redis_address(text) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("http://a", "http before ://"),
        ("redis+proxy://a", "redis\\+proxy before"),
        ("a:6379", "before ://"),
        ("redis://a,b", "one server has one"),
        ("redis://a:99999", "port 99999"),
        ("redis://:hidden@bad host", "bad host"),
        ("redis://a/one", "'one' is no number"),
        ("redis://a/1/2", "'2' at the end"),
        ("redis+cluster://a/1", "only database 0"),
        ("redis+sentinel://a", "service"),
    ],
)
def test_what_is_wrong_with_an_address_is_named(text: str, named: str) -> None:
    with pytest.raises(IndexSettingsError, match=named) as caught:
        parse_redis_address(text)
    assert "hidden" not in str(caught.value)


def test_settings_that_contradict_each_other_are_refused() -> None:
    good = parse_redis_address("redis://a")
    for wrong, named in (
        ({"prefix": ""}, "prefix"),
        ({"prefix": "{x}"}, "prefix"),
        ({"match_timeout_s": 0.0}, "match_timeout_s"),
        ({"write_timeout_s": -1.0}, "write_timeout_s"),
        ({"calls_max": 0}, "calls_max"),
        ({"socket_path": Path("/x")}, "addresses"),
        ({"addresses": ()}, "addresses"),
        ({"service": "main"}, "service"),
    ):
        with pytest.raises(IndexSettingsError, match=named):
            replace(good, **wrong)
    with pytest.raises(IndexSettingsError, match="socket_path"):
        RedisSettings(socket_path=Path("/x"), form=Form.CLUSTER)
