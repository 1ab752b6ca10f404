"""Settings: one frozen section per reader, validated at once, unknown keys refused.

The only reader of configuration files. Defaults live here and nowhere else: the command line's help
and `deploy/kvserve.example.toml` are rendered from them, and a test compares.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator

from kvserve.errors import InvalidRequest


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
        True, description="Fetches into memory shared with clients on this host: the shm plane."
    )

    @field_validator("listen", "data_listen")
    @classmethod
    def _port_exists(cls, listen: str) -> str:
        port = listen.rpartition(":")[2]
        if not listen.startswith("unix:") and port.isdecimal() and int(port) > 65_535:
            raise ValueError(f"port {port} is above 65535")
        return listen

    drain_timeout_s: float = Field(
        30.0, ge=0, le=3600, description="How long SIGTERM waits for open transfers, seconds."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe message that is logged."
    )


class StoreConfig(_Section):
    """[store]"""

    root: str = Field("", description="Directory of the chunk files; must be set.")
    durability: Literal["process", "power"] = Field(
        "process",
        description="What an acknowledged chunk survives: a killed server, or power loss (fsync).",
    )
    io_threads: int = Field(16, ge=1, le=1024, description="Threads for blocking file calls.")
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
        1 << 20, ge=0, le=1 << 28, description="Chunks remembered as present, about 120 bytes each."
    )
    known_ttl_s: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="How long a lookup trusts that a chunk seen on the tree is still there.",
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
        8, ge=1, le=1024, description="Frames that one transfer holds in memory at most."
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


class Config(_Section):
    """All settings of one server process."""

    server: ServerConfig = ServerConfig()
    store: StoreConfig = StoreConfig()
    limits: LimitsConfig = LimitsConfig()


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
    for section, entries in overrides.items():
        base = values.setdefault(section, {})
        if isinstance(base, dict):
            values[section] = {**base, **entries}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, item['loc']))}: unknown, see deploy/kvserve.example.toml"
            if item["type"] == "extra_forbidden"
            else f"  {'.'.join(map(str, item['loc']))}: {item['msg']} (got {item['input']!r:.80})"
            for item in error.errors()
        ]
        raise InvalidRequest(f"invalid settings in {source}:\n" + "\n".join(lines)) from error
    if config.limits.frame_size_bytes + (64 << 10) > config.limits.message_size_bytes_max:
        raise InvalidRequest(
            f"invalid settings in {source}:\n  limits.frame_size_bytes must be at least 64 KiB "
            "below limits.message_size_bytes_max"
        )
    return config


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
        section: BaseModel = getattr(config, section_name)
        lines.append(f"[{section_name}]")
        for key, field in type(section).model_fields.items():
            if with_comments:
                lines.append(f"# {field.description}")
            value = getattr(section, key)
            # JSON's strings and booleans are TOML's.
            text = json.dumps(value) if isinstance(value, str | bool) else str(value)
            lines.append(f"{key} = {text}")
        lines.append("")
    return "\n".join(lines)
