"""A command without a process of its own, where that would show nothing more: it takes a second to
start one, mostly for imports."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from kvserve.cli import main


@dataclass(frozen=True, slots=True)
class Ended:
    stdout: str
    stderr: str


def run_here(*arguments: str, code: int = 0) -> Ended:
    """What `kvserve ARGUMENTS` prints; errors are shown as the process shows them."""
    out, err, found = io.StringIO(), io.StringIO(), 0
    argv = patch.object(sys, "argv", ["kvserve", *arguments])
    with argv, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            found = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    assert found == code, out.getvalue() + err.getvalue()
    return Ended(out.getvalue(), err.getvalue())
