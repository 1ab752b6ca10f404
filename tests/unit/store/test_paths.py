"""Names on disk: nothing leaves the root, no directory grows too large, temps follow Lustre."""

import re
from collections import Counter
from random import Random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvserve.model import Shard
from kvserve.store.paths import TempNames, chunk_path, namespace_dir, new_tag, shard_dir
from tests.unit.samples import descriptor_of, hash_of, identity_of

ENTRIES_MAX = 4096
CHUNKS = 10_000_000
SAMPLE = 1_000_000
PATH = chunk_path("t/ns/0of1", hash_of(1))


class TestChunkPaths:
    def test_the_layout_of_the_tree(self) -> None:
        key = descriptor_of(tenant="team-1", shard=Shard(3, 8)).key(0)
        namespace = identity_of().namespace
        assert namespace_dir(key) == f"team-1/{namespace}"
        assert shard_dir(key) == f"team-1/{namespace}/3of8"
        fan = f"{xxhash.xxh3_64_intdigest(key.chunk_hash) >> 52:03x}"
        path = chunk_path(shard_dir(key), key.chunk_hash)
        assert path == f"team-1/{namespace}/3of8/{fan}/{key.chunk_hash.hex()}"

    @given(st.binary(min_size=16, max_size=64))
    def test_a_hash_of_any_bytes_is_a_plain_name(self, chunk_hash: bytes) -> None:
        """Whatever an engine sends: hex only, so no `/`, no dot, no NUL."""
        assert re.fullmatch(r"d/[0-9a-f]{3}/[0-9a-f]{32,128}", chunk_path("d", chunk_hash))

    @given(st.binary(min_size=16, max_size=64), st.binary(min_size=16, max_size=64))
    def test_different_hashes_have_different_paths(self, one: bytes, other: bytes) -> None:
        """Also of different sizes: a prefix of a hash is another name."""
        assert (chunk_path("d", one) == chunk_path("d", other)) == (one == other)

    def test_tenant_namespace_and_shard_all_count(self) -> None:
        keys = [
            descriptor_of().key(0),
            descriptor_of(tenant="other").key(0),
            descriptor_of(shard=Shard(0, 2)).key(0),
            descriptor_of(shard=Shard(1, 2)).key(0),
        ]
        assert len({shard_dir(key) for key in keys}) == len(keys)

    def test_the_longest_names_fit_a_directory_entry(self) -> None:
        longest = chunk_path("d", bytes(64))
        temp = TempNames("aB3", Random(0)).beside(longest)
        assert len(temp.rpartition("/")[2]) <= 255
        # In quarantine a file's whole path becomes one name.
        key = descriptor_of(tenant="t" * 64, shard=Shard(65535, 65536)).key(0)
        assert len(chunk_path(shard_dir(key), bytes(64))) <= 255


def sha_like(number: int) -> bytes:
    return hash_of(number)


def counter(number: int) -> bytes:
    """The worst that an engine may do: consecutive numbers."""
    return number.to_bytes(16, "big")


def counter_in_front(number: int) -> bytes:
    return number.to_bytes(16, "little")


class TestFanOut:
    """T14, E4: no directory over 4,096 entries at 10 million chunks of one shard."""

    @pytest.mark.parametrize("make", [sha_like, counter, counter_in_front])
    def test_projected_to_ten_million_chunks(self, make: object) -> None:
        step = 1 if make is sha_like else 97
        sizes = Counter(
            chunk_path("", make(number * step))[1:4]  # type: ignore[operator]
            for number in range(SAMPLE // (10 if make is sha_like else 1))
        )
        assert len(sizes) <= ENTRIES_MAX, "directories beside one another"
        # A sample's largest directory stands out more than the whole's: mean + noise.
        mean = sum(sizes.values()) / 4096
        scale = CHUNKS / sum(sizes.values())
        excess_sigma = (max(sizes.values()) - mean) / mean**0.5
        assert excess_sigma < 6, "hashes are spread like random numbers"
        projected = mean * scale + excess_sigma * (mean * scale) ** 0.5
        assert projected <= ENTRIES_MAX

    def test_every_directory_is_used(self) -> None:
        fans = {chunk_path("", counter(number))[1:4] for number in range(100_000)}
        assert len(fans) == 4096


def is_lustre_temporary(name: str, target: str) -> bool:
    """Lustre's crush directory hash: does it place `name` where it places `target`?

    `.TARGET.XXXXXX`: six letters and digits, neither all of one case nor nearly all digits
    (`lu_name_is_temp_file`; stricter here, where it counts digits).
    """
    found = re.fullmatch(r"\.(.+)\.([0-9A-Za-z]{6})", name)
    if found is None or found[1] != target:
        return False
    suffix = found[2]
    lower = sum(map(str.islower, suffix))
    upper = sum(map(str.isupper, suffix))
    digits = sum(map(str.isdigit, suffix))
    return max(lower, upper) < 6 and digits < 5


class TestTemporaryNames:
    def test_the_rule_itself(self) -> None:
        assert is_lustre_temporary(".name.aB3dE6", "name")
        for bad in ("name.aB3dE6", ".name.abcdef", ".name.ABCDEF", ".name.12345a", ".name.a_3dE6"):
            assert not is_lustre_temporary(bad, "name")

    @given(st.integers(), st.sampled_from([PATH, "t/ns/identity"]))
    def test_every_name_keeps_lustres_rule(self, seed: int, path: str) -> None:
        """So that the rename stays on one metadata target."""
        random = Random(seed)
        directory, _, name = TempNames(new_tag(random), random).beside(path).rpartition("/")
        final_directory, _, target = path.rpartition("/")
        assert directory == final_directory, "a rename within one directory"
        assert is_lustre_temporary(name, target)
        assert not is_lustre_temporary(target, target), "the final name is hashed whole"

    @given(st.integers())
    def test_the_suffix_mixes_lower_upper_and_digits(self, seed: int) -> None:
        suffix = TempNames("aB3", Random(seed)).beside(PATH)[-6:]
        assert (
            sum(map(str.islower, suffix)),
            sum(map(str.isupper, suffix)),
            sum(map(str.isdigit, suffix)),
        ) == (2, 2, 2)

    def test_names_differ(self) -> None:
        """90 orders x 26^4 x 10^2: two in 10,000 names are equal once in 80 tries."""
        random = Random(7)
        names = {TempNames(new_tag(random), random).beside(PATH) for _ in range(10_000)}
        assert len(names) >= 9_999

    @given(st.binary(min_size=16, max_size=64))
    def test_no_final_name_looks_like_a_temporary_one(self, chunk_hash: bytes) -> None:
        name = chunk_path("d", chunk_hash).rpartition("/")[2]
        assert "." not in name
