"""An `lfs` on PATH that records its arguments and prints what a real one has printed."""

import os
from pathlib import Path

PLAIN = "stripe_count:  1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n\n"
UNSET = "stripe_count:  1 stripe_size:   1048576 pattern:       0 stripe_offset: -1\n\n"
FOUR_IN_A_POOL = (
    "stripe_count:  4 stripe_size:   4194304 pattern:       raid0 stripe_offset: -1 "
    "pool:          flash\n\n"
)
OVERSTRIPED = (
    "stripe_count:  8 stripe_size:   1048576 pattern:       raid0,overstriped stripe_offset: -1\n\n"
)
DOM = """\
  lcm_layout_gen:    0
  lcm_mirror_count:  1
  lcm_entry_count:   2
    lcme_id:             N/A
    lcme_mirror_id:      N/A
    lcme_flags:          0
    lcme_extent.e_start: 0
    lcme_extent.e_end:   65536
      stripe_count:  0       stripe_size:   65536       pattern:       mdt       stripe_offset: -1

    lcme_id:             N/A
    lcme_mirror_id:      N/A
    lcme_flags:          0
    lcme_extent.e_start: 65536
    lcme_extent.e_end:   EOF
      stripe_count:  1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1

"""
DIRECTORY_PLAIN = (
    "lmv_stripe_count: 0 lmv_stripe_offset: 0 lmv_hash_type: none lmv_max_inherit: 3\n"
)
DIRECTORY_TWO = (
    "lmv_stripe_count: 2 lmv_stripe_offset: -1 lmv_hash_type: crush lmv_max_inherit: 3 "
    "lmv_max_inherit_rr: 0\n"
)
DF = """\
UUID                   1K-blocks        Used   Available Use% Mounted on
tfs1-MDT0000_UUID        5781172        2052     5256288   1% /mnt/lustre/tfs1[MDT:0]
tfs1-OST0000_UUID        9650000     9000000      150000  99% /mnt/lustre/tfs1[OST:0] S
tfs1-OST0001_UUID        9650000     4342500     4807500  48% /mnt/lustre/tfs1[OST:1]
OST0002             : inactive device
tfs1-OST0003_UUID        9650000        1600     9148400   1% /mnt/lustre/tfs1[OST:3] DR

filesystem_summary:     28950000    13344100    14105900  49% /mnt/lustre/tfs1

"""

_SCRIPT = """\
#!/bin/sh
# Its arguments, one a line, then an empty line.
printf '%s\\n' "$@" "" >> {place}/asked
if [ -e "{place}/$1.hangs" ]; then sleep 60; fi
if [ -e "{place}/$1.refusal" ]; then cat "{place}/$1.refusal" >&2; exit 1; fi
case "$1" in
    setstripe | setdirstripe)
        # What is set is shown from then on.
        shown=get${{1#set}}
        if [ -e "{place}/$shown.then" ]; then mv "{place}/$shown.then" "{place}/$shown.shown"; fi ;;
    *) cat "{place}/$1.shown" ;;
esac
"""


class RecordedLfs:
    """The command in the directory `place`; put that in front of PATH."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        script = place / "lfs"
        script.write_text(_SCRIPT.format(place=place))
        script.chmod(0o755)
        self.path = f"{place}{os.pathsep}{os.environ['PATH']}"
        self.shows("getstripe", PLAIN)
        self.shows("getdirstripe", DIRECTORY_PLAIN)
        self.shows("df", DF)

    def shows(self, command: str, text: str, *, then: str | None = None) -> None:
        """Prints `text`; `then` after the matching set command."""
        (self.place / f"{command}.shown").write_text(text)
        if then is not None:
            (self.place / f"{command}.then").write_text(then)

    def refuses(self, command: str, text: str) -> None:
        """Ends with status 1 and `text` on standard error."""
        (self.place / f"{command}.refusal").write_text(text)

    def hangs(self, command: str) -> None:
        (self.place / f"{command}.hangs").touch()

    @property
    def asked(self) -> list[list[str]]:
        """The arguments of each call so far."""
        record = self.place / "asked"
        if not record.exists():
            return []
        return [call.split("\n") for call in record.read_text().split("\n\n") if call]
