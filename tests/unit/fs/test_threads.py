"""Jobs end in time, threads that hang are left behind, and their number is bounded."""

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait

import pytest

import kvserve.fs.threads
from kvserve.errors import StorageUnavailable
from kvserve.fs.threads import FsThreads

TIMEOUT_S = 0.2


@pytest.fixture
def may_end() -> Iterator[threading.Event]:
    may_end = threading.Event()
    yield may_end
    may_end.set()


@pytest.fixture
def threads(may_end: threading.Event) -> Iterator[FsThreads]:
    threads = FsThreads(2, timeout_s=TIMEOUT_S)
    yield threads
    may_end.set()
    threads.shutdown()


def eventually(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_results_and_errors_are_those_of_the_call(threads: FsThreads) -> None:
    assert threads.submit(divmod, 7, 2).result(5) == (3, 1)
    assert threads.submit(int, "11", base=2).result(5) == 3
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(5)
    with pytest.raises(SystemExit):
        threads.submit(sys.exit).result(5)
    assert [it.result(5) for it in [threads.submit(pow, n, 2) for n in range(50)]] == [
        n * n for n in range(50)
    ]


def test_no_more_threads_than_places() -> None:
    running = 0
    most = 0
    lock = threading.Lock()

    def job() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    with FsThreads(3, timeout_s=30) as threads:
        wait([threads.submit(job) for _ in range(30)])
    assert most == 3


def test_a_job_that_hangs_fails_in_time_and_another_thread_takes_over(
    threads: FsThreads, may_end: threading.Event
) -> None:
    began = time.monotonic()
    hung = [threads.submit(may_end.wait, 60) for _ in range(2)]
    for job in hung:
        error = job.exception(10)
        assert isinstance(error, StorageUnavailable)
        assert error.timeout_s == TIMEOUT_S
        assert "a file call did not end within 0.2 s (store.io_timeout_s)" in str(error)
    assert TIMEOUT_S <= time.monotonic() - began < 5
    assert threads.hung == 2
    assert threads.submit(pow, 2, 3).result(5) == 8, "both places are taken again"


def test_who_waits_for_a_place_gets_it_before_the_others_are_overdue(
    may_end: threading.Event,
) -> None:
    """Many calls that hang at once must not hold the others up until they are overdue."""
    threads = FsThreads(2, timeout_s=4.0)
    hung = [threads.submit(may_end.wait, 60) for _ in range(4)]
    began = time.monotonic()
    assert threads.submit(pow, 2, 3).result(10) == 8
    assert 1.9 <= time.monotonic() - began < 3.9, "two turns of two places"
    assert not any(job.done() for job in hung), "they have time yet"
    may_end.set()
    assert all(job.result(5) for job in hung), "slow is not lost"
    assert threads.submit(pow, 2, 3).result(5) == 8
    threads.shutdown()
    assert threads.hung == 0


def test_waiting_for_a_thread_counts_and_such_a_job_never_runs(
    threads: FsThreads, may_end: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    monkeypatch.setattr(kvserve.fs.threads, "_AWAY_MAX", 0)
    hung = [threads.submit(may_end.wait, 60) for _ in range(2)]
    queued = [threads.submit(ran.append, 1) for _ in range(3)]
    for job in queued:
        with pytest.raises(StorageUnavailable, match="waited for a thread did not end") as raised:
            job.result(10)
        assert raised.value.timeout_s == TIMEOUT_S
    may_end.set()
    wait(hung)
    eventually(lambda: threads.hung == 0)
    assert threads.submit(pow, 2, 2).result(5) == 4
    assert ran == []


def test_a_thread_that_comes_back_ends_itself_where_its_place_is_taken(
    threads: FsThreads, may_end: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvserve.fs.threads")
    seen: list[threading.Thread] = []

    def hang() -> None:
        seen.append(threading.current_thread())
        may_end.wait(60)

    assert threads.submit(hang).exception(10) is not None
    both = threading.Barrier(3)
    others = [threads.submit(both.wait, 10) for _ in range(2)]
    both.wait(10)
    wait(others)
    may_end.set()
    seen[0].join(10)
    assert not seen[0].is_alive()
    assert threads.hung == 0
    assert "a file call that had hung came back" in caplog.text


def test_when_no_place_is_left_jobs_fail_at_once_until_one_comes_back(
    threads: FsThreads, may_end: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvserve.fs.threads, "_AWAY_MAX", 3)
    first = threading.Event()
    jobs = [threads.submit(first.wait, 60)]
    for _ in range(4):
        jobs.append(threads.submit(may_end.wait, 60))
        wait(jobs, 10)
    assert threads.hung == 5, "three have no place, two are stuck in theirs"
    began = time.monotonic()
    error = threads.submit(pow, 2, 3).exception(0)
    assert time.monotonic() - began < TIMEOUT_S
    assert isinstance(error, StorageUnavailable)
    assert "the file system does not answer: 5 file calls hang" in str(error)
    assert error.timeout_s == TIMEOUT_S
    first.set()
    eventually(lambda: threads.hung == 4)
    assert threads.submit(pow, 2, 3).result(5) == 8, "the thread that came back took a place"
    may_end.set()
    eventually(lambda: threads.hung == 0)
    assert threads.submit(pow, 2, 3).result(5) == 8


def test_nothing_of_a_job_is_kept(threads: FsThreads) -> None:
    """A frame of 1 MiB must not wait for the next job of its thread."""

    class Frame:
        def fill(self) -> None:
            pass

    frame = Frame()
    gone = weakref.ref(frame)
    threads.submit(frame.fill).result(5)
    del frame

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    eventually(is_gone)


def test_shutdown_waits_for_jobs_but_not_for_those_that_hang(may_end: threading.Event) -> None:
    threads = FsThreads(2, timeout_s=TIMEOUT_S)
    ended: list[int] = []

    def slow() -> None:
        time.sleep(0.05)
        ended.append(1)

    threads.submit(may_end.wait, 60)
    threads.submit(slow)
    began = time.monotonic()
    threads.shutdown()
    assert ended == [1]
    assert time.monotonic() - began < 5
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(slow)


def test_cancelled_before_it_begins(threads: FsThreads, may_end: threading.Event) -> None:
    ran: list[int] = []
    for _ in range(2):
        threads.submit(may_end.wait, 60)
    queued = threads.submit(ran.append, 1)
    assert queued.cancel()
    may_end.set()
    assert threads.submit(pow, 2, 2).result(5) == 4
    assert ran == []


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    """ThreadPoolExecutor's would: Python joins them at exit."""
    code = (
        "import threading\n"
        "from kvserve.fs.threads import FsThreads\n"
        "threads = FsThreads(1, timeout_s=0.1)\n"
        "print(threads.submit(threading.Event().wait).exception())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert "did not end within 0.1 s" in done.stdout
