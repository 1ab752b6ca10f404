"""What one process used, from /proc: CPU time, memory, and the peak while something ran.

Linux only. The CPU clock of /proc ticks every 10 ms: a single short run is coarse, the mean over
the repeats of a report is not.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    """What a process used between `start` and `stop` of a meter.

    `growth_bytes` is the peak above what was resident at the start.
    """

    cpu_s: float
    peak_bytes: int
    growth_bytes: int


def cpu_s(pid: int) -> float:
    """User and system time of all threads of a process, also of those that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return (int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])) / _TICKS_A_SECOND


def memory(pid: int) -> Memory:
    status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    sizes = {
        name: int(kib) << 10
        for name, kib in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.M)
    }
    return Memory(sizes["VmRSS"], sizes["VmHWM"])


def reset_peak(pid: int) -> None:
    """Peak memory counts from now on. Where the kernel refuses, it counts from the start."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5", "ascii")


class Meter:
    """Measures one process between `start` and `stop`; may be used again and again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s = 0.0
        self._resident_bytes = 0

    def start(self) -> None:
        reset_peak(self._pid)
        self._resident_bytes = memory(self._pid).resident_bytes
        self._cpu_s = cpu_s(self._pid)

    def stop(self) -> Usage:
        peak_bytes = memory(self._pid).peak_bytes
        growth_bytes = max(0, peak_bytes - self._resident_bytes)
        return Usage(cpu_s(self._pid) - self._cpu_s, peak_bytes, growth_bytes)


def load_average() -> float:
    """Runnable processes over the last minute, a hint that others disturb the measurement."""
    return os.getloadavg()[0]
