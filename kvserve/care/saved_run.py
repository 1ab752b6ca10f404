"""How far a check has come, in `.fsck/state`, so that an interrupted one can go on.

Written whole under another name, then renamed. Of two checks on one tree the file is the one's that
started last; the other notices and saves nothing more.
"""

import json
from dataclasses import dataclass

from kvserve.care.tally import Tally
from kvserve.errors import InvalidRequest, StorageError, StorageUnavailable
from kvserve.fs import FileSystem
from kvserve.store.paths import FSCK_DIR
from kvserve.store.small_file import read_small_blocking, replace_small_blocking
from kvserve.store.tree import FAN, Parts

_VERSION = 1
_SIZE_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything up to the directory `mark`, in the order of the walk, is in `tally`."""

    mark: Parts
    tally: Tally
    repairs: bool
    took_s: float


class SavedRun:
    """The state file of one tree. All methods block."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._directory = f"{root}/{FSCK_DIR}"
        self._path = f"{self._directory}/state"
        self._saved_at: float | None = None

    def load_blocking(self) -> Progress | None:
        """What an interrupted check has left; None if there is nothing.

        Raises:
            InvalidRequest: the file is damaged; the message says what to do.
            StorageError: it cannot be read.
        """
        self._saved_at = self._modified_at()
        encoded = read_small_blocking(self._fs, self._path, _SIZE_BYTES_MAX)
        if encoded is None:
            return None
        try:
            return _decode(json.loads(encoded))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"{self._path} is damaged ({type(error).__name__}): run without --resume"
            ) from error

    def forget_blocking(self) -> None:
        """A new check begins: whatever an earlier one has left is void."""
        self._fs.unlink(self._path)
        self._saved_at = None

    def save_blocking(self, progress: Progress) -> None:
        """Raises `StorageError` if the state cannot be kept; the check itself may go on."""
        if self._modified_at() != self._saved_at:
            raise StorageUnavailable(f"{self._path} is another check's now")
        encoded = json.dumps(
            {
                "version": _VERSION,
                "mark": progress.mark,
                "repairs": progress.repairs,
                "took_s": progress.took_s,
                "tally": progress.tally.to_json(),
            }
        ).encode()
        # Synced: the state may be what is asked for after a power loss.
        temp = f"{self._path}.new"
        replace_small_blocking(self._fs, self._path, encoded, temp=temp, is_synced=True)
        self._saved_at = self._modified_at()

    def _modified_at(self) -> float | None:
        found = self._fs.stat(self._path)
        return None if found is None else found.modified_at

    def finish_blocking(self) -> None:
        """The check is complete: nothing to resume. Another check's state stays."""
        if self._modified_at() == self._saved_at:
            self._fs.unlink(self._path)


def _decode(value: dict[str, object]) -> Progress:
    mark, tally = value["mark"], value["tally"]
    if value["version"] != _VERSION or not isinstance(mark, list) or len(mark) > FAN:
        raise ValueError("version or mark")
    if not all(isinstance(name, str) for name in mark) or not isinstance(tally, dict):
        raise TypeError("mark or tally")
    took_s = value["took_s"]
    if not isinstance(took_s, int | float):
        raise TypeError("took_s")
    return Progress(tuple(mark), Tally.from_json(tally), value["repairs"] is True, took_s)


def describe(error: StorageError) -> str:
    """The warning for a state that cannot be kept."""
    return f"if this check is interrupted it cannot go on from here: {error}"
