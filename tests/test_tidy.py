"""The house style, as far as a machine can tell: sizes, names, and words that must not be there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
BANNED_NAMES = re.compile(r"^(utils?|helpers?|common|misc|managers?|.*_manager|.*_v\d+)$")
"""Say what it is: a module is named after what it owns. Replace, don't stack versions."""

MAY_POLL = {
    "kvserve/testing": "a process that starts shows it only by a file",
    "clients/kvclient/fork_support.py": "gRPC ends its threads by itself and tells nobody",
}


def product_files() -> list[Path]:
    """Everything we ship, but for the generated stubs."""
    found = [
        path
        for folder in ("kvserve", "clients")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "v1" not in path.relative_to(ROOT).parts
    ]
    assert len(found) > 40, "the product has moved"
    return found


def names_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_file = pytest.mark.parametrize("path", product_files(), ids=names_of)


def dotted(node: ast.expr) -> str:
    """`time.sleep` of an expression; empty for what is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def catches(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """Lines whose `except` catches one of `names`, or everything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or dotted(kind) in names for kind in kinds):
                yield node.lineno


@each_file
def test_file_length(path: Path) -> None:
    lines = len(path.read_text("utf-8").splitlines())
    assert lines <= FILE_LINES_MAX, f"{lines} lines: split it by what it owns"


@each_file
def test_function_length(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"line {node.lineno}: {node.name} has {lines} lines"


@each_file
def test_module_names(path: Path) -> None:
    for part in path.relative_to(ROOT).with_suffix("").parts:
        assert not BANNED_NAMES.match(part), f"{part}: name it after what it owns"


@each_file
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "no module docstring"


@each_file
def test_no_unfinished_business(path: Path) -> None:
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        assert not re.search(r"\b(TODO|FIXME|HACK)\b", line), f"line {number}: {line.strip()}"


@each_file
def test_nothing_swallows_every_exception(path: Path) -> None:
    """Only the outermost wrapper of an rpc, and of a background task, may: the stack is logged."""
    if path in (ROOT / "kvserve" / "rpc" / "status.py", ROOT / "kvserve" / "upkeep.py"):
        return
    lines = list(catches(ast.parse(path.read_text("utf-8")), {"Exception"}))
    assert not lines, f"`except Exception` in lines {lines}: name what can go wrong"


@each_file
def test_whoever_catches_everything_raises_it_again(path: Path) -> None:
    """`except BaseException` is for cleaning up: cancellation must pass."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ExceptHandler) and (
            node.type is None or dotted(node.type) == "BaseException"
        ):
            raises = [inner for inner in ast.walk(node) if isinstance(inner, ast.Raise)]
            assert raises, f"line {node.lineno} swallows cancellation"


@each_file
def test_nobody_sleeps(path: Path) -> None:
    """Waiting is for an event; who has none to wait for is in `MAY_POLL`."""
    if any(path.is_relative_to(ROOT / allowed) for allowed in MAY_POLL):
        return
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert dotted(node.func) != "time.sleep", f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            assert "sleep" not in {alias.name for alias in node.names}, f"line {node.lineno}"


class TestTheRulesCanFail:
    """Each check above, on code that breaks it."""

    def test_exceptions_to_the_rules_are_still_needed(self) -> None:
        for allowed in MAY_POLL:
            place = ROOT / allowed
            files = [place] if place.is_file() else list(place.rglob("*.py"))
            assert any("time.sleep" in path.read_text("utf-8") for path in files), allowed

    def test_catching(self) -> None:
        source = (
            "try:\n  x\nexcept (ValueError, Exception):\n  y\ntry:\n  x\nexcept OSError:\n  y\n"
        )
        assert list(catches(ast.parse(source), {"Exception"})) == [3]
        assert list(catches(ast.parse("try:\n  x\nexcept:\n  y\n"), {"Exception"})) == [3]

    @pytest.mark.parametrize("name", ["utils", "helpers", "common", "manager", "store_v2"])
    def test_banned_names(self, name: str) -> None:
        assert BANNED_NAMES.match(name)

    @pytest.mark.parametrize("name", ["v1", "store", "common_prefix", "prefix", "messages"])
    def test_good_names(self, name: str) -> None:
        assert not BANNED_NAMES.match(name)

    def test_dotted_names(self) -> None:
        call = ast.parse("time.sleep(1)").body[0]
        assert isinstance(call, ast.Expr)
        assert isinstance(call.value, ast.Call)
        assert dotted(call.value.func) == "time.sleep"
