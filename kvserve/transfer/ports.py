"""What the pumps need of a store; `service` hands them the real one. See `store/chunk_store.py`."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvserve.model import Verdict

Piece = tuple[int, int, memoryview]
"""Layer index, offset in the slice, and where the bytes of the slice from there on go."""


class StoredChunk(Protocol):
    """A chunk that is open for reading; `checksums` by layer index."""

    @property
    def checksums(self) -> Sequence[int]: ...


C = TypeVar("C", bound=StoredChunk)
C_contra = TypeVar("C_contra", bound=StoredChunk, contravariant=True)


class ChunkHolder(Protocol[C_contra]):
    """Keeps open what a call that hangs still uses."""

    def hold(self, chunk: C_contra) -> None:
        """The chunk stays open until `release`."""

    def release(self, chunk: C_contra) -> None:
        """The end of one `hold`."""

    def hangs(self, chunk: C_contra, verdict: Verdict, still: Callable[[], bool]) -> None:
        """A call on the chunk gave no answer in time; `still` tells whether it goes on."""


class SliceSource(ChunkHolder[C_contra], Protocol[C_contra]):
    """Reads pieces of slices."""

    def read_cached(
        self,
        chunks: Sequence[C_contra | None],
        layer_index: int,
        slice_offset: int,
        into: memoryview,
    ) -> int:
        """Fills the chunks' equal parts of `into`, in order, for as long as that needs no waiting;
        how many. The part of None is passed over."""

    def read_blocking(self, chunk: C_contra, pieces: Sequence[Piece]) -> Verdict | None:
        """Fills all the pieces; a miss if the file ends early or cannot be read."""

    def reject_blocking(self, chunk: C_contra) -> None:
        """The chunk failed a check: nobody may find it again."""


class SliceSink(Protocol):
    """Takes the slices of one chunk in any order, then publishes it."""

    def write_blocking(self, layer_index: int, slice_offset: int, data: memoryview) -> None:
        """Raises `StorageError`."""

    def commit_blocking(self, slice_checksums: Sequence[int]) -> None:
        """Raises `StorageError`; the chunk is then not visible."""

    def abandon_blocking(self) -> None:
        """Removes what was written. Raises `StorageError`; may be called twice."""

    def give_up(self) -> None:
        """A call above hangs: nothing is published, and whichever comes back last cleans up."""
