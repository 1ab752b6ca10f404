"""What processes used, from /proc: CPU time, memory, and the peak while something ran.

Linux only. The CPU clock of /proc ticks every 10 ms: a single short run is coarse, the mean over
the repeats of a report is not.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvserve.errors import ServerUnavailable

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat counted from the state letter, which follows the command's ")".
_USER_TIME, _SYSTEM_TIME = 11, 12


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory now, and its peak since the start or the last `reset_peak`."""

    resident_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What processes used between `start` and `stop` of a meter; of several, the sum.

    `growth_bytes` is the peak above what was resident at the start.
    """

    cpu_s: float
    peak_bytes: int
    growth_bytes: int


def cpu_s(pid: int) -> float:
    """User and system time of all threads of a process, also of those that have ended.

    Raises:
        ServerUnavailable: there is no such process (any more).
    """
    fields = _proc(pid, "stat").rpartition(")")[2].split()
    return (int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])) / _TICKS_A_SECOND


def memory(pid: int) -> Memory:
    """Raises ServerUnavailable as `cpu_s` does."""
    sizes = {
        name: int(kib) << 10
        for name, kib in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", _proc(pid, "status"), re.M)
    }
    if len(sizes) < 2:  # ended, and nobody has waited for it yet
        raise ServerUnavailable(f"process {pid} has ended")
    return Memory(sizes["VmRSS"], sizes["VmHWM"])


def reset_peak(pid: int) -> None:
    """Peak memory counts from now on. Where the kernel refuses, it counts from the start."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5", "ascii")


class Meter:
    """Measures processes between `start` and `stop`; may be used again and again."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._cpu_s = 0.0
        self._resident_bytes = 0

    def start(self) -> None:
        for pid in self._pids:
            reset_peak(pid)
        self._resident_bytes = sum(memory(pid).resident_bytes for pid in self._pids)
        self._cpu_s = sum(map(cpu_s, self._pids))

    def stop(self) -> Usage:
        peak_bytes = sum(memory(pid).peak_bytes for pid in self._pids)
        growth_bytes = max(0, peak_bytes - self._resident_bytes)
        return Usage(sum(map(cpu_s, self._pids)) - self._cpu_s, peak_bytes, growth_bytes)


def load_average() -> float:
    """Runnable processes over the last minute, a hint that others disturb the measurement."""
    return os.getloadavg()[0]


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text("ascii", "replace")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ServerUnavailable(f"process {pid} has ended") from error
