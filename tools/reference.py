"""Write the reference of the Python API from its docstrings: reference/index.html, by pdoc.

    make reference

The package offers its names lazily; pdoc looks for them in the module, so they are put there.
"""

import sys
from pathlib import Path

import pdoc

import meshwise

MODULES = "meshwise", "meshwise.spec", "meshwise.bridges.loader", "meshwise.reshard.holdings"


def main() -> None:
    vars(meshwise).update({name: getattr(meshwise, name) for name in meshwise.__all__})
    pdoc.render.configure(docformat="markdown", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=Path(sys.argv[1]))


if __name__ == "__main__":
    main()
