"""Two tasks in Harbor's format, made by hand on the image of `tests.containers`."""

from pathlib import Path

from tests.containers import IMAGE

ANSWER = {
    "task.toml": """
version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 60.0
[environment]
cpus = 0.5
memory = "128M"
""",
    "instruction.md": "<!-- a canary -->\n\nWrite the sum of the two numbers in /app/numbers.txt to /app/sum.txt.\n",
    "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nCOPY numbers.txt /app/numbers.txt\n",
    "environment/numbers.txt": "19 23\n",
    "solution/solve.sh": "#!/bin/sh\nset -- $(cat numbers.txt)\necho $(($1 + $2)) > sum.txt\n",
    "tests/test.sh": """#!/bin/sh
if [ "$(cat /app/sum.txt 2> /dev/null)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
exit 3
""",
}
WORD = {
    "task.toml": f"""
schema_version = "1.1"
[environment]
docker_image = "{IMAGE}"
memory_mb = 128
workdir = "/tmp"
[environment.env]
WORD = "${{NO_SUCH_VARIABLE:-blue}}"
[verifier.env]
EXPECTED = "blue"
""",
    "instruction.md": "Write $WORD to /tmp/word.txt.",
    "solution/solve.sh": "echo $WORD > word.txt\n",
    "tests/test.sh": """#!/bin/sh
score=0; grep -qx "$EXPECTED" /tmp/word.txt && score=1
echo 9 > /logs/verifier/reward.txt
echo "{\\"reward\\": $score, \\"style\\": 0.5}" > /logs/verifier/reward.json
""",
}


def write_tasks(folder: Path, suffix: str = "", **changes: str) -> Path:
    """Write both tasks, with a suffix of their names; `changes` are other texts of files of `answer`."""
    for name, files in (("answer", ANSWER), ("word", WORD)):
        for file, text in files.items():
            place = folder / f"{name}{suffix}" / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(changes.get(file, text) if name == "answer" else text)
    return folder
