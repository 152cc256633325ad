"""Write the JSON schema of recipes. First line of a recipe for editors: # yaml-language-server: $schema=schema.json"""

import sys
from pathlib import Path
from typing import Annotated

from proxima.cli.parameters import Argument


def write_schema(out: Annotated[str | None, Argument("file to write; default: standard output")] = None) -> None:
    """Write the schema to a file, or to standard output if `out` is None."""
    import json

    from proxima.config.json_schema import json_schema
    from proxima.data.atomic_files import write_atomic

    text = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        write_atomic(Path(out), text)
        print(f"wrote {out}")


COMMAND = write_schema
