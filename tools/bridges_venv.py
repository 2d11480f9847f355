"""Make .venv-bridges: what .venv has, and vLLM and Megatron-core of requirements-bridges.lock."""

import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-bridges"


def main() -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (base,) = site.getsitepackages()
    seen = VENV / "lib" / version / "site-packages" / "base.pth"
    seen.write_text(f"import site; site.addsitedir({base!r})\n")
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    lock = str(ROOT / "requirements-bridges.lock")
    subprocess.run([*pip, "--ignore-requires-python", "--require-hashes", "-r", lock], check=True)


if __name__ == "__main__":
    main()
