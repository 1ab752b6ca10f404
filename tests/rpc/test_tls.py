"""TLS on the gRPC port and on the data port: who gets in, and that everything works as without."""

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvclient import (
    AsyncClient,
    InvalidRequest,
    ServerUnavailable,
    SharedRegion,
    Tls,
)
from kvclient.channel import Channel, Rpcs
from kvserve.data_socket import DataSocket
from kvserve.format.records import HELLO_MAGIC, HELLO_SIZE_BYTES
from kvserve.rpc.server import Server
from kvserve.testing.server_process import ServerProcess
from kvserve.tls_socket import TlsDataSocket
from kvserve.transfer.planes import data_port
from kvserve.transfer.planes.data_port import DataPort
from kvserve.transfer.staging import Staging
from tests.certificates import Certificates
from tests.payload import payload_for, small_descriptor, store_all
from tests.rpc.test_forks import run_script

# Collected here a second time: over this file's server and clients.
from tests.rpc.test_planes import (  # noqa: F401
    large,
    test_a_caller_that_gives_up_inside_a_layer_ends_the_store,
    test_a_damaged_chunk_in_the_middle,
    test_cancelled_stores_publish_nothing,
    test_cancels_at_any_moment_leave_the_region_alone,
    test_the_plane_that_was_asked_for_is_the_one,
    test_transfers_at_once,
    until,
    until_quiet,
)
from tests.rpc.test_tcp_plane import is_closed, offered

StartServer = Callable[..., Awaitable[Server]]


@pytest.fixture
async def server(start_server: StartServer, certificates: Certificates) -> Server:
    return await start_server(server=certificates.settings)


@pytest.fixture
def tls(certificates: Certificates) -> Tls:
    return certificates.tls


@pytest.fixture
async def client(server: Server, plane: str, tls: Tls) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, timeout_s=20, plane=plane, tls=tls) as client:
        yield client


@pytest.fixture
async def rpcs(server: Server, tls: Tls) -> AsyncIterator[Rpcs]:
    channel = Channel(server.address, 2.0, tls=tls)
    yield await channel.connected("Fetch")
    await channel.close()


async def dialled(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host or "127.0.0.1", int(port)))
    return sock


async def secured(address: str, context: ssl.SSLContext) -> TlsDataSocket:
    sock = await dialled(address)
    connection = TlsDataSocket(sock, address, context, server_name="127.0.0.1")
    try:
        await connection.handshake()
    except BaseException:
        connection.close()
        raise
    return connection


def port_of(server: Server) -> DataPort:
    assert server.data_port is not None
    return server.data_port


async def moved(client: AsyncClient) -> bool:
    """Whether bytes that were stored come back the same."""
    descriptor = small_descriptor()
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    target = bytearray(len(source))
    return (await client.fetch(descriptor, target).wait()).is_whole and target == source


class TestWhoGetsIn:
    @pytest.mark.parametrize(
        ("settings", "tls", "words"),
        [
            ("settings", "nothing", r"if the server speaks TLS, the client needs tls=Tls\("),
            ("settings", "strange", r"not signed by a CA that is trusted here .*strange-ca\.pem"),
            ("settings", "renamed", r"not for 'kv\.example': set server_name"),
            ("mutual", "tls", r"if the server has server\.tls_client_ca_file"),
            ("mutual", "stranger", r"if the server has server\.tls_client_ca_file"),
            ("plain", "tls", r"the server does not speak TLS: leave out tls"),
        ],
    )
    async def test_refusals_say_what_to_do(
        self,
        start_server: StartServer,
        certificates: Certificates,
        settings: str,
        tls: str,
        words: str,
    ) -> None:
        given = {
            "nothing": None,
            "tls": certificates.tls,
            "strange": Tls(certificates.strange_ca),
            "renamed": Tls(certificates.ca, server_name="kv.example"),
            "stranger": Tls(
                certificates.ca,
                certificate_file=certificates.stranger,
                key_file=certificates.stranger_key,
            ),
        }[tls]
        server = await start_server(
            server={
                "settings": certificates.settings,
                "mutual": certificates.mutual,
                "plain": {},
            }[settings]
        )
        async with AsyncClient(server.address, connect_timeout_s=0.5, tls=given) as client:
            async with asyncio.timeout(2):
                with pytest.raises(ServerUnavailable, match=words):
                    await client.server_info()

    async def test_mutual_tls(
        self, start_server: StartServer, certificates: Certificates, plane: str
    ) -> None:
        server = await start_server(server=certificates.mutual)
        tls = certificates.shown
        async with AsyncClient(server.address, plane=plane, tls=tls) as client:
            assert await moved(client)
        assert port_of(server).refused == 0

    async def test_a_name_of_its_own(self, start_server: StartServer, tmp_path: Path) -> None:
        """The address is not in the certificate, its name is; over a Unix socket, too."""
        certificates = Certificates(tmp_path, "kv.example")
        listens = ("127.0.0.1:0", f"unix:{tmp_path}/socket")
        for listen in listens:
            server = await start_server(
                server={**certificates.settings, "listen": listen, "data_listen": "127.0.0.1:0"}
            )
            tls = Tls(certificates.ca, server_name="kv.example")
            async with AsyncClient(server.address, plane="tcp", tls=tls) as client:
                assert await moved(client)

    async def test_a_unix_socket_is_localhost(
        self, start_server: StartServer, certificates: Certificates, tmp_path: Path
    ) -> None:
        server = await start_server(
            server={**certificates.settings, "listen": f"unix:{tmp_path}/socket"}
        )
        async with AsyncClient(server.address, tls=certificates.tls) as client:
            assert await moved(client)

    async def test_the_shm_plane_beside_it(self, server: Server, tls: Tls) -> None:
        descriptor = small_descriptor()
        source = payload_for(descriptor)
        async with AsyncClient(server.address, tls=tls) as client:
            await store_all(client, descriptor, source)
            region = SharedRegion(len(source))
            assert (await client.fetch(descriptor, region).wait()).is_whole
            assert region.view == source

    async def test_health_answers(self, server: Server, certificates: Certificates) -> None:
        trusted = grpc.ssl_channel_credentials(certificates.ca.read_bytes())
        async with grpc.aio.secure_channel(server.address, trusted) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


class TestDataPort:
    """Nothing but TLS gets in there, and what does still needs its secret."""

    @pytest.fixture
    def plane(self) -> str:
        return "tcp"

    @pytest.fixture(autouse=True)
    async def stored(self, client: AsyncClient) -> None:
        descriptor = small_descriptor()
        await store_all(client, descriptor, payload_for(descriptor))

    async def test_a_secret_is_good_once(
        self, server: Server, rpcs: Rpcs, certificates: Certificates
    ) -> None:
        call, offer = await offered(rpcs, "tcp", "fetch")
        first = await secured(offer.address, certificates.client_context())
        await first.send((HELLO_MAGIC, offer.secret))
        await first.receive([memoryview(bytearray(24))])
        second = await secured(offer.address, certificates.client_context())
        await second.send((HELLO_MAGIC, offer.secret))
        assert await is_closed(second)
        assert port_of(server).refused == 1
        first.close()
        call.cancel()  # type: ignore[attr-defined]
        await until_quiet(server)

    async def test_a_secret_in_the_clear(
        self, server: Server, rpcs: Rpcs, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Refused, and the secret is still good for who it was made for."""
        call, offer = await offered(rpcs, "tcp", "fetch")
        plain = DataSocket(await dialled(offer.address), "the server")
        await plain.send((HELLO_MAGIC, offer.secret))
        await until(lambda: port_of(server).refused == 1)
        plain.close()
        assert "TLS with 127.0.0.1" in caplog.text
        assert " 1 expected" in repr(port_of(server))
        call.cancel()  # type: ignore[attr-defined]
        await until_quiet(server)

    @pytest.mark.parametrize(
        "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" + b"x" * 600]
    )
    async def test_garbage(self, server: Server, sent: bytes) -> None:
        plain = DataSocket(await dialled(port_of(server).address), "the server")
        await plain.send((sent,))
        await until(lambda: port_of(server).refused == 1)
        plain.close()
        await until(lambda: " 1 connections" in repr(port_of(server)))  # the store's

    @pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
    async def test_a_handshake_that_stalls(
        self,
        server: Server,
        client: AsyncClient,
        monkeypatch: pytest.MonkeyPatch,
        sent: bytes,
    ) -> None:
        """It ends in time, and holds nobody up meanwhile."""
        monkeypatch.setattr(data_port, "_FIRST_HELLO_S", 0.5)
        stalled = DataSocket(await dialled(port_of(server).address), "the server")
        await stalled.send((sent,))
        assert await moved(client)
        assert port_of(server).refused == 0
        assert await is_closed(stalled)
        assert port_of(server).refused == 1

    async def test_who_goes_away_in_the_handshake_is_not_counted(self, server: Server) -> None:
        sock = await dialled(port_of(server).address)
        await until(lambda: " 2 connections" in repr(port_of(server)))
        sock.close()
        await until(lambda: " 1 connections" in repr(port_of(server)))
        assert port_of(server).refused == 0

    async def test_who_does_not_trust_the_server(
        self, server: Server, certificates: Certificates
    ) -> None:
        context = certificates.client_context(certificates.strange_ca)
        with pytest.raises(InvalidRequest, match="unable to get local issuer certificate"):
            await secured(port_of(server).address, context)
        await until(lambda: port_of(server).refused == 1)

    async def test_no_certificate_where_one_is_demanded(
        self, start_server: StartServer, certificates: Certificates
    ) -> None:
        server = await start_server(server=certificates.mutual)
        connection = await secured(port_of(server).address, certificates.client_context())
        assert await is_closed(connection), "TLS 1.3 says so after the handshake"
        await until(lambda: port_of(server).refused == 1)

    async def test_handshakes_count_as_connections(self, certificates: Certificates) -> None:
        port = DataPort(Staging(16384, 4096), connections_max=2, tls=certificates.server_context())
        await port.start("127.0.0.1", 0, tell_host=True)
        stalled = [DataSocket(await dialled(port.address), "the server") for _ in range(5)]
        await until(lambda: " 2 connections" in repr(port))
        for connection in stalled[:3]:
            assert await is_closed(connection), "the oldest made room"
        with port.expect() as expected:
            good = await secured(port.address, certificates.client_context())
            await good.send((HELLO_MAGIC, expected.secret))
            port.close(await expected.connection())
        await port.stop()
        assert await is_closed(good)
        for connection in stalled:
            connection.close()

    async def test_a_data_port_without_tls_is_not_believed(
        self, server: Server, client: AsyncClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whoever sits there never sees the secret, and gets no payload."""
        seen = asyncio.Queue[bytes]()

        async def sit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.put_nowait(await reader.read(HELLO_SIZE_BYTES))
            writer.write(b"welcome" * 100)
            writer.close()

        sitting = await asyncio.start_server(sit, "127.0.0.1", 0)
        port_of(server).address = f"127.0.0.1:{sitting.sockets[0].getsockname()[1]}"
        descriptor = small_descriptor()
        await client.close()  # a connection that it has kept would be used again
        target = bytearray(descriptor.payload_size_bytes)
        with pytest.raises(ServerUnavailable, match=r"cannot be reached: TLS with .*WRONG_VERSION"):
            await client.fetch(descriptor, target).wait()
        assert not (await seen.get()).startswith(HELLO_MAGIC)
        sitting.close()
        await until_quiet(server)


class TestFiles:
    """Each mistake is named by its key; nothing is half secured."""

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"tls_key_file": ""}, "tls_certificate_file needs tls_key_file"),
            ({"tls_certificate_file": ""}, "tls_key_file needs tls_certificate_file"),
            (
                {"tls_certificate_file": "", "tls_key_file": "", "tls_client_ca_file": "ca.pem"},
                "tls_client_ca_file needs tls_certificate_file",
            ),
            ({"tls_key_file": "/gone"}, "server.tls_key_file /gone cannot be read: No such file"),
            ({"tls_client_ca_file": "KEY"}, "server.tls_client_ca_file .* no certificate in PEM"),
            ({"tls_certificate_file": "KEY"}, "must be a certificate in PEM and its key"),
            ({"tls_key_file": "OTHER"}, "and its key: KEY_VALUES_MISMATCH"),
            ({"tls_key_file": "ENCRYPTED"}, "server.tls_key_file is encrypted"),
        ],
    )
    async def test_of_a_server(
        self,
        start_server: StartServer,
        certificates: Certificates,
        changed: dict[str, str],
        words: str,
    ) -> None:
        files = {
            "KEY": str(certificates.server_key),
            "OTHER": str(certificates.client_key),
            "ENCRYPTED": str(certificates.encrypted_key),
        }
        changed = {key: files.get(value, value) for key, value in changed.items()}
        with pytest.raises(InvalidRequest, match=words):
            await start_server(server={**certificates.settings, **changed})

    @pytest.mark.parametrize(
        ("named", "words"),
        [
            ({"root_certificates_file": "/gone"}, "root_certificates_file /gone cannot be read"),
            ({"root_certificates_file": "KEY"}, "root_certificates_file .* no certificate in PEM"),
            ({"certificate_file": "KEY", "key_file": "KEY"}, "must be a certificate in PEM and"),
            ({"certificate_file": "CERT", "key_file": "ENCRYPTED"}, "key_file is encrypted"),
        ],
    )
    async def test_of_a_client(
        self, certificates: Certificates, named: dict[str, str], words: str
    ) -> None:
        files = {
            "KEY": str(certificates.server_key),
            "CERT": str(certificates.server),
            "ENCRYPTED": str(certificates.encrypted_key),
        }
        named = {key: files.get(value, value) for key, value in named.items()}
        async with AsyncClient("127.0.0.1:9", tls=Tls(**named)) as client:
            with pytest.raises(InvalidRequest, match=words):
                await client.server_info()

    def test_what_belongs_together(self) -> None:
        with pytest.raises(InvalidRequest, match="belong together"):
            Tls(certificate_file="client.pem")
        for name in ("", ".example", "käse.example"):
            with pytest.raises(InvalidRequest, match="must be the name of a host"):
                Tls(server_name=name)

    async def test_the_system_s_certificates(
        self, server: Server, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
        async with AsyncClient(server.address, plane="tcp", tls=Tls()) as client:
            assert await moved(client)


_FORKING = """
import os, sys
from kvclient import Client, Tls
from tests.payload import payload_for, small_descriptor

address, ca, certificate, key = sys.argv[1:]
descriptor = small_descriptor()
source = payload_for(descriptor)

def fetch(client):
    target = bytearray(len(source))
    assert client.fetch(descriptor, target, timeout_s=10).wait().is_whole
    assert target == source

client = Client(address, plane="tcp", tls=Tls(ca, certificate_file=certificate, key_file=key))
with client.store(descriptor, source) as handle:
    for layer_index in descriptor.layer_order:
        handle.store_layer(layer_index)
    assert handle.finish().is_whole
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        fetch(client)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    fetch(client)
print("good")
"""


class TestProcesses:
    """A real server with a configuration file, blocking clients, forks."""

    @pytest.fixture
    def process(self, root: Path, certificates: Certificates) -> ServerProcess:
        config = root.with_name("kvserve.toml")
        lines = [f'{key} = "{value}"' for key, value in certificates.mutual.items()]
        config.write_text("\n".join(["[server]", *lines]), "utf-8")
        return ServerProcess(root, config=config)

    def test_a_forked_child_connects_anew(
        self, process: ServerProcess, certificates: Certificates
    ) -> None:
        shown = (certificates.ca, certificates.client, certificates.client_key)
        with process as server:
            run_script(_FORKING, server.address, *map(str, shown))
            assert "Traceback" not in server.log()

    def test_the_command_line(self, process: ServerProcess, certificates: Certificates) -> None:
        shown = ["--tls-ca", certificates.ca]
        shown += ["--tls-certificate", certificates.client, "--tls-key", certificates.client_key]
        with process as server:
            stat = [sys.executable, "-m", "kvserve", "stat", "--json", "--server", server.address]
            good = subprocess.run([*stat, *shown], capture_output=True, timeout=30, check=False)
            assert json.loads(good.stdout)["planes"] == ["grpc", "tcp", "shm"], good.stderr
            bad = subprocess.run(stat, capture_output=True, timeout=30, check=False)
            assert (bad.returncode, bad.stdout) == (1, b"")
            assert b"if the server speaks TLS" in bad.stderr
