"""Settings: defaults, files, overrides, and messages that name what is wrong and where."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize, ValidationError

from kvserve.config import Config, TenantConfig, load_config, parse_value, render_toml
from kvserve.errors import InvalidRequest
from kvserve.open_tree import quotas_of
from kvserve.policy.quota import Amount


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_toml(text: str | bytes) -> Path:
        path = tmp_path / "kvserve.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_toml


class TestGoodSettings:
    def test_without_a_file_the_defaults_hold(self) -> None:
        assert load_config(None, {}) == Config()

    def test_a_file_overrides_defaults_and_arguments_override_the_file(self, write: Any) -> None:
        path = write("[store]\nroot = '/a'\nio_threads = 4\n[limits]\nchunks_max = 10\n")
        config = load_config(path, {"store": {"root": "/b"}, "server": {"log_level": "debug"}})
        assert config.store.root == "/b"
        assert config.store.io_threads == 4
        assert config.limits.chunks_max == 10
        assert config.server.log_level == "debug"
        assert config.server.listen == Config().server.listen

    def test_values_from_a_command_line_are_text(self) -> None:
        limits = {"chunks_max": "12", "frame_size_bytes": "2MiB", "message_size_bytes_max": "16MiB"}
        parsed = {key: parse_value(text) for key, text in limits.items()}
        drain = {"drain_timeout_s": parse_value("1.5")}
        config = load_config(None, {"limits": parsed, "server": drain})
        assert config.limits.chunks_max == 12
        assert config.limits.frame_size_bytes == 2 << 20
        assert config.server.drain_timeout_s == 1.5

    @pytest.mark.parametrize(
        "listen", ["127.0.0.1:0", "[::1]:7411", "localhost:80", "unix:/run/kv.sock", "0.0.0.0:1"]
    )
    def test_addresses(self, listen: str) -> None:
        assert load_config(None, {"server": {"listen": listen}}).server.listen == listen

    def test_a_tenants_keys_are_set_one_by_one_over_the_file(self, write: Any) -> None:
        path = write("[tenants.b]\nfiles_max = 3\nsize_bytes_max = 7\n[tenants.c]\nfiles_max = 1\n")
        config = load_config(path, {"tenants": {"b": {"size_bytes_max": 9}, "d": {"files_max": 2}}})
        assert config.tenants["b"] == TenantConfig(files_max=3, size_bytes_max=ByteSize(9))
        assert config.tenants["c"].files_max == 1
        assert config.tenants["d"].files_max == 2

    def test_the_default_address_is_loopback(self) -> None:
        """G1: nobody else can reach a server that nobody configured."""
        assert Config().server.listen.startswith("127.0.0.1:")

    def test_settings_cannot_be_changed_later(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            Config().store.root = "/elsewhere"  # type: ignore[misc]


BAD_FILES = {
    "unknown section": ("[storage]\nroot = '/a'\n", "storage: "),
    "unknown key": ("[store]\nrot = '/a'\n", "store.rot: "),
    "key outside a section": ("root = '/a'\n", "root: "),
    "wrong type": ("[store]\nio_threads = 'many'\n", "store.io_threads: .*'many'"),
    "table for a value": ("[store.io_threads]\nx = 1\n", "store.io_threads: "),
    "value for a table": ("store = 3\n", "store: .*3"),
    "too small": ("[store]\nio_threads = 0\n", "store.io_threads: .*greater than or equal to 1"),
    "too large": ("[limits]\nchunks_max = 99999999\n", "limits.chunks_max: .*1048576"),
    "not one of": ("[store]\ndurability = 'none'\n", "store.durability: .*'process' or 'power'"),
    "bad size": ("[limits]\nframe_size_bytes = '1 banana'\n", "limits.frame_size_bytes: "),
    "bad address": ("[server]\nlisten = 'localhost'\n", "server.listen: .*'localhost'"),
    "empty address": ("[server]\nlisten = ''\n", "server.listen: "),
    "not a multiple": (
        "[lustre]\ndom_size_bytes = 100000\n",
        "lustre.dom_size_bytes: .*multiple of 65536",
    ),
    "layout without stripes": (
        "[lustre]\nstripe_count = 0\ndom_size_bytes = '64KiB'\n",
        "lustre: .*need a stripe_count above 0",
    ),
    "all targets": ("[lustre]\nstripe_count = -1\n", "lustre.stripe_count: "),
    "nan": ("[server]\ndrain_timeout_s = nan\n", "server.drain_timeout_s: "),
    "inf": ("[server]\ndrain_timeout_s = inf\n", "server.drain_timeout_s: "),
}


class TestBadSettings:
    @pytest.mark.parametrize("name", BAD_FILES)
    def test_the_message_names_file_section_and_key(self, write: Any, name: str) -> None:
        """G2: a bad value never turns into a silent default."""
        text, words = BAD_FILES[name]
        path = write(text)
        with pytest.raises(InvalidRequest, match=words) as caught:
            load_config(path, {})
        assert str(path) in str(caught.value)

    def test_everything_that_is_wrong_is_said_at_once(self, write: Any) -> None:
        path = write("[store]\nrot = 1\nio_threads = 0\n[server]\nlog_level = 'loud'\n")
        with pytest.raises(InvalidRequest) as caught:
            load_config(path, {})
        for key in ("store.rot", "store.io_threads", "server.log_level"):
            assert key in str(caught.value)

    def test_bad_toml_names_file_and_line(self, write: Any) -> None:
        path = write("[store]\nroot = \n")
        with pytest.raises(InvalidRequest, match=r"cannot read config .*line 2"):
            load_config(path, {})

    def test_a_file_that_is_not_text(self, write: Any) -> None:
        with pytest.raises(InvalidRequest, match=r"cannot read config .*kvserve\.toml"):
            load_config(write(b"\xff\xfe"), {})

    def test_a_missing_file_is_not_the_defaults(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match=r"cannot read config .*absent\.toml"):
            load_config(tmp_path / "absent.toml", {})

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            ({"store": {"rot": 1}}, "invalid settings in --set or options:\n  store.rot: "),
            ({"limits": {"chunks_max": "x"}}, "limits.chunks_max: .*'x'"),
            ({"nothing": {"a": "b"}}, "nothing: "),
        ],
    )
    def test_bad_overrides(self, overrides: Any, words: str) -> None:
        with pytest.raises(InvalidRequest, match=words):
            load_config(None, overrides)

    def test_a_long_value_is_cut_in_the_message(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            load_config(None, {"store": {"io_threads": "9" * 5000}})
        assert len(str(caught.value)) < 500

    def test_a_frame_must_fit_into_a_message(self) -> None:
        sizes = {"frame_size_bytes": 1 << 20, "message_size_bytes_max": 1 << 20}
        with pytest.raises(InvalidRequest, match="frame_size_bytes must be at least 64 KiB below"):
            load_config(None, {"limits": sizes})

    def test_the_rule_between_two_keys_names_the_file_too(self, write: Any) -> None:
        path = write("[limits]\nframe_size_bytes = '8MiB'\n")
        with pytest.raises(InvalidRequest, match=r"kvserve\.toml"):
            load_config(path, {})

    def test_an_override_does_not_hide_a_bad_section(self, write: Any) -> None:
        with pytest.raises(InvalidRequest, match="server: "):
            load_config(write("server = 3\n"), {"server": {"log_level": "info"}})

    def test_a_truth_value_is_no_number(self, write: Any) -> None:
        with pytest.raises(InvalidRequest, match=r"store\.io_threads"):
            load_config(write("[store]\nio_threads = true\n"), {})


class TestRendering:
    @pytest.mark.parametrize("with_comments", [True, False])
    def test_what_is_rendered_is_read_back_as_the_same(
        self, write: Any, with_comments: bool
    ) -> None:
        config = load_config(
            None,
            {
                "store": {"root": "/srv/kv", "durability": "power"},
                "limits": {"chunks_max": 7},
                "server": {"listen": "unix:/run/kv.sock", "drain_timeout_s": 0.5},
            },
        )
        assert load_config(write(render_toml(config, with_comments=with_comments)), {}) == config

    def test_every_key_is_there_and_has_a_comment(self) -> None:
        text = render_toml(Config(), with_comments=True)
        values = tomllib.loads(text)
        for name in Config.model_fields:
            section = getattr(Config(), name)
            if name == "tenants":  # a table for each tenant, of which there is none
                assert "# [tenants.NAME]" in text
                section, values[name] = TenantConfig(), TenantConfig.model_fields
            prefix = "# " if name == "tenants" else ""
            assert set(values[name]) == set(type(section).model_fields)
            for key, field in type(section).model_fields.items():
                assert field.description, f"{name}.{key} has no description"
                assert f"{prefix}# {field.description}\n{prefix}{key} = " in text

    @pytest.mark.parametrize("root", ['/a"b', "/a\\b", "/a\nb"])
    def test_odd_paths_are_escaped(self, write: Any, root: str) -> None:
        config = load_config(None, {"store": {"root": root}})
        assert load_config(write(render_toml(config, with_comments=False)), {}) == config


class TestCapacity:
    def test_caps_are_off_and_sizes_may_have_units(self) -> None:
        assert not quotas_of(Config()).total
        assert not quotas_of(Config()).default.ceiling
        config = load_config(
            None,
            {
                "capacity": {"size_bytes_max": "1TiB", "files_max": 9, "tenant_files_max": 3},
                "tenants": {"gold": {"size_bytes_floor": "10GiB", "size_bytes_max": "20GiB"}},
            },
        )
        quotas = quotas_of(config)
        assert quotas.total == Amount(1 << 40, 9)
        assert quotas.of("anybody").ceiling == Amount(0, 3)
        gold = quotas.of("gold")
        assert gold.ceiling == Amount(20 << 30, 3), "what it does not say is as for all"
        assert gold.floor_size_bytes == 10 << 30

    @pytest.mark.parametrize(
        ("sections", "named"),
        [
            ({"capacity": {"low_watermark": 0.96}}, "low_watermark"),
            ({"capacity": {"high_watermark": 1.1}}, "high_watermark"),
            ({"capacity": {"lease_ttl_s_max": 0.0}}, "lease_ttl_s_max"),
            ({"tenants": {"../x": {}}}, "tenant"),
            ({"tenants": {"t": {"size_bytes_cap": 5}}}, "tenants.t.size_bytes_cap"),
            (
                {
                    "capacity": {"size_bytes_max": 1000},
                    "tenants": {"t": {"size_bytes_floor": 500}, "u": {"size_bytes_floor": 401}},
                },
                "901 bytes",
            ),
        ],
        ids=str,
    )
    def test_what_cannot_be_is_refused(self, sections: Any, named: str) -> None:
        with pytest.raises(InvalidRequest, match=named):
            load_config(None, sections)

    def test_floors_up_to_the_low_watermark_are_fine(self) -> None:
        tenants = {"t": {"size_bytes_floor": 500}, "u": {"size_bytes_floor": 400}}
        load_config(None, {"capacity": {"size_bytes_max": 1000}, "tenants": tenants})
