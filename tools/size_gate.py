"""Keep the house small: `python tools/size_gate.py` prints what is too long and exits 1."""

import ast
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "meshwise"
MAX_FUNCTION, MAX_MODULE = 60, 500
# Lines of each room. A commit that raises one does nothing else, and says what the lines buy.
ROOMS = {
    "attention": 4_345,
    "bridges": 1_498,
    "cli": 1_691,
    "engine": 3_270,
    "fit": 1_407,
    "launch": 2_024,
    "models": 6_356,
    "nn": 1_362,
    "options": 1_486,
    "pages": 7_776,
    "parallel": 3_209,
    "prices": 1_748,
    "probe": 7_366,
    "reshard": 5_201,
    "search": 5_954,
    "spec": 3_547,
    "suites": 1_003,
    "verbs": 5_266,
    "": 4_397,  # modules beside the rooms
}


def too_long(path: Path, source: str) -> list[str]:
    found = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_MODULE:
        found.append(f"{path}: {num_lines} lines, a module has at most {MAX_MODULE}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                where = f"{path}:{node.lineno}: {node.name}"
                found.append(f"{where} has {length} lines, a function has at most {MAX_FUNCTION}")
    return found


def main() -> None:
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    found = [line for path, source in sources.items() for line in too_long(path, source)]
    sizes = Counter[str]()
    for path, source in sources.items():
        room, *within = path.relative_to(PACKAGE).parts
        sizes[room if within else ""] += len(source.splitlines())
    for room, size in sizes.items():
        if size > (most := ROOMS.get(room, 0)):
            found.append(f"{PACKAGE / room}: {size} lines, this room has at most {most}")
    print(*found, f"meshwise: {sizes.total()} of {sum(ROOMS.values())} lines", sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
