"""The `lfs` command of Lustre: how it is run, and what it prints.

Layouts can be read and set through ioctls too, but those are the internals of one library; the
command is what every client has and what its administrators know. Never through a shell.
"""

import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass

from kvserve.errors import StorageUnavailable

_MESSAGE_CHARS_MAX = 300
_KILL_TIMEOUT_S = 1.0


class Lfs:
    """Runs `lfs`; all calls together take about `budget_s` seconds at most.

    A metadata server that recovers or a target that is gone hangs the command as it hangs every
    other program, so what does not end in time is killed and, if not even that ends it, left.
    """

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._deadline = time.monotonic() + budget_s

    def run_blocking(self, *arguments: str) -> str:
        """What `lfs` with these arguments prints.

        Raises:
            StorageUnavailable: there is no `lfs`, it ended with an error, or not in time.
        """
        argv = ["lfs", *arguments]
        command = shlex.join(argv)
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise StorageUnavailable(f"{command}: not run, lfs has hung before")
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            raise StorageUnavailable(f"{command}: cannot be run: {error.strerror}") from error
        try:
            out, err = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired as error:
            _kill_blocking(process)
            message = f"{command}: did not end within {self._budget_s:g} s"
            raise StorageUnavailable(message) from error
        if process.returncode:
            said = " ".join((err or out).split())[:_MESSAGE_CHARS_MAX]
            raise StorageUnavailable(f"{command}: exit status {process.returncode}: {said}")
        return out


def _kill_blocking(process: "subprocess.Popen[str]") -> None:
    # The whole session: what it started may hold the pipes open.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=_KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # In the kernel's uninterruptible sleep. It dies when the file system answers.
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a file's layout, up to `end_bytes`; None is the end of the file."""

    end_bytes: int | None
    is_on_mdt: bool
    stripe_count: int
    stripe_size_bytes: int
    pool: str


def parse_layout(text: str) -> tuple[Component, ...]:
    """What `lfs getstripe -d DIR` prints: the layout of new files, by component; () for none.

    A plain layout is one line, "stripe_count:  1 stripe_size:   1048576 pattern: raid0 ...", a
    composite one has a block from `lcme_id` on for each component.
    """
    _, *blocks = re.split(r"\blcme_id:", text)
    found = []
    for block in blocks or [text]:
        values = dict(re.findall(r"\b(?:lmm_|lcme_extent\.)?(\w+):[ \t]*(\S+)", block))
        if "stripe_count" not in values:
            continue
        end = values.get("e_end", "EOF")
        found.append(
            Component(
                end_bytes=None if end == "EOF" else _number(end),
                is_on_mdt=values.get("pattern", "").startswith("mdt"),
                stripe_count=_number(values["stripe_count"]),
                stripe_size_bytes=_number(values.get("stripe_size", "")),
                pool=values.get("pool", ""),
            )
        )
    return tuple(found)


def parse_directory_layout(text: str) -> tuple[int, str]:
    """What `lfs getdirstripe -D DIR` prints: stripes and hash of new directories; (0, "") if none.

    "lmv_stripe_count: 2 lmv_stripe_offset: -1 lmv_hash_type: crush lmv_max_inherit: 3"
    """
    values = dict(re.findall(r"\blmv_(\w+):[ \t]*(\S+)", text))
    return _number(values.get("stripe_count", "")), values.get("hash_type", "")


def _number(text: str) -> int:
    """0 for what is no number: a layout that cannot be understood is never the wanted one."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else 0


@dataclass(frozen=True, slots=True)
class OstSpace:
    """Space of one storage target, `name` as in "OST:3"; a metadata target is "MDT:0".

    `states` are the letters that `lfs df` adds: D degraded, N no create, R read-only, S out of
    space, I out of inodes.
    """

    name: str
    uuid: str
    size_bytes: int
    used_bytes: int
    available_bytes: int
    states: str

    @property
    def used_share(self) -> float:
        """As `lfs df` counts it: what is reserved is neither used nor available."""
        usable = self.used_bytes + self.available_bytes
        return self.used_bytes / usable if usable else 1.0


_TARGET = re.compile(
    r"^(\S+)[ \t]+(\d+)[ \t]+(\d+)[ \t]+(\d+)[ \t]+\S+[ \t]+.*\[((?:OST|MDT):\d+)\][ \t]*([A-Z]*)",
    re.M | re.ASCII,
)


def parse_space(text: str) -> list[OstSpace]:
    """What `lfs df DIR` prints, in KiB; targets that do not answer are left out."""
    return [
        OstSpace(
            name=name,
            uuid=uuid.removesuffix("_UUID"),
            size_bytes=int(size) << 10,
            used_bytes=int(used) << 10,
            available_bytes=int(available) << 10,
            states=states,
        )
        for uuid, size, used, available, name, states in _TARGET.findall(text)
    ]
