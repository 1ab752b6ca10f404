"""Gives each peer an environment outside the project's own, and keeps it for the next run."""

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.recipes import Environment, Recipe, SystemNeed

_PIP_TIMEOUT_S = 1200.0
_APT_TIMEOUT_S = 300.0
_DONE = "kvserve-peer.json"


class NotInstalled(Exception):
    """Why a peer is not there; what to do where that is known."""


def python_of(recipe: Recipe, work_dir: Path) -> Path:
    return work_dir / "venvs" / recipe.environment.name / "bin" / "python"


def install(recipe: Recipe, work_dir: Path, *, with_apt: bool) -> None:
    """Installs what is missing, and nothing if it is there already.

    Raises:
        NotInstalled: it cannot be had here.
    """
    missing = [need.package for need in recipe.system if not _is_there(need)]
    if missing and with_apt:
        _apt(missing)
        missing = [need.package for need in recipe.system if not _is_there(need)]
    if missing:
        raise NotInstalled(f"needs `apt-get install {' '.join(missing)}` (or run with --apt)")
    _make(recipe.environment, work_dir / "venvs" / recipe.environment.name)


def _is_there(need: SystemNeed) -> bool:
    if need.program:
        return shutil.which(need.program) is not None
    return ctypes.util.find_library(need.library) is not None


def _make(environment: Environment, directory: Path) -> None:
    done = directory / _DONE
    wanted = json.dumps(asdict(environment))
    if done.exists() and done.read_text("utf-8") == wanted:
        return
    # Half of an environment, or another version's, is made again from nothing.
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(directory)], _PIP_TIMEOUT_S)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    if environment.alone:
        _run([*pip, "--no-deps", *environment.alone], _PIP_TIMEOUT_S)
    if environment.packages:
        _run([*pip, *environment.packages], _PIP_TIMEOUT_S)
    done.write_text(wanted, "utf-8")


def _apt(packages: Sequence[str]) -> None:
    quiet = ["-qq", "-y", "--no-install-recommends"]
    _run(["apt-get", "update", "-qq"], _APT_TIMEOUT_S)
    _run(["apt-get", "install", *quiet, *packages], _APT_TIMEOUT_S)


def _run(command: Sequence[str], timeout_s: float) -> None:
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from error
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if "WARNING" not in line]
        why = lines[-1] if lines else f"status {ended.returncode}"
        raise NotInstalled(f"`{' '.join(command[:5])} ...`: {why}")
