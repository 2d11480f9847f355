"""Keep the house small: `python tools/size_gate.py` prints what is too long and exits 1."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "meshwise"
MAX_FUNCTION, MAX_MODULE, MAX_PACKAGE = 80, 500, 51_850


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
    total = sum(len(source.splitlines()) for source in sources.values())
    if total > MAX_PACKAGE:
        found.append(f"{PACKAGE}: {total} lines, the package has at most {MAX_PACKAGE}")
    print(*found, f"meshwise: {total} of {MAX_PACKAGE} lines", sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
