"""Runs command lines, a JSON list in the first argument, in the locale of this process; prints their exit codes.

Words arrive as UTF-8, and are decoded as those of a shell are.
"""

import json
import os
import sys

from proxima.cli.main import enter_utf8, main

enter_utf8()
codes = {}
for words in json.loads(sys.argv[1]):
    given = [os.fsdecode(word.encode()) for word in words]
    sys.stderr.write(f"$ {words!a}\n")
    try:
        code = main(given)
    except SystemExit as end:
        code = end.code or 0
    codes[" ".join(words)] = code
    sys.stdout.flush()
sys.stderr.write("\n" + json.dumps(codes) + "\n")
