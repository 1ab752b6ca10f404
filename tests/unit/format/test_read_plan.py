"""The plan of reads: layer 0 first, then wider and wider, within a budget, in few reads."""

from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.format.plan import FramePlan, plan_runs, runs
from kvserve.format.read_plan import (
    FRAMES_A_STEP_MAX,
    GAP_SIZE_BYTES_MAX,
    ReadPlan,
    growing_widths,
    reads,
    staged_size_bytes,
)

FRAME = 1 << 16


def plan_of(
    sizes: list[int], chunks: list[int], layers: list[int] | None = None, worth: int = 1
) -> ReadPlan:
    return ReadPlan(
        range(len(sizes)) if layers is None else layers,
        sizes,
        list(runs(chunks)),
        frame_size_bytes=FRAME,
        widths=growing_widths(lambda: worth),
    )


def steps_of(plan: ReadPlan, budget: int) -> list[list[FramePlan]]:
    steps = []
    while (first := plan.next_frame()) is not None:
        left = budget - staged_size_bytes(first.payload_size_bytes)
        steps.append([first, *plan.rest_of_step(left)])
    return steps


def layers_of(steps: list[list[FramePlan]]) -> list[list[int]]:
    return [sorted({frame.layer_index for frame in step}) for step in steps]


def cost(step: list[FramePlan]) -> int:
    return sum(staged_size_bytes(frame.payload_size_bytes) for frame in step)


def test_steps_are_1_1_2_4_8_layers() -> None:
    steps = steps_of(plan_of([4096] * 20, [0, 1, 2]), 1 << 30)
    assert [len(layers) for layers in layers_of(steps)] == [1, 1, 2, 4, 8, 4]
    assert list(chain.from_iterable(layers_of(steps))) == list(range(20))


@pytest.mark.parametrize(
    ("worth", "widths"), [(1, [1, 1, 2, 4, 8]), (5, [1, 1, 5, 10, 20]), (30, [1, 30, 60, 120, 240])]
)
def test_steps_are_as_wide_as_a_round_trip_is_worth(worth: int, widths: list[int]) -> None:
    """After the first layer: computing waits for that one."""
    assert list(islice(growing_widths(lambda: worth), 5)) == widths


def test_the_budget_bounds_a_step_to_whole_layers_or_a_part_of_one() -> None:
    # A layer of three chunks is a frame of 12 KiB, counted as 16.
    assert [len(it) for it in layers_of(steps_of(plan_of([4096] * 9, [0, 1, 2]), 50_000))] == [
        *(1, 1, 2, 3, 2),
    ]
    parts = steps_of(plan_of([FRAME] * 2, [0, 1, 2]), 2 * FRAME)
    assert [(step[0].layer_index, len(step)) for step in parts] == [(0, 2), (0, 1), (1, 2), (1, 1)]


def test_a_chunk_that_turns_bad_is_in_no_later_layer() -> None:
    of_runs = [(0, 3)]
    plan = ReadPlan([0, 1], [8, 8], of_runs, frame_size_bytes=FRAME, widths=growing_widths())
    assert plan.next_frame() == next(plan_runs(0, 8, [(0, 3)], frame_size_bytes=FRAME))
    of_runs[:] = [(0, 1), (2, 1)]
    found = [plan.next_frame(), plan.next_frame(), plan.next_frame()]
    assert [it and (it.first_chunk, it.chunk_count) for it in found] == [(0, 1), (2, 1), None]
    of_runs.clear()
    assert plan.next_step(1 << 20) is None


@given(
    sizes=st.lists(st.integers(1, 3 * FRAME), min_size=1, max_size=12),
    chunks=st.sets(st.integers(0, 40), min_size=1, max_size=20),
    budget=st.integers(FRAME, 40 * FRAME),
    worth=st.integers(0, 20),
    reverses=st.booleans(),
)
def test_steps_are_the_frames_in_order_within_the_budget(
    sizes: list[int], chunks: set[int], budget: int, worth: int, reverses: bool
) -> None:
    indexes = sorted(chunks)
    layers = list(range(len(sizes)))[:: -1 if reverses else 1]
    steps = steps_of(plan_of(sizes, indexes, layers, worth), budget)
    wanted = [
        frame
        for layer in layers
        for frame in plan_runs(layer, sizes[layer], list(runs(indexes)), frame_size_bytes=FRAME)
    ]
    assert [frame for step in steps for frame in step] == wanted
    for step in steps:
        assert cost(step) <= budget
        assert len(step) <= FRAMES_A_STEP_MAX
    assert {frame.layer_index for frame in steps[0]} == {layers[0]}, "the first layer alone"


@given(
    sizes=st.lists(st.integers(1, 3 * FRAME), min_size=1, max_size=12),
    chunks=st.sets(st.integers(0, 40), min_size=1, max_size=20),
    budget=st.integers(FRAME, 40 * FRAME),
    taken=st.integers(0, 3),
)
def test_what_the_next_step_is_said_to_be_is_what_it_takes_at_most(
    sizes: list[int], chunks: set[int], budget: int, taken: int
) -> None:
    plan = plan_of(sizes, sorted(chunks))
    for _ in range(taken):
        plan.next_frame()
    while (coming := plan.next_step(budget)) is not None:
        first = plan.next_frame()
        assert first is not None
        left = budget - staged_size_bytes(first.payload_size_bytes)
        step = [first, *plan.rest_of_step(left)]
        assert cost(step) <= coming.size_bytes
        assert step[0].layer_index == coming.first_layer
        assert step[-1].layer_index <= coming.last_layer


@given(st.integers(1, 64 << 20))
def test_staged_sizes_are_few_and_hold_the_payload(size: int) -> None:
    staged = staged_size_bytes(size)
    assert size <= staged < max(4097, 2 * size)
    assert staged & (staged - 1) == 0


class TestReads:
    def test_neighbours_are_one_read_over_the_padding_between_them(self) -> None:
        places = [(8192, 100), (4096, 4096), (12288, 4096)]
        assert list(reads(places)) == [(4096, [(0, 1), (0, 0), (3996, 2)])]

    def test_a_slice_that_nobody_wants_is_not_read(self) -> None:
        assert list(reads([(0, 4096), (8192, 4096)])) == [(0, [(0, 0)]), (8192, [(0, 1)])]

    def test_nothing(self) -> None:
        assert list(reads([])) == []

    @given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 9000)), max_size=20), st.data())
    def test_each_piece_once_where_it_is(
        self, sizes: list[tuple[int, int]], data: st.DataObject
    ) -> None:
        places, at = [], 0
        for size, gap in sizes:
            places.append((at, size))
            at += size + gap
        places = data.draw(st.permutations(places))
        seen: list[int] = []
        ends: list[int] = []
        for offset, read in reads(places):
            at = offset
            for skipped, number in read:
                assert 0 <= skipped <= GAP_SIZE_BYTES_MAX
                at += skipped
                assert at == places[number][0]
                at += places[number][1]
                seen.append(number)
            ends.append(at)
        assert sorted(seen) == list(range(len(places)))
        starts = [offset for offset, _ in reads(places)]
        assert all(b - a > GAP_SIZE_BYTES_MAX for a, b in zip(ends, starts[1:], strict=False))
