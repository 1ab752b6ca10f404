"""The client's gRPC channel: made on first use, once for each process and event loop.

A channel belongs to the loop that made it and to the process that made it. A forked child, or a
program that runs a second loop, gets a new one; nothing of the old one is touched.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakSet

import grpc

from kvclient import fork_support
from kvclient.handle import Handle, HandleState
from kvclient.planes.choice import AUTO, PlaneChoice
from kvclient.tls import Security, Tls, advice_for_plain
from kvserve.errors import InvalidRequest, ServerUnavailable, TransferCancelled
from kvserve.format.messages import SERVICE
from kvserve.frame_memory import keep_frame_memory
from kvserve.v1 import kvserve_pb2 as pb

# The server's frames are at most 64 MiB (`limits.frame_size_bytes`), plus their envelope.
_MESSAGE_SIZE_BYTES_MAX = 65 << 20
# How long a call waits for a server that did not answer the call before.
_DOWN_WAIT_S = 0.2
_WHY_S = 0.1

OPTIONS = [
    ("grpc.max_receive_message_length", _MESSAGE_SIZE_BYTES_MAX),
    ("grpc.max_send_message_length", _MESSAGE_SIZE_BYTES_MAX),
    # Finds a dead peer in 40 s even when idle; the server permits pings this often.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted server is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.http2.max_frame_size", 4 << 20),
    ("grpc.use_local_subchannel_pool", 1),
]


class Rpcs:
    """The rpcs as grpc multi-callables. Fetch replies and store requests are raw bytes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.get_server_info = channel.unary_unary(
            f"/{SERVICE}/GetServerInfo",
            request_serializer=pb.GetServerInfoRequest.SerializeToString,
            response_deserializer=pb.GetServerInfoReply.FromString,
        )
        self.lookup = channel.unary_unary(
            f"/{SERVICE}/Lookup",
            request_serializer=pb.LookupRequest.SerializeToString,
            response_deserializer=pb.LookupReply.FromString,
        )
        self.verify = channel.unary_unary(
            f"/{SERVICE}/Verify",
            request_serializer=pb.VerifyRequest.SerializeToString,
            response_deserializer=pb.VerifyReply.FromString,
        )
        self.delete = channel.unary_unary(
            f"/{SERVICE}/Delete",
            request_serializer=pb.DeleteRequest.SerializeToString,
            response_deserializer=pb.DeleteReply.FromString,
        )
        self.release = channel.unary_unary(
            f"/{SERVICE}/Release",
            request_serializer=pb.ReleaseRequest.SerializeToString,
            response_deserializer=pb.ReleaseReply.FromString,
        )
        self.pin, self.unpin = (
            channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=pb.PinRequest.SerializeToString,
                response_deserializer=pb.PinReply.FromString,
            )
            for name in ("Pin", "Unpin")
        )
        self.fetch: grpc.aio.UnaryStreamMultiCallable[pb.FetchRequest, bytes] = (
            channel.unary_stream(
                f"/{SERVICE}/Fetch", request_serializer=pb.FetchRequest.SerializeToString
            )
        )
        self.store: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE}/Store"
        )


class Channel:
    """The connection to one server, and the handles that use it.

    A fork watches it and not the client: a handle may outlive the client that made it.
    """

    def __init__(
        self, address: str, connect_timeout_s: float, plane: str = AUTO, tls: Tls | None = None
    ) -> None:
        if address.startswith("unix:"):
            is_valid = len(address) > len("unix:")
        else:
            host, _, port = address.rpartition(":")
            is_valid = (
                bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65_536
            )
        if not is_valid:
            raise InvalidRequest(f"address {address!r} must be HOST:PORT, [V6]:PORT or unix:PATH")
        self.address = address
        self._security = None if tls is None else Security(tls, address)
        self.planes = PlaneChoice(plane, address, security=self._security)
        self._connect_timeout_s = connect_timeout_s
        self.requests: Counter[str] = Counter()
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._rpcs: Rpcs | None = None
        self._is_down = False
        self._is_parting = False
        self.handles: WeakSet[Handle] = WeakSet()
        fork_support.watch(self)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that the open connection belongs to; None if there is none."""
        return None if self._owner is None else self._owner[1]

    async def connected(self, rpc: str) -> Rpcs:
        """The rpcs over a connection of this process and loop; counts a request of `rpc`.

        Raises:
            ServerUnavailable: no connection within `connect_timeout_s`. A server that is down must
                cost its callers less than computing the KV themselves.
            TransferCancelled: the client was closed, or its process forked, meanwhile.
            InvalidRequest: a file of `tls` is not what its name says.
        """
        if self._security is not None:
            await self._security.load()
        if self._channel is None or self._is_parting:
            await fork_support.no_fork()
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._channel is None or self._rpcs is None or self._owner != owner:
            fork_support.connecting()
            keep_frame_memory()
            self.planes.connections.close()
            self._owner = owner
            self._channel = self._new_channel()
            self._rpcs = Rpcs(self._channel)
        channel, rpcs = self._channel, self._rpcs
        if channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
            # A server that is known to be down is tried again in the background, by the channel.
            wait_s = _DOWN_WAIT_S if self._is_down else self._connect_timeout_s
            try:
                async with asyncio.timeout(wait_s):
                    await channel.channel_ready()
            except TimeoutError:
                self._is_down = True
                why = await self._why_down(channel, rpcs)
                raise ServerUnavailable(
                    f"{self.address}: no server answers, or it is stopping "
                    f"(tried for {wait_s:g} s){why}"
                ) from None
            except grpc.aio.UsageError:  # its word for a channel that was closed meanwhile
                raise TransferCancelled(
                    f"{self.address}: this client was closed while it connected"
                ) from None
        self._is_down = False
        self.requests[rpc] += 1
        return rpcs

    def _new_channel(self) -> grpc.aio.Channel:
        if self._security is None:
            return grpc.aio.insecure_channel(self.address, options=OPTIONS)
        return self._security.channel(self.address, OPTIONS)

    async def _why_down(self, channel: grpc.aio.Channel, rpcs: Rpcs) -> str:
        """What gRPC says of its last try, and what to do about it.

        Only a call gets that out of it, which fails at once where no try is under way.
        """
        if channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return ""
        try:
            await rpcs.get_server_info(pb.GetServerInfoRequest(), timeout=_WHY_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return ""
            details = error.details() or ""
            advice = advice_for_plain if self._security is None else self._security.advice
            return "".join(f": {text}" for text in (advice(details), details) if text)
        return ""  # it is there now

    def abandon(self) -> None:
        """Lets go of a connection whose loop is closed; its handles ended with the loop."""
        self.planes.connections.close()
        self._channel = self._rpcs = self._owner = None

    async def quiesce(self, transfers_end_s: float) -> None:
        """Waits for open handles, cancels those that take longer, closes the connection."""
        handles = [handle for handle in self.handles if handle.state is HandleState.PROC]
        await asyncio.sleep(0)  # one that was posted just now has its connection then
        self._is_parting = True  # those to come wait for the end of the fork
        try:
            await self._part(handles, transfers_end_s)
        finally:
            self._is_parting = False

    async def _part(self, handles: Sequence[Handle], transfers_end_s: float) -> None:
        if handles and transfers_end_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(transfers_end_s):
                    await asyncio.gather(*(handle.ended() for handle in handles))
        await asyncio.gather(*(handle.cancel() for handle in handles))
        await self.close()

    async def close(self) -> None:
        """Ends open rpcs; a later call opens a new connection."""
        self.planes.connections.close()
        channel, owner = self._channel, self._owner
        # Every reference goes: the last one ends gRPC's threads (see fork_support).
        self._channel = self._rpcs = self._owner = None
        if channel is not None and owner == (os.getpid(), asyncio.get_running_loop()):
            await channel.close()
