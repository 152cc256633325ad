"""Write the JSON schema of recipes. First line of a recipe for editors: # yaml-language-server: $schema=schema.json"""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", nargs="?", help="file to write; default: standard output")


def run(arguments: argparse.Namespace) -> int:
    return write_schema(arguments.out)


def write_schema(file: str | None = None) -> int:
    """Write the schema to a file; None: to standard output."""
    import json

    from proxima.config.json_schema import json_schema
    from proxima.data.atomic_files import write_atomic

    text = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    if file is None:
        sys.stdout.write(text)
    else:
        write_atomic(Path(file), text)
        print(f"wrote {file}")
    return 0
