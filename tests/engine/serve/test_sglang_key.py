"""The key of SGLang, which logs all its arguments, is in neither its command nor its log."""

import os
import subprocess
import sys
from pathlib import Path

from proxima.engine.serve.launch import IN_SGLANG

FAKE = """
import logging, os, sys
def main():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s", force=True)
    assert sys.argv[-2:] == ["--api-key", "a-secret-key"] and "PROXIMA_SERVER_KEY" not in os.environ
    logging.info(f"server_args={{'api_key': '{sys.argv[-1]}'}} 100%s")
    logging.info("args %s", sys.argv)
    logging.info("plain %d", 7)
    print(open("/proc/self/cmdline").read().replace("\\0", " "))
"""


def test_the_key_is_not_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "sglang" / "cli").mkdir(parents=True)
    (tmp_path / "sglang" / "cli" / "main.py").write_text(FAKE)
    variables = {"PYTHONPATH": f"{IN_SGLANG / 'key'}:{tmp_path}", "PROXIMA_SERVER_KEY": "a-secret-key"}
    command = [sys.executable, "-m", "proxima_sglang", "serve"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "a-secret-key" not in done.stdout + done.stderr
    assert "'api_key': '(hidden)'" in done.stdout and "plain 7" in done.stdout and "100%s" in done.stdout
