"""Settings: one frozen section per reader, validated at once, unknown keys refused.

The only reader of configuration files. Defaults live here and nowhere else: the command line's help
and `deploy/kvserve.example.toml` are rendered from them, and a test compares.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from kvserve.errors import InvalidRequest
from kvserve.names import check_tenant


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class ServerConfig(_Section):
    """[server]"""

    listen: str = Field(
        "127.0.0.1:7411",
        pattern=r"^(unix:.+|.+:\d{1,5})$",
        description="Address of the gRPC service: HOST:PORT, [V6]:PORT or unix:PATH.",
    )

    data_listen: str = Field(
        "",
        pattern=r"^(|off|[^/]+:\d{1,5})$",
        description="Address of the tcp plane: HOST:PORT; empty: listen's host, any port; or off.",
    )

    shared_memory: bool = Field(
        True, description="Payload in memory shared with clients on this host: the shm plane."
    )

    tls_certificate_file: str = Field(
        "", description="PEM file: the server's certificate and its chain. Empty: no TLS."
    )
    tls_key_file: str = Field("", description="PEM file: the certificate's key, not encrypted.")
    tls_client_ca_file: str = Field(
        "", description="PEM file: who signs clients' certificates; then each must show one."
    )

    nixl: bool = Field(
        False,
        description="Payload by one-sided copies: the nixl plane; needs nixl-cu12 and tcp plane.",
    )

    @property
    def has_data_port(self) -> bool:
        """Whether the tcp plane listens."""
        if self.data_listen == "off":
            return False
        return bool(self.data_listen) or not self.listen.startswith("unix:")

    @field_validator("listen", "data_listen", "metrics_listen")
    @classmethod
    def _port_exists(cls, listen: str) -> str:
        port = listen.rpartition(":")[2]
        if not listen.startswith("unix:") and port.isdecimal() and int(port) > 65_535:
            raise ValueError(f"port {port} is above 65535")
        return listen

    @model_validator(mode="after")
    def _tls_is_whole(self) -> "ServerConfig":
        for key, needed in (
            ("tls_certificate_file", "tls_key_file"),
            ("tls_key_file", "tls_certificate_file"),
            ("tls_client_ca_file", "tls_certificate_file"),
        ):
            if getattr(self, key) and not getattr(self, needed):
                raise ValueError(f"{key} needs {needed}, which is not set")
        return self

    drain_timeout_s: float = Field(
        30.0, ge=0, le=3600, description="How long SIGTERM waits for open transfers, seconds."
    )
    metrics_listen: str = Field(
        "",
        pattern=r"^(|.+:\d{1,5})$",
        description="HOST:PORT of the Prometheus metrics (http://HOST:PORT/metrics); empty: none.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe message that is logged."
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Server processes behind listen, on one tree; each has [limits].",
    )

    @model_validator(mode="after")
    def _workers_have_addresses(self) -> "ServerConfig":
        if self.workers > 1 and self.listen.startswith("unix:"):
            raise ValueError("listen on HOST:PORT with workers above 1: a unix: socket has one")
        for name in ("data_listen", "metrics_listen"):
            port = getattr(self, name).rpartition(":")[2]
            if port.isdecimal() and int(port) and int(port) + self.workers - 1 > 65_535:
                raise ValueError(f"{name}: each worker has its own port, the last above 65535")
        return self


class StoreConfig(_Section):
    """[store]"""

    root: str = Field("", description="Directory of the chunk files; must be set.")
    durability: Literal["process", "power"] = Field(
        "process",
        description="What an acknowledged chunk survives: a killed server, or power loss (fsync).",
    )
    io_threads: int = Field(64, ge=1, le=1024, description="Threads for blocking file calls.")
    io_timeout_s: float = Field(
        30.0,
        ge=0.05,
        le=3600,
        description="File calls that take longer fail their request; waiting for a thread counts.",
    )
    open_files_max: int = Field(
        16384, ge=64, le=1 << 20, description="Chunk files held open, readers and writers together."
    )
    owner_lease_s: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="A server not heard of for so long is dead; its unfinished files are removed.",
    )
    sweep_interval_s: float = Field(
        3600.0, ge=1, le=86400, description="Pause between two rounds of removing such files."
    )
    known_chunks_max: int = Field(
        1 << 20, ge=0, le=1 << 28, description="Chunks remembered as present (or as absent)."
    )
    known_ttl_s: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="How long a lookup trusts that a chunk seen on the tree is still there.",
    )
    known_absent_ttl_s: float = Field(
        0.0,
        ge=0,
        le=60,
        description="The same for a missed one; 0: what any server has stored is found at once.",
    )
    quarantine_size_bytes_max: ByteSize = Field(
        ByteSize(1 << 30), description="Damaged files kept as evidence, all together, bytes."
    )


class CapacityConfig(_Section):
    """[capacity]"""

    size_bytes_max: ByteSize = Field(
        ByteSize(0),
        description="Chunk files on the tree, by all servers together, bytes; 0: no cap.",
    )
    files_max: int = Field(0, ge=0, description="The same in files; 0: no cap.")
    tenant_size_bytes_max: ByteSize = Field(
        ByteSize(0),
        description="Each tenant's chunk files, bytes; [tenants.NAME] may differ.",
    )
    tenant_files_max: int = Field(0, ge=0, description="The same in files; 0: no cap.")
    high_watermark: float = Field(
        0.95, gt=0, le=1, description="Part of a cap above which eviction starts."
    )
    low_watermark: float = Field(0.9, gt=0, le=1, description="Part of a cap at which it stops.")
    ttl_s: float = Field(
        0.0, ge=0, description="A chunk that nobody has used for so long is evicted; 0: never."
    )
    touch_interval_s: float = Field(
        60.0,
        ge=1,
        le=86400,
        description="A chunk's time of last use is written to its file at most this often.",
    )
    exchange_interval_s: float = Field(
        1.0,
        ge=0.05,
        le=60,
        description="How often servers of one tree tell each other their usage.",
    )
    lease_ttl_s_max: float = Field(
        600.0, gt=0, le=86400, description="The longest lease that a lookup may ask for."
    )
    leased_chunks_max: int = Field(
        1 << 18, ge=1, le=1 << 24, description="Chunks leased at once; more are refused, retryable."
    )

    @model_validator(mode="after")
    def _watermarks(self) -> "CapacityConfig":
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark must not be above high_watermark")
        if 0 < self.ttl_s < 2 * self.touch_interval_s:
            raise ValueError(
                "ttl_s must be at least twice touch_interval_s: else chunks in use would expire"
            )
        return self


class TenantConfig(_Section):
    """[tenants.NAME]: what differs for one tenant."""

    size_bytes_floor: ByteSize = Field(
        ByteSize(0), description="Bytes that eviction for other tenants never takes."
    )
    size_bytes_max: ByteSize = Field(
        ByteSize(0),
        description="The tenant's chunk files, bytes; 0: as capacity.tenant_size_bytes_max says.",
    )
    files_max: int = Field(
        0, ge=0, description="The same in files; 0: as capacity.tenant_files_max says."
    )


class LimitsConfig(_Section):
    """[limits]"""

    chunks_max: int = Field(65536, ge=1, le=1 << 20, description="Chunks in one descriptor.")
    message_size_bytes_max: ByteSize = Field(
        ByteSize(8 << 20), ge=64 << 10, le=256 << 20, description="One gRPC message, bytes."
    )
    frame_size_bytes: ByteSize = Field(
        ByteSize(1 << 20), ge=4096, le=64 << 20, description="Payload in one frame, bytes."
    )
    frames_in_flight: int = Field(
        8, ge=1, le=1024, description="Frames of one store in memory that are not written yet."
    )
    staging_size_bytes: ByteSize = Field(
        ByteSize(256 << 20),
        description="Frames of all transfers in memory together, bytes; shared out fairly.",
    )
    transfers_max: int = Field(
        256, ge=1, le=65536, description="Stores and fetches open at once; further ones must retry."
    )
    lookups_max: int = Field(
        1024,
        ge=1,
        le=65536,
        description="Lookups and deletes open at once; further ones must retry.",
    )


class LustreConfig(_Section):
    """[lustre]; read only where the root lies on Lustre."""

    stripe_count: int = Field(
        1,
        ge=0,
        le=2000,
        description="Storage targets (OSTs) a new chunk file lies on; 0 leaves the root's layout.",
    )
    stripe_size_bytes: ByteSize = Field(
        ByteSize(0),
        ge=0,
        le=(4 << 30) - (64 << 10),
        multiple_of=64 << 10,
        description="Bytes on a target before the next; multiple of 64 KiB, 0: the file system's.",
    )
    dom_size_bytes: ByteSize = Field(
        ByteSize(0),
        ge=0,
        le=1 << 30,
        multiple_of=64 << 10,
        description="First bytes of a file, kept on its MDT; multiple of 64 KiB, 0: none.",
    )
    mdt_count: int = Field(
        0,
        ge=0,
        le=2000,
        description="Metadata targets (MDTs) a new directory is spread over; 0 leaves the root's.",
    )

    @model_validator(mode="after")
    def _layout_is_set(self) -> "LustreConfig":
        if not self.stripe_count and (self.stripe_size_bytes or self.dom_size_bytes):
            raise ValueError("stripe_size_bytes, dom_size_bytes need a stripe_count above 0")
        return self


class Config(_Section):
    """All settings of one server process."""

    server: ServerConfig = ServerConfig()
    store: StoreConfig = StoreConfig()
    capacity: CapacityConfig = CapacityConfig()
    tenants: dict[str, TenantConfig] = Field(
        {}, description="By name of the tenant, in a table [tenants.NAME]."
    )
    limits: LimitsConfig = LimitsConfig()
    lustre: LustreConfig = LustreConfig()

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Config":
        if self.limits.frame_size_bytes + (64 << 10) > self.limits.message_size_bytes_max:
            raise ValueError(
                "limits.frame_size_bytes must be at least 64 KiB below "
                "limits.message_size_bytes_max"
            )
        if self.limits.staging_size_bytes < 4 * self.limits.frame_size_bytes:
            raise ValueError("limits.staging_size_bytes must be at least 4 limits.frame_size_bytes")
        cap = self.capacity.size_bytes_max
        floors = sum(tenant.size_bytes_floor for tenant in self.tenants.values())
        if cap and floors > cap * self.capacity.low_watermark:
            raise ValueError(
                f"the tenants' size_bytes_floor add up to {floors} bytes, more than "
                f"capacity.low_watermark of capacity.size_bytes_max ({cap})"
            )
        for name in self.tenants:
            check_tenant(name)
        return self


def load_config(path: Path | None, overrides: Mapping[str, Mapping[str, Any]]) -> Config:
    """Defaults, then the file, then `overrides` (section -> key -> value).

    Raises:
        InvalidRequest: naming file, section and key of everything that is wrong.
    """
    values: dict[str, Any] = {}
    source = "--set or options"
    if path is not None:
        source = str(path)
        try:
            values = tomllib.loads(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidRequest(f"cannot read config {path}: {error}") from error
    values = {
        **overrides,
        **{section: _merged(base, overrides.get(section, {})) for section, base in values.items()},
    }
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, item['loc']))}: unknown, see `kvserve serve --print-config`"
            if item["type"] == "extra_forbidden"
            else f"  {'.'.join(map(str, item['loc']))}: {item['msg']} (got {item['input']!r:.80})"
            for item in error.errors()
        ]
        raise InvalidRequest(f"invalid settings in {source}:\n" + "\n".join(lines)) from error
    return config


def _merged(base: Any, over: Mapping[str, Any]) -> Any:
    """`base` with what `over` says of its keys; tables in it (a tenant's) are merged, too."""
    if not isinstance(base, dict):
        return base  # no section: the validation says so
    changed = {
        key: _merged(base[key], value)
        if isinstance(value, Mapping) and isinstance(base.get(key), dict)
        else value
        for key, value in over.items()
    }
    return {**base, **changed}


def parse_value(text: str) -> Any:
    """A value from the command line as TOML would read it; what is no TOML value is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def render_toml(config: Config, *, with_comments: bool) -> str:
    """The settings as a TOML file; with comments, the documented example."""
    lines: list[str] = []
    for section_name in type(config).model_fields:
        section = getattr(config, section_name)
        if isinstance(section, BaseModel):
            lines += _render_section(section_name, section, with_comments=with_comments)
            continue
        for name, tenant in section.items():
            lines += _render_section(f"tenants.{json.dumps(name)}", tenant, with_comments=False)
        if with_comments and not section:
            example = _render_section("tenants.NAME", TenantConfig(), with_comments=True)
            lines += [f"# {line}".rstrip() for line in example[:-1]] + [""]
    return "\n".join(lines)


def _render_section(name: str, section: BaseModel, *, with_comments: bool) -> list[str]:
    lines = [f"[{name}]"]
    for key, field in type(section).model_fields.items():
        if with_comments:
            lines.append(f"# {field.description}")
        value = getattr(section, key)
        # JSON's strings and booleans are TOML's.
        text = json.dumps(value) if isinstance(value, str | bool) else str(value)
        lines.append(f"{key} = {text}")
    return [*lines, ""]
