"""What lies in Redis, and who may see it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.index.pages import chain, join, publish, run, withdraw
from tests.index.test_indexes import open_redis_index, settings_for
from tests.redis_servers import program

from octavo.bench.redis_servers import HOST, RedisClusterServers, RedisServer, free_port
from octavo_server.addresses import HostPort
from octavo_server.index.changes import Changes
from octavo_server.index.errors import IndexUnavailable, Trouble
from octavo_server.index.found import Answer
from octavo_server.index.prefix_index import Numbers
from octavo_server.index.redis_index import RedisIndex
from octavo_server.index.redis_settings import RedisSettings, Tls

LISTPACK_ENTRIES_MAX = 128
"""hash-max-listpack-entries, as Redis has it by default."""

COMMANDS = (
    "evalsha eval select time hget hset hsetnx hdel hmget hgetall hexists hlen del zadd zrem zscore"
    " zrange zrangebyscore sadd srem sismember smembers"
)
"""What docs/prefix-index.md says that a user needs on one server."""


def test_buckets_stay_small_and_compact_while_the_index_grows(
    redis_server: RedisServer, prefix: str
) -> None:
    async def story() -> None:
        index = open_redis_index(settings_for(redis_server.address, prefix))
        a, b = await join(index, "a"), await join(index, "b")
        keys = chain(1, 60_000)
        keys[:, 0] &= np.uint64(0xFFFF_FFFF_FFFF_FF03)  # 15,000 pages a shard: 3.8M in all
        with redis_server.client() as raw:
            buckets = 0
            for begin, end in ((0, 1000), (1000, 20_000), (20_000, 60_000)):
                await publish(index, a, keys[begin:end])
                await publish(index, b, keys[begin : begin + (end - begin) // 5])
                names = list(raw.scan_iter(match=f"{prefix}:1:*}}:[0-9]*", count=1000))
                sizes = [raw.hlen(name) for name in names]
                assert sum(sizes) == end
                assert max(sizes) <= LISTPACK_ENTRIES_MAX
                assert {raw.object("encoding", name) for name in names} == {b"listpack"}
                assert len(names) > max(buckets, end / 50)
                buckets = len(names)
            await withdraw(index, a, keys)
            await withdraw(index, b, keys[:-1])
            left = list(raw.scan_iter(match=f"{prefix}:1:*}}:[0-9]*", count=1000))
            assert left == []
        await index.close()

    run(story())


def test_two_clusters_share_a_redis_and_do_not_see_each_other(
    redis_server: RedisServer, prefix: str
) -> None:
    async def story() -> None:
        ours = open_redis_index(settings_for(redis_server.address, f"{prefix}-x"))
        theirs = open_redis_index(settings_for(redis_server.address, f"{prefix}-y"))
        keys = chain(2, 100)
        await publish(ours, await join(ours, "a"), keys)
        assert (await ours.match(keys)).page_count == 100
        assert (await theirs.match(keys)).page_count == 0
        assert not (await theirs.registry.view()).holders
        await ours.close()
        await theirs.close()

    run(story())


def test_buckets_of_a_state_that_was_lost_bring_no_page_back(
    redis_server: RedisServer, prefix: str
) -> None:
    async def story() -> None:
        index = open_redis_index(settings_for(redis_server.address, prefix))
        a = await join(index, "a")
        keys = chain(3, 4000)
        keys[:, 0] &= np.uint64(0xFFFF_FFFF_FFFF_FF00)  # one shard
        await publish(index, a, keys)
        with redis_server.client() as raw:
            raw.delete(f"{prefix}:1:{{00}}")  # as an allkeys policy would
        fresh = chain(4, 4000)
        fresh[:, 0] &= np.uint64(0xFFFF_FFFF_FFFF_FF00)
        numbers = Numbers()
        for batch in Changes.published(fresh).batches():
            await index.apply(a, batch, numbers)
        assert (await index.match(fresh, exact=True)).page_count == 4000
        # Only what lay in the first bucket is still there, and a comparison withdraws it.
        found = [(await index.match(keys[row : row + 1])).page_count for row in range(0, 4000, 40)]
        assert sum(found) <= 10
        await index.close()

    run(story())


def test_user_needs_no_more_than_its_prefix_and_few_commands(
    redis_server: RedisServer, prefix: str
) -> None:
    async def story() -> None:
        _set_user(redis_server, prefix, COMMANDS)
        settings = replace(
            settings_for(redis_server.address, prefix), username="octavo", password="secret"
        )
        index = open_redis_index(settings)
        keys = chain(5, 300)
        a = await join(index, "a")
        await publish(index, a, keys)
        assert (await index.match(keys)).page_count == 300
        await withdraw(index, a, keys)
        await index.close()

        elsewhere = open_redis_index(replace(settings, prefix=f"other-{prefix}"))
        with pytest.raises(IndexUnavailable) as caught:
            await join(elsewhere, "a")
        assert caught.value.trouble is Trouble.DENIED
        await elsewhere.close()

        wrong = RedisIndex(replace(settings, password="wrong"))
        assert (await wrong.match(keys)).answer is Answer.UNAVAILABLE
        assert wrong.link.troubles[Trouble.DENIED] > 0
        await wrong.close()

    run(story())


def test_user_of_a_cluster_needs_to_learn_its_shape_too(
    redis_cluster: RedisClusterServers, prefix: str
) -> None:
    async def story() -> None:
        for server in redis_cluster.servers:
            _set_user(server, prefix, f"{COMMANDS} cluster|slots command")
        settings = replace(
            settings_for(redis_cluster.address, prefix), username="octavo", password="secret"
        )
        index = open_redis_index(settings)
        keys = chain(5, 300)
        await publish(index, await join(index, "a"), keys)
        assert (await index.match(keys)).page_count == 300
        await index.close()

    run(story())


def _set_user(server: RedisServer, prefix: str, commands: str) -> None:
    allowed = [f"+{command}" for command in commands.split()]
    with server.client() as raw:
        raw.execute_command(
            "ACL SETUSER", "octavo", "reset", "on", ">secret", f"~{prefix}:*", *allowed
        )


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisSettings]]:
    """A server that speaks TLS on a second port and wants a certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "octavo test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    port = free_port()
    with RedisServer(
        program(),
        tls_port=port,
        tls_cert_file=certificate_file,
        tls_key_file=key_file,
        tls_ca_cert_file=certificate_file,
    ) as server:
        tls = Tls(ca_file=certificate_file, certificate_file=certificate_file, key_file=key_file)
        yield server, RedisSettings(addresses=(HostPort(HOST, port),), tls=tls, match_timeout_s=10)


def test_tls_with_certificates_of_both_sides(
    tls_server: tuple[RedisServer, RedisSettings],
) -> None:
    async def story() -> None:
        _, settings = tls_server
        index = RedisIndex(settings)
        keys = chain(6, 100)
        await publish(index, await join(index, "a"), keys)
        assert (await index.match(keys)).page_count == 100
        await index.close()
        distrusting = RedisIndex(replace(settings, tls=Tls()))
        assert (await distrusting.match(keys)).answer is Answer.UNAVAILABLE
        await distrusting.close()

    run(story())
