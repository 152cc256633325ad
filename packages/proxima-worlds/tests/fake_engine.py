"""A program with the command line of podman that starts nothing: commands of a container run here, in a folder that
stands for its root. The folder is PROXIMA_FAKE_ROOT; /tests, /logs and /app are in it."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = os.environ["PROXIMA_FAKE_ROOT"]


def inside(text: str) -> str:
    return re.sub(r"(?<![\w/])/(tests|logs|app)\b", rf"{ROOT}/\1", text)


def main(words: list[str]) -> int:
    if words[0] == "image":
        print("sha256:1")
    if words[0] == "cp" and words[-1] == "-":
        file = Path(inside(words[1].partition(":")[2]))
        if not file.exists():
            return 1
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
            archive.add(file, file.name)
    elif words[0] == "cp":
        target = Path(inside(words[2].partition(":")[2]))
        for source in Path(words[1]).iterdir():
            text = inside(source.read_text())
            (target / source.name).write_text(text)
    elif words[0] == "exec":
        start = next(i for i, word in enumerate(words) if word.endswith("/relay"))
        seconds, *command = words[start + 2 :]
        Path(ROOT, "app").mkdir(exist_ok=True)
        try:
            line = [inside(word) for word in command]
            return subprocess.run(line, cwd=f"{ROOT}/app", timeout=float(seconds) or None).returncode
        except subprocess.TimeoutExpired:
            return 124
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
