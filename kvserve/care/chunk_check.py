"""Checks one file of the tree, whole, and sets it aside if that is asked for.

A chunk is checked from what it says itself: its header is read with no expectation, then compared
with the place where it lies and with the namespace's identity file, and every slice with its
checksum. Published files never change, so a check needs no lock; a file that is replaced during the
check is another file, and is checked again.
"""

from dataclasses import dataclass, replace
from typing import Final

from kvserve.care.identity_file import NamespaceIdentity
from kvserve.care.tally import Finding, Kind
from kvserve.errors import KvserveError, MalformedMessage, StorageError
from kvserve.format.chunk_file import HEADER_SIZE_BYTES_MAX, ChunkHeader, read_header
from kvserve.format.identity import decode_identity
from kvserve.format.verify import SliceVerifier
from kvserve.fs import FileSystem
from kvserve.fs.direct import WINDOW_SIZE_BYTES, DirectReader
from kvserve.model import ChunkStatus, Verdict
from kvserve.store.paths import IDENTITY_NAME, chunk_path, shard_dir
from kvserve.store.quarantine import set_aside_blocking

_TRIES = 3
_LAYERS_NAMED_MAX: Final = 4

assert WINDOW_SIZE_BYTES >= HEADER_SIZE_BYTES_MAX, "a header lies in the first window"


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of one file; `finding` is None if it is good."""

    finding: Finding | None
    size_bytes: int
    is_direct: bool


class ChunkCheck:
    """Checks files one after another. One object for each thread: it has one buffer."""

    def __init__(self, fs: FileSystem, root: str, *, repairs: bool) -> None:
        self._fs = fs
        self._root = root
        self._repairs = repairs
        self._reader = DirectReader(fs)
        self._read_bytes = 0

    def check_blocking(self, place: str, namespace: NamespaceIdentity) -> Checked | None:
        """One chunk or identity file; `place` is relative to the root. None if it has vanished.

        With repairs, a corrupt or misplaced file is moved to `.quarantine`: only the very file that
        was read. If another took its name meanwhile, that one is checked.
        """
        self._read_bytes = 0
        finding = None
        for _ in range(_TRIES):
            try:
                fd = self._fs.open_read(f"{self._root}/{place}")
                if fd is None:
                    return None
                try:
                    finding = self._examine(fd, place, namespace)
                    if finding is None or not self._repairs or finding.kind is Kind.UNKNOWN:
                        break
                    done = self._set_aside(fd, finding)
                    if done is not None:
                        finding = done
                        break
                finally:
                    self._fs.close(fd)
            except KvserveError as error:
                finding = Finding(place, Kind.UNREADABLE, str(error))
                break
        return Checked(finding, self._read_bytes, self._reader.is_direct)

    def _set_aside(self, fd: int, finding: Finding) -> Finding | None:
        """None if another file has the name now."""
        try:
            done = set_aside_blocking(self._fs, self._root, f"{self._root}/{finding.path}", fd)
        except StorageError as error:
            reason = f"{finding.reason}; it could not be set aside: {error}"
            return replace(finding, reason=reason)
        return replace(finding, is_repaired=True) if done else None

    def _examine(self, fd: int, place: str, namespace: NamespaceIdentity) -> Finding | None:
        if place.endswith(f"/{IDENTITY_NAME}"):
            return self._examine_identity(fd, place)
        found = self._read_chunk(fd)
        if isinstance(found, Verdict):
            is_other_version = found.status is ChunkStatus.MISS_IDENTITY
            # Every version has namespaces of its own: in one of ours, another version is rot.
            kind = Kind.CORRUPT
            if is_other_version and namespace.identity is None:
                kind = Kind.UNKNOWN
            return Finding(place, kind, found.message)
        belongs = chunk_path(shard_dir(found.key), found.key.chunk_hash)
        if belongs != place:
            return Finding(place, Kind.MISPLACED, f"it is the chunk of {belongs}")
        if namespace.is_whole and namespace.encoded != found.key.identity.encoded:
            return Finding(place, Kind.MISPLACED, "its identity is not that of the namespace")
        return None

    def _examine_identity(self, fd: int, place: str) -> Finding | None:
        encoded = b""
        for window in self._reader.windows(fd):
            self._read_bytes += len(window)
            encoded = bytes(window)
            break  # an identity is far smaller than a window
        directory = place.split("/")[-2]
        found = _identity_fault(encoded, directory)
        return None if found is None else Finding(place, *found)

    def _read_chunk(self, fd: int) -> ChunkHeader | Verdict:
        """Header and slices of the open file; of another version, only that."""
        header: ChunkHeader | Verdict | None = None
        slices = None
        at = 0
        for window in self._reader.windows(fd):
            self._read_bytes += len(window)
            if slices is None:
                header = read_header(window)
                if isinstance(header, Verdict):
                    return header
                slices = _Slices(header)
            slices.feed(at, window)
            at += len(window)
            if at > slices.file_size_bytes:
                size = slices.file_size_bytes
                return Verdict(ChunkStatus.MISS_CORRUPT, f"longer than its {size} bytes")
        if header is None or isinstance(header, Verdict) or slices is None:
            return Verdict(ChunkStatus.MISS_CORRUPT, "the file is empty")
        if at < slices.file_size_bytes:
            size = slices.file_size_bytes
            return Verdict(ChunkStatus.MISS_CORRUPT, f"{at} bytes long instead of {size}")
        if slices.wrong_layers:
            return Verdict(ChunkStatus.MISS_CORRUPT, _layers_text(slices.wrong_layers))
        return header


class _Slices:
    """Takes a file's bytes in order and checks each slice in them."""

    def __init__(self, header: ChunkHeader) -> None:
        self.file_size_bytes = header.geometry.file_size_bytes
        self._offsets = header.geometry.slice_offsets
        self._sizes = header.geometry.layout.slice_sizes
        self._checksums = header.checksums
        self._verifier = SliceVerifier()
        self._layer_index = 0
        self.wrong_layers: list[int] = []

    def feed(self, at: int, window: memoryview) -> None:
        """The file's bytes from `at` on; the next call goes on where these end."""
        stop = at + len(window)
        while self._layer_index < len(self._offsets):
            layer = self._layer_index
            start, end = self._offsets[layer], self._offsets[layer] + self._sizes[layer]
            if start >= stop:
                return
            first = max(start, at)
            is_good = self._verifier.check(
                window[first - at : min(end, stop) - at],
                slice_offset=first - start,
                ends_slice=end <= stop,
                expected=self._checksums[layer],
            )
            if not is_good:
                self.wrong_layers.append(layer)
            if end > stop:
                return
            self._layer_index += 1


def _identity_fault(encoded: bytes, directory: str) -> tuple[Kind, str] | None:
    """Whether these are the bytes that the directory is named after."""
    if NamespaceIdentity(directory, encoded).is_whole:
        return None
    try:
        other = decode_identity(encoded)
    except MalformedMessage as error:
        return Kind.CORRUPT, str(error)
    return Kind.MISPLACED, f"it is the identity of {other.namespace}"


def _layers_text(layers: list[int]) -> str:
    named = ", ".join(map(str, layers[:_LAYERS_NAMED_MAX]))
    more = f" and {len(layers) - _LAYERS_NAMED_MAX} more" if len(layers) > _LAYERS_NAMED_MAX else ""
    return f"checksum of layer {named}{more} does not match"
