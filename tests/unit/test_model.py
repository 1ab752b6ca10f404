"""Sizes, the rules that constructors enforce, and identity: what makes a chunk another chunk."""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import InvalidRequest
from kvserve.model import (
    CHUNK_TOKENS_MAX,
    DTYPE_BITS,
    LAYERS_MAX,
    SLICE_SIZE_BYTES_MAX,
    ChunkStatus,
    Descriptor,
    LayerKind,
    LayerSpec,
    Layout,
    ModelIdentity,
    Shard,
    Span,
    Verdict,
    attention,
    check_layers,
    latent,
    layer_runs,
    leading_hits,
    opaque,
)
from kvserve.names import NAME_SIZE_BYTES_MAX
from tests.unit.samples import HYBRID, SMALL, descriptor_of, hash_of, identity_of

KIB = 1024


def llama_8b(chunk_tokens: int = 16) -> Layout:
    spec = attention(kv_heads=8, head_dim=128)
    return Layout.uniform(layer_count=32, spec=spec, dtype="bfloat16", chunk_tokens=chunk_tokens)


class TestLayoutSizes:
    def test_llama_3_1_8b_keeps_128_kib_a_token(self) -> None:
        assert llama_8b(chunk_tokens=1).chunk_size_bytes == 128 * KIB

    def test_llama_slice_of_16_tokens_is_64_kib(self) -> None:
        layout = llama_8b(chunk_tokens=16)
        assert layout.slice_sizes == (64 * KIB,) * 32
        assert layout.chunk_size_bytes == 2048 * KIB

    def test_mla_keeps_one_latent_of_576_a_token(self) -> None:
        """DeepSeek: kv_lora_rank 512 + qk_rope_head_dim 64, K and V in one vector."""
        layout = Layout.uniform(
            layer_count=61, spec=latent(512 + 64), dtype="bfloat16", chunk_tokens=16
        )
        assert layout.slice_sizes == (576 * 16 * 2,) * 61
        assert layout.axes == "tokens,dim"

    def test_layers_may_differ_in_size(self) -> None:
        assert HYBRID.slice_sizes == (2 * 4 * 2 * 8 * 2, 4 * 24 * 2, 100)
        assert HYBRID.chunk_size_bytes == 256 + 192 + 100
        assert HYBRID.layer_count == 3

    def test_opaque_size_does_not_depend_on_tokens_nor_dtype(self) -> None:
        sizes = {
            Layout(dtype, tokens, (opaque(77),)).slice_sizes[0]
            for dtype in DTYPE_BITS
            for tokens in (1, 64)
        }
        assert sizes == {77}

    @pytest.mark.parametrize(
        ("dtype", "size"), [("float32", 12), ("float16", 6), ("float8_e4m3", 3), ("int4", 2)]
    )
    def test_element_sizes_and_half_bytes_round_up(self, dtype: str, size: int) -> None:
        assert Layout(dtype, 3, (latent(1),)).slice_sizes == (size,)

    def test_payload_is_layer_major(self) -> None:
        descriptor = descriptor_of(chunks=5, layout=HYBRID)
        assert descriptor.payload_offsets == (0, 5 * 256, 5 * (256 + 192))
        assert descriptor.payload_size_bytes == 5 * (256 + 192 + 100)

    def test_offsets_follow_the_layer_index_whatever_the_delivery_order(self) -> None:
        forward = descriptor_of(layout=HYBRID)
        backward = descriptor_of(layout=HYBRID, layer_order=(2, 1, 0))
        assert backward.payload_offsets == forward.payload_offsets

    def test_span_is_half_open(self) -> None:
        assert Span(3, 10).size_bytes == 7


class TestLayoutRules:
    @pytest.mark.parametrize(
        ("build", "words"),
        [
            (lambda: Layout("bf16", 16, (latent(8),)), "dtype 'bf16' is unknown; use one of"),
            (lambda: Layout("int8", 0, (latent(8),)), "chunk_tokens must be 1 to 65536, got 0"),
            (
                lambda: Layout("int8", CHUNK_TOKENS_MAX + 1, (latent(8),)),
                "chunk_tokens must be 1 to 65536, got 65537",
            ),
            (lambda: Layout("int8", 16, ()), "layers must be 1 to 4096, got 0"),
            (
                lambda: Layout("int8", 16, (latent(8),) * (LAYERS_MAX + 1)),
                "layers must be 1 to 4096, got 4097",
            ),
            (lambda: Layout("int8", 16, (latent(8),), axes=""), "axes must be 1 to 64"),
            (lambda: Layout("int8", 16, (latent(8),), axes="a" * 65), "axes must be 1 to 64"),
            (lambda: Layout("int8", 16, (latent(8),), axes="Tokens\n"), "axes must be 1 to 64"),
            (
                lambda: Layout("int8", 2, (latent(8), latent(SLICE_SIZE_BYTES_MAX))),
                r"layers\[1\]: a slice of 2147483648 bytes",
            ),
            (
                lambda: Layout.uniform(
                    layer_count=0, spec=latent(8), dtype="int8", chunk_tokens=16
                ),
                "layer_count must be 1 to 4096, got 0",
            ),
            (
                lambda: Layout.uniform(
                    layer_count=1 << 40, spec=latent(8), dtype="int8", chunk_tokens=16
                ),
                "layer_count must be 1 to 4096",
            ),
        ],
    )
    def test_layout_states_the_broken_rule(self, build: Callable[[], object], words: str) -> None:
        with pytest.raises(InvalidRequest, match=words):
            build()

    @pytest.mark.parametrize(
        ("build", "words"),
        [
            (lambda: attention(0, 128), "kv_heads must be 1 to .* for ATTENTION, got 0"),
            (lambda: attention(8, 0), "head_dim must be 1 to .* for ATTENTION, got 0"),
            (lambda: attention(-8, 128), "kv_heads must be 1 to .* got -8"),
            (lambda: latent(0), "head_dim must be 1 to .* for LATENT, got 0"),
            (lambda: opaque(0), "opaque_bytes must be 1 to .* for OPAQUE, got 0"),
            (lambda: opaque(SLICE_SIZE_BYTES_MAX + 1), "opaque_bytes must be 1 to"),
            (
                lambda: LayerSpec(LayerKind.ATTENTION, 8, 128, opaque_bytes=1),
                "opaque_bytes must be 0 for ATTENTION, got 1",
            ),
            (
                lambda: LayerSpec(LayerKind.LATENT, kv_heads=2, head_dim=8),
                "kv_heads must be 0 for LATENT, got 2",
            ),
            (
                lambda: LayerSpec(LayerKind.OPAQUE, head_dim=8, opaque_bytes=4),
                "head_dim must be 0 for OPAQUE, got 8",
            ),
            (lambda: LayerSpec(9, 1, 1), "unknown layer kind 9"),  # type: ignore[arg-type]
        ],
    )
    def test_layer_spec_states_the_broken_rule(
        self, build: Callable[[], object], words: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=words):
            build()

    def test_equal_neighbours_are_run_length_coded_in_order(self) -> None:
        a, b = latent(1), latent(2)
        assert layer_runs([a, a, b, a]) == [(a, 2), (b, 1), (a, 1)]
        assert layer_runs([]) == []


class TestDescriptorRules:
    @pytest.mark.parametrize(
        ("hashes", "words"),
        [
            ((), "chunk_hashes is empty: a descriptor names at least one chunk"),
            ((b"x" * 15,), "a chunk hash of 15 bytes: must be 16 to 64"),
            ((b"x" * 65,), "a chunk hash of 65 bytes: must be 16 to 64"),
            ((b"",), "a chunk hash of 0 bytes"),
            ((b"x" * 16, b"y" * 17), "chunk_hashes differ in size"),
            (
                (b"x" * 16, b"y" * 16, b"x" * 16),
                r"chunk_hashes\[2\] (78)+ is in the descriptor twice",
            ),
        ],
        ids=["none", "short", "long", "empty", "mixed", "twice"],
    )
    def test_chunk_hashes(self, hashes: tuple[bytes, ...], words: str) -> None:
        with pytest.raises(InvalidRequest, match=words):
            Descriptor(identity_of(), hashes)

    @pytest.mark.parametrize("size", [16, 20, 32, 64])
    def test_hash_sizes_that_engines_use_are_accepted(self, size: int) -> None:
        assert Descriptor(identity_of(), (hash_of(0, size), hash_of(1, size))).chunk_count == 2

    @pytest.mark.parametrize(
        ("order", "words"),
        [
            ((0, 2), "layer_order holds layer 2; this layout has layers 0 to 1"),
            ((-1,), "layer_order holds layer -1; this layout has layers 0 to 1"),
            ((1, 1), "layer_order holds a layer twice"),
            ((0, 1, 0), "layer_order holds a layer twice"),
        ],
    )
    def test_layer_order(self, order: tuple[int, ...], words: str) -> None:
        with pytest.raises(InvalidRequest, match=words):
            descriptor_of(layer_order=order)

    def test_layer_order_defaults_to_the_models(self) -> None:
        assert descriptor_of(layout=HYBRID).layer_order == (0, 1, 2)

    def test_layer_order_may_be_a_part_and_in_any_order(self) -> None:
        assert descriptor_of(layout=HYBRID, layer_order=(2, 0)).layer_order == (2, 0)
        check_layers("layers", (1,), HYBRID)

    @pytest.mark.parametrize(
        "tenant",
        ["", "a/b", "a\0b", "..", ".", ".hidden", "../x", "x" * 65, "x" * 5000, "a b", "a\n", "é"],
    )
    def test_tenant_cannot_leave_its_directory(self, tenant: str) -> None:
        words = "tenant .* must be 1 to 64 of A-Z a-z 0-9 . _ - and not start with '.'"
        with pytest.raises(InvalidRequest, match=words) as caught:
            descriptor_of(tenant=tenant)
        assert len(str(caught.value)) < 500, "the message must not echo 5,000 characters"

    @pytest.mark.parametrize("tenant", ["a", "team-1", "_x", "-", "A.b_C-9", "x" * 64])
    def test_good_tenants(self, tenant: str) -> None:
        assert descriptor_of(tenant=tenant).tenant == tenant

    @pytest.mark.parametrize(
        ("rank", "count"), [(-1, 1), (1, 1), (0, 0), (0, -1), (8, 8), (0, 65537)]
    )
    def test_shard_coordinates(self, rank: int, count: int) -> None:
        with pytest.raises(InvalidRequest, match=f"shard: .* got rank {rank} of {count}"):
            Shard(rank, count)

    def test_key_names_the_chunk_and_everything_around_it(self) -> None:
        descriptor = descriptor_of(tenant="t", shard=Shard(1, 2))
        key = descriptor.key(2)
        assert (key.tenant, key.identity, key.shard) == ("t", descriptor.identity, Shard(1, 2))
        assert key.chunk_hash == descriptor.chunk_hashes[2]


BAD_NAMES = [
    ("a\0b", "has a NUL, control or other unprintable sign"),
    ("a\nb", "has a NUL, control or other unprintable sign"),
    ("a\x7f", "has a NUL, control or other unprintable sign"),
    ("a\ud800", "has a NUL, control or other unprintable sign"),
    ("..", "must not hold '..' nor start or end with '/'"),
    ("../../x", "must not hold '..' nor start or end with '/'"),
    ("a/../b", "must not hold '..' nor start or end with '/'"),
    ("/etc", "must not hold '..' nor start or end with '/'"),
    ("org/", "must not hold '..' nor start or end with '/'"),
    ("x" * 5000, "is 5000 bytes long; at most 512"),
    ("é" * 257, "is 514 bytes long; at most 512"),
]


class TestNames:
    @pytest.mark.parametrize("field", ["model", "revision", "adapter", "salt"])
    @pytest.mark.parametrize(("value", "words"), BAD_NAMES)
    def test_bad_names_are_refused_naming_the_field(
        self, field: str, value: str, words: str
    ) -> None:
        with pytest.raises(InvalidRequest) as caught:
            identity_of(**{field: value})
        message = str(caught.value)
        assert message.startswith(f"identity.{field} ")
        assert words in message
        assert len(message) < 500, "the message must not echo 5,000 characters"

    @pytest.mark.parametrize("field", ["model", "revision"])
    def test_model_and_revision_are_mandatory(self, field: str) -> None:
        """A2: two checkpoints under one name give different KV."""
        with pytest.raises(InvalidRequest, match=rf"identity\.{field} must not be empty"):
            identity_of(**{field: ""})

    @pytest.mark.parametrize(
        "name", ["meta-llama/Llama-3.1-8B", "a..b", "模型/中文", "x" * NAME_SIZE_BYTES_MAX, "a b@1"]
    )
    def test_good_names(self, name: str) -> None:
        assert identity_of(model=name).model == name


BASE = ModelIdentity("m1", "rev1", Layout("bfloat16", 16, (attention(8, 128),) * 4))


def with_layers(*layers: LayerSpec) -> ModelIdentity:
    return replace(BASE, layout=replace(BASE.layout, layers=layers))


CHANGES = {
    "model": replace(BASE, model="m2"),
    "revision": replace(BASE, revision="rev2"),
    "adapter": replace(BASE, adapter="lora-1"),
    "salt": replace(BASE, salt="tenant user 7"),
    "dtype": replace(BASE, layout=replace(BASE.layout, dtype="float16")),
    "dtype of another size": replace(BASE, layout=replace(BASE.layout, dtype="float8_e4m3")),
    "chunk_tokens": replace(BASE, layout=replace(BASE.layout, chunk_tokens=32)),
    "axes": replace(BASE, layout=replace(BASE.layout, axes="2,heads,tokens,dim")),
    "layers": with_layers(*(attention(8, 128),) * 5),
    "kv_heads": with_layers(attention(4, 128), *(attention(8, 128),) * 3),
    "head_dim": with_layers(attention(8, 64), *(attention(8, 128),) * 3),
    # 2 * 16 * 8 * 128 elements in every case: only the shape differs, not the size.
    "heads and dim swapped": with_layers(*(attention(128, 8),) * 4),
    "kind": with_layers(*(latent(2048),) * 4),
    "opaque_bytes": with_layers(*(opaque(65536),) * 4),
    "which layer differs": with_layers(
        attention(8, 128), attention(4, 128), attention(8, 128), attention(8, 128)
    ),
}


class TestIdentity:
    """T1, A1 to A4: whatever changes the bytes or their meaning changes the namespace."""

    @pytest.mark.parametrize("change", CHANGES)
    def test_changing_one_thing_gives_another_namespace(self, change: str) -> None:
        assert CHANGES[change].namespace != BASE.namespace
        assert CHANGES[change].encoded != BASE.encoded

    def test_all_the_changes_differ_from_one_another(self) -> None:
        assert len({identity.namespace for identity in CHANGES.values()}) == len(CHANGES)

    def test_no_field_is_left_out(self) -> None:
        """A new field must come with a change above (and, since it is on disks, a new encoding)."""
        names = {
            field.name for cls in (ModelIdentity, Layout, LayerSpec) for field in fields(cls)
        } - {"layout"}
        assert names <= set(CHANGES)

    def test_equal_identities_share_a_namespace(self) -> None:
        again = ModelIdentity("m1", "rev1", Layout("bfloat16", 16, (attention(8, 128),) * 4))
        assert again.namespace == BASE.namespace

    def test_namespace_is_128_bits_of_hex(self) -> None:
        assert len(bytes.fromhex(BASE.namespace)) == 16

    def test_names_with_separators_do_not_collide(self) -> None:
        """T2, A7: `/` -> `-SEP-` made two models share a file."""
        assert identity_of(model="org/a-SEP-b").namespace != identity_of(model="org/a/b").namespace

    @given(st.text("ab\\|,:\x7e", min_size=4, max_size=8))
    def test_the_encoding_of_names_is_injective(self, text: str) -> None:
        """However one text is divided among the four names, no two ways are encoded alike."""
        names = ("model", "revision", "adapter", "salt")
        divisions = {
            tuple(text[start:stop] for start, stop in pairwise((0, *cuts, len(text))))
            for cuts in combinations(range(1, len(text)), 3)
        }
        encodings = {
            identity_of(**dict(zip(names, parts, strict=True))).encoded for parts in divisions
        }
        assert len(encodings) == len(divisions)

    def test_model_name_cannot_imitate_another_field(self) -> None:
        assert identity_of(model="ab", adapter="c").encoded != identity_of(model="abc").encoded

    def test_tenant_and_shard_are_no_part_of_the_namespace_but_of_the_key(self) -> None:
        one, other = descriptor_of(tenant="a"), descriptor_of(tenant="b", shard=Shard(1, 2))
        assert one.identity.namespace == other.identity.namespace
        assert one.key(0) != other.key(0)


class TestVerdicts:
    def test_leading_hits_stops_at_the_first_miss(self) -> None:
        hit, miss = Verdict(ChunkStatus.HIT), Verdict(ChunkStatus.MISS_ABSENT)
        assert leading_hits([]) == 0
        assert leading_hits([miss, hit]) == 0
        assert leading_hits([hit, hit, miss, hit]) == 2
        assert leading_hits([hit, hit]) == 2
        assert leading_hits([Verdict(ChunkStatus.KNOWN), hit]) == 0, "only a HIT is a hit"

    def test_stored_means_readable(self) -> None:
        stored = {status for status in ChunkStatus if status.is_stored}
        assert stored == {ChunkStatus.HIT, ChunkStatus.STORED, ChunkStatus.KNOWN}

    def test_small_layout_is_what_the_other_tests_assume(self) -> None:
        assert SMALL.slice_sizes == (256, 256)
