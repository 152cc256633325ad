"""Write the JSON schema of recipes. First line of a recipe for editors: # yaml-language-server: $schema=schema.json"""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", nargs="?", help="file to write; default: standard output")


def run(arguments: argparse.Namespace) -> int:
    import json

    from proxima.config.json_schema import json_schema

    text = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        Path(arguments.out).write_text(text, encoding="utf-8")
        print(f"wrote {arguments.out}")
    return 0
