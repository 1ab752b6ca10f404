"""Runs cases in turn: A B C A B C ..., each with its clean-up outside the clock."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvserve.bench.measure import Meter, Usage

WARM_UPS = 1
"""Rounds that are not counted: they touch memory, open files and fill caches."""

Step = Callable[[str], None]
"""Called before each piece of work with its name, for the progress bar."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One run by the wall clock; `first_layer_s` is when the first layer was whole."""

    took_s: float
    first_layer_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One run with what it used; `server` is None for a case without one."""

    timing: Timing
    client: Usage
    server: Usage | None


class Case:
    """One way of moving the unit. Only `run` is measured.

    Attributes:
        name: the key in reports; `label`: the same for people.
        is_ceiling: not kvserve, but what kvserve is held against.
        requests: how many requests the client makes for the unit.
        server_pid: the process on the other side, if there is one.
    """

    name: str
    label: str
    is_ceiling: bool = True
    requests: int = 0
    server_pid: int | None = None

    async def prepare(self) -> None:
        """Before each run, outside the clock."""

    async def run(self) -> Timing:
        """Moves the unit once; times itself, so that the loop's own work stays out."""
        raise NotImplementedError

    async def clean_up(self) -> None:
        """After each run, outside the clock."""


async def run_once(case: Case) -> Sample:
    await case.prepare()
    try:
        client = Meter(os.getpid())
        server = None if case.server_pid is None else Meter(case.server_pid)
        client.start()
        if server is not None:
            server.start()
        timing = await case.run()
        used = None if server is None else server.stop()
        return Sample(timing, client.stop(), used)
    finally:
        await case.clean_up()


async def run_rounds(
    cases: Sequence[Case], *, repeats: int, warm_ups: int, step: Step
) -> dict[str, list[Sample]]:
    """The samples of each case by name, warm-up rounds left out."""
    samples: dict[str, list[Sample]] = {case.name: [] for case in cases}
    for round_index in range(-warm_ups, repeats):
        for case in cases:
            what = "warm-up" if round_index < 0 else f"round {round_index + 1}/{repeats}"
            step(f"{what}: {case.label}")
            sample = await run_once(case)
            if round_index >= 0:
                samples[case.name].append(sample)
    return samples


def step_count(cases: int, *, repeats: int, warm_ups: int) -> int:
    return cases * (repeats + warm_ups)
