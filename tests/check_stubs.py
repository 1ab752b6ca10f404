"""`make check`: the committed stubs are what grpcio-tools makes of proto/ today."""

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        outputs = [f"--{kind}_out={directory}" for kind in ("python", "pyi", "grpc_python")]
        source = "kvserve/v1/kvserve.proto"
        if protoc.main(["protoc", f"-I{ROOT / 'proto'}", *outputs, source]) != 0:
            return 1
        fresh = Path(directory) / "kvserve/v1"
        names = sorted(path.name for path in fresh.iterdir())
        stale = [
            name
            for name in names
            if not (ROOT / "kvserve/v1" / name).exists()
            or not filecmp.cmp(fresh / name, ROOT / "kvserve/v1" / name, shallow=False)
        ]
    if stale:
        print(f"stale: {', '.join(stale)}; run `make proto`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
