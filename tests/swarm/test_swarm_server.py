"""A nats-server of one's own with more of its configuration: leaf nodes, accounts."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import nkeys
import pytest
from test_swarm_exchange import collected, published, with_server

from shoal.errors import ConfigError
from shoal.interfaces import Exchange
from shoal.net.listening import free_port, listening_socket
from shoal.swarm.wire.invitation import NatsOptions
from shoal.swarm.wire.nats import NatsExchange
from shoal.swarm.wire.server import NatsServer, ServerOptions, server_config
from until import until


def test_a_port_that_is_taken_is_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        with listening_socket("127.0.0.1", 0) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"port: expected a free one on 127.0.0.1, got {port}"):
                async with NatsServer(ServerOptions(tmp_path / "server", port=port)):
                    pass

    asyncio.run(main())
    assert not (tmp_path / "server").exists()


async def gathered(exchange: Exchange, frames: list[bytes]) -> None:
    """Reads for ever."""
    while True:
        frames += await exchange.receive(32)


def test_a_node_behind_a_leaf_and_one_at_the_hub_hear_each_other(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "größe"
    folder.mkdir()
    (folder / "hub.conf").write_text(f'leafnodes {{ listen: "127.0.0.1:{port}" }}')
    remote = f"nats-leaf://secret@127.0.0.1:{port}"
    (folder / "leaf.conf").write_text(f'leafnodes {{ remotes: [ {{ url: "{remote}" }} ] }}')

    def options(name: str, token: str | None) -> ServerOptions:
        return ServerOptions(folder / name, name=name, token=token, include=folder / f"{name}.conf")

    async def main() -> None:
        async with NatsServer(options("hub", "secret")) as hub, NatsServer(options("leaf", None)) as leaf:
            urls = hub.url.replace("nats://", "nats://secret@"), leaf.url
            first, second = (NatsExchange(NatsOptions((url,), "reef")) for url in urls)
            async with first, second:
                at_hub, behind_leaf = list[bytes](), list[bytes]()
                reading = [asyncio.ensure_future(gathered(*pair)) for pair in ((first, at_hub), (second, behind_leaf))]

                async def both_heard_both() -> bool:
                    await published(first, b"of the hub", author="a")
                    await published(second, b"of the leaf", author="b")
                    return len(at_hub) == len(behind_leaf) == 2

                await until(both_heard_both)
                assert set(at_hub) == set(behind_leaf) == {b"of the hub", b"of the leaf"}
                for task in reading:
                    task.cancel()

    asyncio.run(main())


def test_a_server_with_accounts_lets_in_only_who_has_a_key_of_theirs(tmp_path: Path) -> None:
    seed = bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    key = tmp_path / "node.nk"
    key.write_bytes(seed)
    user = nkeys.from_seed(bytearray(seed)).public_key.decode()
    accounts = tmp_path / "accounts.conf"
    reef = f"{{ jetstream: enabled, users: [ {{ nkey: {user} }} ] }}"
    accounts.write_text(f"accounts {{ reef: {reef}, SYS: {{}} }}\nsystem_account: SYS\n")

    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        async with NatsExchange(NatsOptions((server.url,), "reef", credentials=key)) as member:
            reading = asyncio.ensure_future(collected(member, 1))
            await published(member, b"1")
            assert await reading == [b"1"]
        stranger = joined(server.url)
        hearing = asyncio.ensure_future(stranger.receive(1))
        await until(lambda: "Authorization" in stranger.failure)
        hearing.cancel()
        assert not stranger.connected

    with_server(tmp_path / "server", body, include=accounts)


def test_a_server_that_refuses_the_second_consumer_is_named_and_followed_authors_are_read_by_the_first(
    tmp_path: Path,
) -> None:
    accounts, consumers = (
        tmp_path / "accounts.conf",
        "$JS.API.CONSUMER.CREATE.shoal-reef.*",
    )  # without a filter in its name
    user = f'{{ user: u, password: p, permissions: {{ publish: {{ deny: ["{consumers}"] }} }} }}'
    accounts.write_text(f"accounts {{ reef: {{ jetstream: enabled, users: [ {user} ] }} }}\n")

    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        member = joined(server.url.replace("nats://", "nats://u:p@"))
        reading = asyncio.ensure_future(collected(member, 2))
        await published(member, b"1", author="a")
        assert await member.receive_from(frozenset("a"), 9) == []
        assert member.failure.startswith("known peers' frames wait among all others': ")
        await published(member, b"2", author="a")
        assert await reading == [b"1", b"2"]

    with_server(tmp_path / "server", body, include=accounts)


def test_an_included_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--include: .*accounts\.conf.* is not a file"):
        server_config(ServerOptions(tmp_path, include=tmp_path / "accounts.conf"))
