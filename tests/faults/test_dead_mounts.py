"""The mount goes away under a running server: dead (ENOTCONN), or unmounted and its place empty."""

from collections.abc import Callable

import pytest

from kvclient import ChunkStatus, ServerUnavailable, StorageUnavailable
from kvserve.testing.fuse_mount import FaultyMount
from tests.faults.mounts import Serving, chunk_files, statuses, temp_files, until
from tests.payload import payload_for, small_descriptor

Serve = Callable[..., Serving]
STORED = ChunkStatus.STORED
HIT, ABSENT, ERROR = ChunkStatus.HIT, ChunkStatus.MISS_ABSENT, ChunkStatus.MISS_ERROR
DESCRIPTOR = small_descriptor()
OTHER = small_descriptor(first_token=5000)
PAYLOAD = payload_for(DESCRIPTOR)


def test_the_file_system_dies_and_comes_back(mount: FaultyMount, serve: Serve) -> None:
    """Errors that name ENOTCONN; the server lives, and serves again once it is mounted again."""
    serving = serve(mount.path)
    assert statuses(serving.put(DESCRIPTOR, PAYLOAD)) == [STORED] * 8
    serving.get(DESCRIPTOR, PAYLOAD)
    mount.kill()
    verdicts = serving.get(DESCRIPTOR, PAYLOAD)
    assert statuses(verdicts) == [ERROR] * 8
    assert all("ENOTCONN" in verdict.message for verdict in verdicts)
    looked = serving.client.lookup(DESCRIPTOR).verdicts
    assert statuses(looked) == [ERROR] * 8
    with pytest.raises(StorageUnavailable, match="ENOTCONN"):
        serving.put(OTHER, PAYLOAD)
    with pytest.raises(StorageUnavailable, match="ENOTCONN"):
        serving.client.delete(DESCRIPTOR)
    mount.unmount()
    mount.start()
    for descriptor in (DESCRIPTOR, OTHER):
        verdicts = serving.put(descriptor, PAYLOAD)
        assert all(it.is_stored for it in statuses(verdicts)), verdicts
        assert statuses(serving.get(descriptor, PAYLOAD)) == [HIT] * 8
    assert temp_files(mount.backing / "default") == []
    assert "Traceback" not in serving.process.log()


def test_the_mount_is_taken_away(mount: FaultyMount, serve: Serve) -> None:
    """What was stored is absent; nothing is stored into the directory below (another disk)."""
    serving = serve(mount.path)
    assert statuses(serving.put(DESCRIPTOR, PAYLOAD)) == [STORED] * 8
    mount.unmount()
    with pytest.raises(StorageUnavailable, match="is its file system still mounted"):
        serving.put(OTHER, PAYLOAD)
    # As long as claims are shown: the server notices, says so and does not give up.
    until(lambda: "is the file system of the root still mounted" in serving.process.log())
    assert statuses(serving.client.lookup(DESCRIPTOR).verdicts) == [ABSENT] * 8
    assert list(mount.path.iterdir()) == []
    mount.start()
    assert statuses(serving.put(OTHER, PAYLOAD)) == [STORED] * 8
    assert statuses(serving.get(DESCRIPTOR, PAYLOAD)) == [HIT] * 8
    (claim,) = (mount.backing / ".servers").iterdir()
    shown_at = claim.stat().st_mtime
    until(lambda: claim.stat().st_mtime > shown_at)
    assert "Traceback" not in serving.process.log()


def test_a_store_that_was_under_way(mount: FaultyMount, serve: Serve) -> None:
    """The mount dies between two layers: an error for each chunk, and none is there afterwards."""
    serving = serve(mount.path)
    with serving.client.store(DESCRIPTOR, PAYLOAD) as handle:
        handle.store_layer(0)
        handle.wait_layer(0)
        mount.kill()
        for layer_index in (1, 2, 3):
            handle.store_layer(layer_index)
        verdicts = handle.finish().verdicts
    assert statuses(verdicts) == [ChunkStatus.STORE_ERROR] * 8
    assert all("ENOTCONN" in verdict.message for verdict in verdicts)
    mount.unmount()
    mount.start()
    assert chunk_files(mount.backing / "default") == []
    # What could not be removed on the dead mount is removed now.
    until(lambda: not temp_files(mount.backing / "default"))
    assert statuses(serving.put(DESCRIPTOR, PAYLOAD)) == [STORED] * 8


def test_a_start_on_a_dead_mount(mount: FaultyMount, serve: Serve) -> None:
    mount.kill()
    with pytest.raises(ServerUnavailable, match="ENOTCONN") as refused:
        serve(mount.path)
    assert f"the root {mount.path} cannot be used" in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_a_stop_on_a_dead_mount(mount: FaultyMount, serve: Serve) -> None:
    """SIGTERM still ends the server, with what it could not do in the log."""
    serving = serve(mount.path)
    serving.put(DESCRIPTOR, PAYLOAD)
    mount.kill()
    assert serving.process.stop() == 0
    assert "the server's claim stays until it expires" in serving.process.log()
