"""Keep words plain: `python tools/docstrings.py` prints docstrings and names that are not, exits 1.

A docstring begins with a verb or names the thing. A class name stands once in the package.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "meshwise"
RIDDLE = re.compile(
    "(Of|What|Into|From|To|By|With|Who|Where|Which|That|How|In|On|At|For|All of|As) "
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    found, classes = list[str](), defaultdict[str, list[str]](list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
            if isinstance(node, DOCUMENTED) and RIDDLE.match(text := ast.get_docstring(node) or ""):
                begins = " ".join(text.split()[:5])
                found.append(
                    f"{path}:{node.body[0].lineno}: {begins!r} ...: begin with a verb or the thing"
                )
    found += [
        f"class {name} stands in {' and '.join(places)}: use a name of its own"
        for name, places in classes.items()
        if len(places) > 1
    ]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
