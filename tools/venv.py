"""Make .venv for this checkout, on the interpreter that runs this file (`make venv PYTHON=...`).

An interpreter that has torch >= 2.11 is reused: .venv sees its packages, and pip adds only what
pyproject.toml asks for and the interpreter lacks, without a network when nothing is. Otherwise pip
installs requirements.lock, each file checked by its hash, and torch. Meshwise itself is never
built: .venv points at the checkout.
"""

import os
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = str(VENV / "bin" / "python")
HELP = "no network? put the wheels in a folder: PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder> make venv"


def has_torch() -> bool:
    versions = [re.findall(r"\d+", torch.version) for torch in metadata.distributions(name="torch")]
    return any((int(major), int(minor)) >= (2, 11) for major, minor, *_ in versions[:1])


def package_dirs() -> list[str]:
    """Where this interpreter finds packages, PYTHONPATH included; PYTHON may be a venv itself."""
    stdlib = sysconfig.get_path("stdlib")
    others = {stdlib, f"{stdlib}/lib-dynload", str(ROOT / "tools")}
    return [entry for entry in map(os.path.abspath, sys.path) if entry not in others]


def create(borrowed: list[str], project: dict[str, Any]) -> None:
    """.venv, cleared first if another interpreter made it, with what an editable install leaves:
    the checkout's path (then the borrowed ones), its version, its command and entry points."""
    made_by = VENV / "made-by"
    other = made_by.exists() and made_by.read_text() != sys.executable
    options = ["--clear"] * other + ["--without-pip"] * bool(borrowed)
    subprocess.run([sys.executable, "-m", "venv", *options, VENV], check=True)
    made_by.write_text(sys.executable)
    packages = VENV / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (packages / "meshwise.pth").write_text("\n".join([str(ROOT), *borrowed]) + "\n")
    (packages / "meshwise.dist-info").mkdir(exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: meshwise\nVersion: {project['version']}\n"
    (packages / "meshwise.dist-info/METADATA").write_text(head)
    points = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in of.items()), ""])
        for group, of in project["entry-points"].items()
    ]
    (packages / "meshwise.dist-info/entry_points.txt").write_text("\n".join(points))
    command = VENV / "bin" / "meshwise"
    command.write_text(f"#!/bin/sh\nexec '{PYTHON}' -m meshwise \"$@\"\n")
    command.chmod(0o755)


def install(*requirements: str) -> None:
    """Through pip, which leaves what is satisfied alone and then asks no index."""
    if subprocess.run([PYTHON, "-c", "import pip"], capture_output=True).returncode:
        subprocess.run([PYTHON, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, *requirements], stdin=subprocess.DEVNULL).returncode:
        sys.exit(f"pip could not install all that is needed; {HELP}")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (whatever python3 is there runs this)
        sys.exit(f"{sys.executable} is too old; name a Python >= 3.11: make venv PYTHON=python3.12")
    if Path(sys.prefix) == VENV:
        sys.exit("PYTHON is .venv's own; name the interpreter to build .venv on")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    borrowed = package_dirs() if has_torch() else []
    what = "the torch of" if borrowed else "requirements.lock on"
    print(f".venv: {what} {sys.executable}", flush=True)
    create(borrowed, project)
    extras = project["optional-dependencies"]
    loose = [*project["dependencies"], *extras["torch"], *extras["dev"]]
    if borrowed:
        install(*loose)
    else:
        install("--require-hashes", "-r", str(ROOT / "requirements.lock"))
        install("-r", str(ROOT / "requirements-torch.lock"))


if __name__ == "__main__":
    main()
