"""Frames cover every byte once, in order, and none is larger than allowed."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvserve.format.plan import FramePlan, leave_out, plan_layer, runs
from kvserve.model import Span

chunk_sets = st.sets(st.integers(0, 60), max_size=40).map(sorted)
sizes = st.integers(1, 2000)


@given(chunk_sets, sizes, sizes)
def test_every_byte_of_every_chunk_exactly_once_and_in_order(
    chunks: list[int], slice_size: int, frame_size: int
) -> None:
    covered: list[tuple[int, int, int]] = []
    for plan in plan_layer(7, slice_size, chunks, frame_size_bytes=frame_size):
        assert plan.layer_index == 7
        covered += [
            (plan.first_chunk + position, plan.span.start, plan.span.stop)
            for position in range(plan.chunk_count)
        ]
    expected_start = dict.fromkeys(chunks, 0)
    for chunk_index, start, stop in covered:
        assert start == expected_start[chunk_index] < stop <= slice_size
        expected_start[chunk_index] = stop
    assert all(stop == slice_size for stop in expected_start.values())
    assert covered == sorted(covered)


@given(chunk_sets, sizes, sizes)
def test_no_frame_is_larger_than_allowed(
    chunks: list[int], slice_size: int, frame_size: int
) -> None:
    for plan in plan_layer(0, slice_size, chunks, frame_size_bytes=frame_size):
        assert 0 < plan.payload_size_bytes <= frame_size
        assert plan.payload_size_bytes == plan.chunk_count * plan.span.size_bytes


@given(chunk_sets, sizes, sizes)
def test_a_frame_holds_whole_slices_or_a_piece_of_one(
    chunks: list[int], slice_size: int, frame_size: int
) -> None:
    for plan in plan_layer(0, slice_size, chunks, frame_size_bytes=frame_size):
        is_whole = plan.span == Span(0, slice_size)
        assert is_whole or (plan.chunk_count == 1 and slice_size > frame_size)
        assert plan.ends_slice == (plan.span.stop == slice_size)


@given(chunk_sets, sizes, sizes)
def test_frames_are_as_full_as_neighbours_allow(
    chunks: list[int], slice_size: int, frame_size: int
) -> None:
    """Else the number of messages would grow with the number of chunks."""
    plans = list(plan_layer(0, slice_size, chunks, frame_size_bytes=frame_size))
    for one, other in pairwise(plans):
        neighbours = one.first_chunk + one.chunk_count == other.first_chunk
        if neighbours and one.ends_slice and slice_size <= frame_size:
            assert one.payload_size_bytes + slice_size > frame_size


def test_llama_chunks_travel_sixteen_to_a_frame_of_1_mib() -> None:
    plans = list(plan_layer(3, 64 << 10, range(40), frame_size_bytes=1 << 20))
    whole = Span(0, 64 << 10)
    assert plans == [
        FramePlan(3, 0, 16, whole, True),
        FramePlan(3, 16, 16, whole, True),
        FramePlan(3, 32, 8, whole, True),
    ]


def test_a_slice_larger_than_a_frame_is_cut() -> None:
    plans = list(plan_layer(0, 10, [4, 5], frame_size_bytes=4))
    assert [(plan.first_chunk, plan.span, plan.ends_slice) for plan in plans] == [
        (chunk, span, ends)
        for chunk in (4, 5)
        for span, ends in ((Span(0, 4), False), (Span(4, 8), False), (Span(8, 10), True))
    ]


@given(chunk_sets)
def test_runs_are_maximal_and_lose_nothing(chunks: list[int]) -> None:
    found = list(runs(chunks))
    assert [first + n for first, count in found for n in range(count)] == chunks
    for (first, count), (after, _) in pairwise(found):
        assert first + count < after, "neighbours belong in one run"


@given(chunk_sets.filter(bool), st.data())
def test_a_chunk_left_out_is_in_no_run(chunks: list[int], data: st.DataObject) -> None:
    gone = data.draw(st.lists(st.sampled_from(chunks), unique=True))
    of_runs = list(runs(chunks))
    for chunk_index in gone:
        leave_out(of_runs, chunk_index)
    left = [index for first, count in of_runs for index in range(first, first + count)]
    assert left == sorted(set(chunks) - set(gone))
