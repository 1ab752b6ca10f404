"""The demo's prefill and decode processes: `python -m kvserve.demo.worker prefill|decode ...`.

Each prints one JSON object a line on standard output: progress events, then a result. They share
nothing but the server: decode computes the expected bytes itself to check what it fetched.
"""

import json
import resource
import sys
import time
from typing import Any

import uvloop

from kvclient import AsyncClient, Descriptor, KvserveError
from kvserve.demo.geometry import descriptor, layer_bytes


def _say(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")
    sys.stdout.flush()


def _views(region: bytearray, of: Descriptor) -> list[memoryview]:
    """The payload of each layer in a region laid out [layer][chunk]."""
    view = memoryview(region)
    sizes = of.layout.slice_sizes
    starts = of.payload_offsets
    return [
        view[start : start + size * of.chunk_count]
        for start, size in zip(starts, sizes, strict=True)
    ]


async def prefill(address: str, tokens: int) -> None:
    """Computes layer after layer and stores each at once."""
    wanted = descriptor(tokens)
    region = bytearray(wanted.payload_size_bytes)
    layers = _views(region, wanted)
    computing_s = 0.0
    async with AsyncClient(address) as client:
        started = time.perf_counter()
        _say("started")
        async with client.store(wanted, region) as handle:
            for layer_index in wanted.layer_order:
                begun = time.perf_counter()
                layers[layer_index][:] = layer_bytes(layer_index, len(layers[layer_index]))
                computing_s += time.perf_counter() - begun
                await handle.store_layer(layer_index)
                await handle.layer(layer_index)
                _say("stored", layer=layer_index)
            result = await handle.finish()
        took_s = time.perf_counter() - started
        requests = client.requests["Store"]
    _say(
        "result",
        is_whole=result.is_whole,
        requests=requests,
        storing_s=took_s - computing_s,
        memory_bytes=_memory_bytes(),
    )


async def decode(address: str, tokens: int) -> None:
    """Looks the prefix up and fetches it; checks every layer against its own computation."""
    wanted = descriptor(tokens)
    region = bytearray(wanted.payload_size_bytes)
    async with AsyncClient(address) as client:
        presence = await client.lookup(wanted)
        _say("looked_up", prefix_chunks=presence.prefix_chunks, chunks=wanted.chunk_count)
        started = time.perf_counter()
        _say("started")
        handle = client.fetch(wanted, region)
        first_layer_s = 0.0
        async for event in handle.layers():
            first_layer_s = first_layer_s or time.perf_counter() - started
            _say("fetched", layer=event.layer_index)
        result = await handle.wait()
        took_s = time.perf_counter() - started
        requests = client.requests["Fetch"]
    is_good = result.is_whole
    for layer_index, payload in enumerate(_views(region, wanted)):
        matches = payload == layer_bytes(layer_index, len(payload))
        is_good = is_good and matches
        _say("verified", layer=layer_index, matches=matches)
    _say(
        "result",
        is_whole=is_good,
        requests=requests,
        fetching_s=took_s,
        first_layer_s=first_layer_s,
        memory_bytes=_memory_bytes(),
    )


def _memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    role, address, tokens = sys.argv[1:]
    run = {"prefill": prefill, "decode": decode}[role]
    try:
        uvloop.run(run(address, int(tokens)))
    except KvserveError as error:
        _say("failed", message=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
