"""Run proxima on an emulated ARM processor: `python scripts/arm_root.py FOLDER doctor`, or any other of its commands.

Makes Debian for arm64 in FOLDER, with torch and what else proxima needs, and starts its interpreter under qemu's user
mode, which translates instructions and leaves system calls to this kernel. Needs Debian's packages `debootstrap` and
`qemu-user-static`, root, and 3 GB; an instruction takes some ten times as long as on this processor. The torch is an
older one, since the wheel of 2.13 for aarch64 needs the libraries of CUDA.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEBIAN = ("bookworm", "https://deb.debian.org/debian")
TORCH = "torch==2.9.1"
PACKAGES = ("numpy", "transformers", "safetensors", "pyarrow", "pyyaml", "rich", "jinja2", "httpx")
OF_TORCH = ("filelock", "setuptools", "typing-extensions", "sympy", "networkx", "fsspec")
SOURCES = ("src", "packages/proxima-plan/src")
# its children are ARM too: sys.executable is this file
INTERPRETER = """#!/bin/sh
export PYTHONPATH={path}
exec qemu-aarch64-static -cpu neoverse-n1 -L {root} {root}/usr/bin/python3 "$@"
"""


def main() -> int:
    if len(sys.argv) < 3:
        print(f"usage: {sys.argv[0]} FOLDER COMMAND …", file=sys.stderr)
        return 2
    root = Path(sys.argv[1]).resolve()
    interpreter = root / "python"
    if not interpreter.exists():
        make(root)
        path = os.pathsep.join(map(str, [root / "site", *(ROOT / name for name in SOURCES)]))
        interpreter.write_text(INTERPRETER.format(root=root, path=path), encoding="utf-8")
        interpreter.chmod(0o755)
    return subprocess.run([str(interpreter), "-m", "proxima", *sys.argv[2:]], check=False).returncode


def make(root: Path) -> None:
    """Unpack Debian's packages and install Python's. Nothing in the folder is executed."""
    bootstrap = ["debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", "--include=python3"]
    subprocess.run([*bootstrap, DEBIAN[0], str(root), DEBIAN[1]], check=True)
    for package in sorted((root / "var" / "cache" / "apt" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(root / "site")]
    pip += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11"]
    pip += [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (28, 26, 24, 17)]
    subprocess.run([*pip, "--no-deps", TORCH], check=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "torch" not in line]
    constraints = root / "constraints.txt"
    constraints.write_text("\n".join(pins), encoding="utf-8")
    subprocess.run([*pip, "--constraint", str(constraints), *PACKAGES, *OF_TORCH], check=True)


if __name__ == "__main__":
    sys.exit(main())
