"""Lustre: POSIX, and what a server has to know beyond it.

* Space is per storage target (OST): a file is refused with ENOSPC while others have room, so the
  store may try a new file a few times (`full_retries`; see `store/temp_file.py`).
* How files and directories are spread over targets is a property of directories, inherited when
  something is made in them. It is set once, on the root, and only where it differs.
* Renames are cheap on one metadata target: the store's temporary names see to that
  (`store/paths.py`).

Nothing in here can keep a server from starting: what `lfs` refuses is a warning that has the
command to run by hand.
"""

import logging
import shlex
from collections.abc import Callable

from kvserve.config import LustreConfig
from kvserve.errors import StorageUnavailable
from kvserve.fs.lfs import Lfs, OstSpace, parse_directory_layout, parse_layout, parse_space
from kvserve.fs.posix import PosixFileSystem

log = logging.getLogger(__name__)

_FULL_RETRIES = 3
# A start waits for `lfs` no longer than this, all calls together.
_START_BUDGET_S = 20.0
_SPACE_BUDGET_S = 10.0
_USED_SHARE_WARNING = 0.9


class LustreFileSystem(PosixFileSystem):
    """The tree of a mounted Lustre client."""

    full_retries = _FULL_RETRIES

    def prepare_root_blocking(self, root: str, config: LustreConfig) -> None:
        """Sets the layouts that `config` asks for where they differ; warns of full targets."""
        lfs = Lfs(_START_BUDGET_S)
        if config.stripe_count:
            _set_layout_blocking(
                lfs,
                f"file layout of {root}",
                show=("getstripe", "-d", root),
                change=lambda shown: file_layout_change(root, config, shown),
            )
        if config.mdt_count:
            _set_layout_blocking(
                lfs,
                f"directory layout of {root}",
                show=("getdirstripe", "-D", root),
                change=lambda shown: directory_layout_change(root, config, shown),
            )
        try:
            _warn_of_full(_space_blocking(lfs, root))
        except StorageUnavailable as error:
            log.warning("the space of each storage target is unknown: %s", error)

    def space_blocking(self, root: str) -> list[OstSpace]:
        """Space of every target that answers.

        Raises:
            StorageUnavailable: `lfs` could not tell.
        """
        return _space_blocking(Lfs(_SPACE_BUDGET_S), root)


def _space_blocking(lfs: Lfs, root: str) -> list[OstSpace]:
    # Lazy: targets that are not connected are left out instead of waited for.
    return parse_space(lfs.run_blocking("df", "--lazy", root))


def file_layout_change(root: str, config: LustreConfig, shown: str) -> list[str] | None:
    """The `lfs` arguments that give new files the wanted layout; None if `shown` has it already.

    A pool that an administrator chose stays.
    """
    components = parse_layout(shown)
    stripe_size, dom_size = config.stripe_size_bytes, config.dom_size_bytes
    has_it = len(components) == (2 if dom_size else 1)
    if has_it:
        data = components[-1]
        has_it = (
            not data.is_on_mdt
            and data.stripe_count == config.stripe_count
            and stripe_size in (0, data.stripe_size_bytes)
        )
    if has_it and dom_size:
        has_it = components[0].is_on_mdt and components[0].end_bytes == dom_size
    if has_it:
        return None
    arguments = ["setstripe"]
    if dom_size:
        arguments += ["-E", f"{dom_size >> 10}k", "-L", "mdt", "-E", "-1"]
    arguments += ["-c", str(config.stripe_count)]
    if stripe_size:
        arguments += ["-S", f"{stripe_size >> 10}k"]
    if components and components[-1].pool:
        arguments += ["-p", components[-1].pool]
    return [*arguments, root]


def directory_layout_change(root: str, config: LustreConfig, shown: str) -> list[str] | None:
    """The `lfs` arguments that spread new directories over `mdt_count` metadata targets.

    The hash is named: with the older default, fnv_1a_64, a temporary name and its final name may
    lie on different targets.
    """
    stripes, hash_type = parse_directory_layout(shown)
    if stripes == config.mdt_count and hash_type.startswith("crush"):
        return None
    return ["setdirstripe", "-D", "-c", str(config.mdt_count), "-H", "crush", root]


def _set_layout_blocking(
    lfs: Lfs,
    what: str,
    *,
    show: tuple[str, ...],
    change: Callable[[str], list[str] | None],
) -> None:
    arguments = change("") or []
    try:
        before = lfs.run_blocking(*show)
        needed = change(before)
        if needed is None:
            log.info("the %s is as wanted: %s", what, _one_line(before))
            return
        arguments = needed
        lfs.run_blocking(*arguments)
        log.info("set the %s: %s; it was: %s", what, _command(arguments), _one_line(before))
        after = lfs.run_blocking(*show)
    except StorageUnavailable as error:
        log.warning(
            "the %s may not be as wanted: %s; by hand: %s", what, error, _command(arguments)
        )
        return
    if change(after) is not None:
        log.warning("%s was taken differently: %s", _command(arguments), _one_line(after))


def _warn_of_full(targets: list[OstSpace]) -> None:
    for target in targets:
        if target.used_share >= _USED_SHARE_WARNING:
            log.warning(
                "storage target %s (%s) is %.0f%% full, %.1f GiB available: chunks that land on it "
                "are refused sooner than the whole file system is full",
                target.name,
                target.uuid,
                100 * target.used_share,
                target.available_bytes / (1 << 30),
            )


def _command(arguments: list[str]) -> str:
    return shlex.join(["lfs", *arguments])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
