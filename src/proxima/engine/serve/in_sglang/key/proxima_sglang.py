"""Starts SGLang with its key from the environment: on the command line, every user of the machine could read it.
SGLang logs all its arguments; its log gets another word for the key."""

import logging
import os
import sys
from typing import Any


def hide(key: str) -> None:
    """Replace the key in every record that this process logs from now on."""
    make = logging.getLogRecordFactory()

    def made(*arguments: Any, **fields: Any) -> logging.LogRecord:
        record = make(*arguments, **fields)
        if key in f"{record.msg} {record.args}":
            record.msg = record.getMessage().replace(key, "(hidden)")
            record.args = ()
        return record

    logging.setLogRecordFactory(made)


if __name__ == "__main__":  # not in the processes that it spawns, which import this module too
    from sglang.cli.main import main

    key = os.environ.pop("PROXIMA_SERVER_KEY", "")
    if key:
        hide(key)
        sys.argv += ["--api-key", key]
    main()
