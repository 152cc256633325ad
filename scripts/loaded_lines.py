"""Count the lines of proxima that a two-step quickstart loads: `python scripts/loaded_lines.py [--modules]`.

The quickstart runs on a tiny random model in a separate process; the lines of every module of proxima that the process
has imported are counted afterwards. `code` excludes blank lines, comments and docstrings. `--modules` lists each module
with the line that imported it first, which shows what edge to cut.
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
SMALL = (
    *("train.steps=2", "train.prompts_per_step=2", "train.completions_per_prompt=2", "sampling.max_tokens=4"),
    "reward=[number, {kind: scripts.varied_reward:Varied}]",  # no answer is right: a run without gradients fails
    *("eval.limit=2", "engine.slots=4", "model.max_length=200", "model.device=cpu", "runtime.threads=1"),
)
RUN_AND_LIST = """
import json, sys

class Importers:
    def __init__(self):
        self.of = {}
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame and ("importlib" in frame.f_code.co_filename or frame.f_code.co_filename.endswith("data/kinds.py")):
            frame = frame.f_back
        self.of[name] = f"{frame.f_globals.get('__name__')}:{frame.f_lineno}" if frame else ""

importers = Importers()
sys.meta_path.insert(0, importers)
from proxima.cli.main import main
code = main(sys.argv[2:])
files = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "proxima"}
with open(sys.argv[1], "w") as file:
    json.dump({name: [path, importers.of.get(name, "")] for name, path in files.items()}, file)
sys.exit(code)
"""


class Loaded(NamedTuple):
    """A module: its lines, those with code, and the module and line that imported it first."""

    lines: int
    code: int
    importer: str


def loaded_by_quickstart(model: Path, folder: Path) -> dict[str, Loaded]:
    """Return the modules of proxima that a quickstart on `model` loads, by name; `folder` is empty and gets the run."""
    listing = folder / "modules.json"
    run = ["train", "quickstart", *SMALL, f"model.path={model}", f"folder={folder / 'run'}", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN_AND_LIST, str(listing), *run]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return {
        name: Loaded(Path(path).read_text(encoding="utf-8").count("\n"), code_lines(Path(path)), importer)
        for name, (path, importer) in sorted(json.loads(listing.read_text()).items())
    }


def code_lines(path: Path) -> int:
    """Count the lines without blank lines, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                documented.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modules", action="store_true", help="list each module with what imported it first")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.tiny import make_tiny

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("llama", Path(folder) / "model")
        (Path(folder) / "work").mkdir()
        modules = loaded_by_quickstart(model, Path(folder) / "work")
    for name, module in modules.items() if options.modules else ():
        print(f"{module.lines:>6,}{module.code:>6,}  {name:<45} {module.importer}")
    lines, code = (sum(column) for column in zip(*(module[:2] for module in modules.values()), strict=True))
    print(f"{lines:,} lines, {code:,} of code, in {len(modules)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
