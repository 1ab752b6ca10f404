"""The identity file of each namespace, and from it the reason of a miss.

The store writes `identity` when it first puts a chunk under a namespace. When a lookup or fetch
names a namespace that the tenant does not have, the identities the tenant does have are compared:
"same model, other dtype" is the answer that an engineer with no hits needs.
"""

from collections import OrderedDict

from kvserve.format.identity import ENCODED_SIZE_BYTES_MAX, differences, model_of
from kvserve.fs import FileSystem
from kvserve.model import ChunkKey
from kvserve.store.paths import IDENTITY_NAME, TempNames, chunk_path, namespace_dir
from kvserve.store.small_file import read_small_blocking
from kvserve.store.temp_file import TempFile

_KNOWN_MAX = 4096
_SIBLINGS_MAX = 16


class Namespaces:
    """Used from the fs threads only; racing calls do the same work twice, harmlessly."""

    def __init__(
        self, fs: FileSystem, root: str, names: TempNames, *, survives_power_loss: bool
    ) -> None:
        self._fs = fs
        self._root = root
        self._names = names
        self._survives_power_loss = survives_power_loss
        self._known: OrderedDict[str, None] = OrderedDict()

    def ensure_blocking(self, key: ChunkKey) -> None:
        """Writes the identity file unless it is there."""
        directory = f"{self._root}/{namespace_dir(key)}"
        if directory in self._known:
            return
        path = f"{directory}/{IDENTITY_NAME}"
        if self._fs.stat(path) is None:
            file = TempFile(
                self._fs,
                None,
                self._names,
                path=path,
                survives_power_loss=self._survives_power_loss,
            )
            try:
                file.write_blocking(key.identity.encoded, 0)
                file.publish_blocking()
            finally:
                file.abandon_blocking()
        self._known[directory] = None
        while len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)

    def explain_miss_blocking(self, key: ChunkKey) -> str:
        """Which identity the chunk is stored under, if this key's namespace is absent; else ""."""
        own = f"{self._root}/{namespace_dir(key)}"
        if own in self._known or self._fs.stat(f"{own}/{IDENTITY_NAME}") is not None:
            return ""
        shard = f"{key.shard.rank}of{key.shard.count}"
        siblings = sorted(self._fs.list_dir(f"{self._root}/{key.tenant}"))
        for name in siblings[:_SIBLINGS_MAX]:
            directory = f"{self._root}/{key.tenant}/{name}"
            path = f"{directory}/{IDENTITY_NAME}"
            encoded = read_small_blocking(self._fs, path, ENCODED_SIZE_BYTES_MAX)
            if encoded is None or model_of(encoded) != key.identity.model:
                continue
            if self._fs.stat(chunk_path(f"{directory}/{shard}", key.chunk_hash)) is not None:
                fields = "; ".join(differences(key.identity.encoded, encoded))
                return f"stored under another identity, which differs in {fields}"
        return ""
