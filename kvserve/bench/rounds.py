"""Runs cases in turn: A B C A B C ..., each with its clean-up outside the clock."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvserve.bench.measure import Meter, Usage
from kvserve.errors import KvserveError

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
        client_pid: the process that receives; None for this one.
        server_pid: the process on the other side, if there is one.
        more_server_pids: others that work there beside it.
        may_fail: a failure leaves it out of the later rounds instead of ending the run.
        failure: why it was left out.
    """

    name: str
    label: str
    is_ceiling: bool = True
    requests: int = 0
    client_pid: int | None = None
    server_pid: int | None = None
    more_server_pids: tuple[int, ...] = ()
    may_fail: bool = False
    failure: str = ""

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
        client = Meter(case.client_pid or os.getpid())
        pid = case.server_pid
        server = None if pid is None else Meter(pid, *case.more_server_pids)
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
    """The samples of each case by name, warm-up rounds left out.

    A case that is there twice runs twice in each round, and its samples are in that order.
    """
    samples: dict[str, list[Sample]] = {case.name: [] for case in cases}
    for round_index in range(-warm_ups, repeats):
        for case in cases:
            what = "warm-up" if round_index < 0 else f"round {round_index + 1}/{repeats}"
            step(f"{what}: {case.label}")
            if case.failure:
                continue
            try:
                sample = await run_once(case)
            except KvserveError as error:
                if not case.may_fail:
                    raise
                case.failure = str(error)
                continue
            if round_index >= 0:
                samples[case.name].append(sample)
    return samples


def step_count(cases: int, *, repeats: int, warm_ups: int) -> int:
    return cases * (repeats + warm_ups)
