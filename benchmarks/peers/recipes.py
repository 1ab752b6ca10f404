"""The peers: what each needs, where it runs, what it is compared with. All versions are here."""

from dataclasses import dataclass, field

_NUMPY = "numpy==2.4.6"


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages of one virtual environment.

    `alone`: installed without what they say they depend on, which would be CUDA or an engine.
    """

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SystemNeed:
    """A program, or a shared library, and the Debian package that brings it."""

    package: str
    program: str = ""
    library: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One peer.

    Attributes:
        name: what `--peers` takes; `title`: the same for people.
        module: where its class is, as `PEER`; `options`: what it is made with.
        plane: kvserve's plane that moves bytes the same way.
        variables: set for its processes.
    """

    name: str
    title: str
    module: str
    plane: str
    environment: Environment
    system: tuple[SystemNeed, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


# Everything that the remote connectors import, without CUDA and the clients of other stores.
_LMCACHE = Environment(
    "lmcache",
    (
        *("torch==2.13.0", "transformers==5.24.0", "numba==0.68.1", "numpy==2.2.6"),
        *("aiofile==3.12.3", "aiofiles==25.1.0", "aiohttp==3.14.5", "blake3==1.0.11"),
        *("cachetools==8.0.2", "cryptography==50.0.2", "httpx==0.28.1", "msgspec==0.23.0"),
        *("nvtx==0.2.17", "psutil==7.2.2", "py-cpuinfo==9.0.0", "PyYAML==6.0.4"),
        *("opentelemetry-api==1.40.0", "opentelemetry-sdk==1.40.0"),
        *("opentelemetry-exporter-prometheus==0.61b0", "prometheus_client==0.24.1"),
        *("pyzmq==27.3.0", "redis==8.1.0", "requests==2.34.2", "safetensors==0.8.0"),
        "sortedcontainers==2.4.0",
    ),
    alone=("lmcache==0.5.6",),
)
_NIXL = Environment("nixl", (_NUMPY,), alone=("nixl-cu12==1.5.1",))
_REDIS_SERVER = SystemNeed("redis-server", program="redis-server")

RECIPES = (
    Recipe(
        "redis",
        "redis, hiredis",
        "benchmarks.peers.redis_peer",
        plane="tcp",
        environment=Environment("redis", ("redis==8.1.0", "hiredis==3.5.0", _NUMPY)),
        system=(_REDIS_SERVER,),
    ),
    Recipe(
        "flight",
        "Arrow Flight",
        "benchmarks.peers.flight_peer",
        plane="grpc",
        environment=Environment("flight", ("pyarrow==26.0.1", _NUMPY)),
    ),
    Recipe(
        "nixl",
        "NIXL, same host",
        "benchmarks.peers.nixl_peer",
        plane="shm",
        environment=_NIXL,
        options={"target": "polls"},
    ),
    Recipe(
        "nixl_tcp",
        "NIXL over TCP",
        "benchmarks.peers.nixl_peer",
        plane="tcp",
        environment=_NIXL,
        options={"target": "spins"},
        variables={"UCX_TLS": "tcp"},
    ),
    Recipe(
        "openlake",
        "OpenLake",
        "benchmarks.peers.openlake_peer",
        plane="shm",
        environment=Environment("openlake", (_NUMPY,), alone=("openlake-vllm==0.8.1",)),
    ),
    Recipe(
        "mooncake",
        "Mooncake Store",
        "benchmarks.peers.mooncake_peer",
        plane="tcp",
        environment=Environment(
            "mooncake", ("mooncake-transfer-engine-non-cuda==0.3.13.post1", _NUMPY)
        ),
        system=(
            SystemNeed("libibverbs1", library="ibverbs"),
            SystemNeed("librdmacm1", library="rdmacm"),
            SystemNeed("libnuma1", library="numa"),
            SystemNeed("libcurl4", library="curl"),
        ),
        variables={"GLOG_minloglevel": "1"},
    ),
    Recipe(
        "redhare",
        "redhare",
        "benchmarks.peers.redhare_peer",
        plane="tcp",
        environment=Environment("redhare", ("redhare==0.6.0", _NUMPY)),
        system=(_REDIS_SERVER,),
        # Its limits of one second assume RDMA.
        variables={
            "REDHARE_GET_TIMEOUT_MS": "15000",
            "REDHARE_WRITE_TIMEOUT_MS": "15000",
            "REDHARE_TRANSPORT_IO_TIMEOUT_MS": "15000",
            "REDHARE_REDIS_OP_TIMEOUT_MS": "5000",
        },
    ),
    Recipe(
        "lmcache",
        "LMCache lm://",
        "benchmarks.peers.lmcache_peer",
        plane="tcp",
        environment=_LMCACHE,
        options={"kind": "lm"},
    ),
    Recipe(
        "lmcache_fs",
        "LMCache fs://",
        "benchmarks.peers.lmcache_peer",
        plane="shm",
        environment=_LMCACHE,
        options={"kind": "fs"},
    ),
)
