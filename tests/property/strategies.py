"""Any valid object of the model, for hypothesis."""

from hypothesis import strategies as st

from kvserve.model import (
    DTYPE_BITS,
    Descriptor,
    Layout,
    ModelIdentity,
    Shard,
    attention,
    latent,
    opaque,
)

layer_specs = (
    st.builds(attention, st.integers(1, 64), st.integers(1, 256))
    | st.builds(latent, st.integers(1, 2048))
    | st.builds(opaque, st.integers(1, 100_000))
)
layouts = st.builds(
    Layout,
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
    chunk_tokens=st.integers(1, 256),
    layers=st.lists(layer_specs, min_size=1, max_size=12).map(tuple),
    axes=st.text("abcdefghijklmnopqrstuvwxyz0123456789_,", min_size=1, max_size=64),
)
_printable = st.characters(categories=("L", "N", "P", "S"), exclude_characters="/")
names = st.text(_printable, min_size=1, max_size=60).filter(lambda name: name != "..")
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
optional = st.just("") | paths
identities = st.builds(
    ModelIdentity, model=paths, revision=paths, layout=layouts, adapter=optional, salt=optional
)
tenants = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", fullmatch=True)
shards = st.integers(1, 65_536).flatmap(
    lambda count: st.builds(Shard, st.integers(0, count - 1), st.just(count))
)
hash_lists = st.integers(16, 64).flatmap(
    lambda size: st.lists(
        st.binary(min_size=size, max_size=size), min_size=1, max_size=8, unique=True
    ).map(tuple)
)


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    identity = draw(identities)
    layers = range(identity.layout.layer_count)
    order = draw(st.just(()) | st.lists(st.sampled_from(layers), unique=True).map(tuple))
    return Descriptor(
        identity,
        draw(hash_lists),
        tenant=draw(tenants),
        shard=draw(shards),
        layer_order=order,
    )
