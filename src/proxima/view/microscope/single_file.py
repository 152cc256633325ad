"""What a page needs to be one file: its modules as one script, its data as text that can't run, its images as
addresses that hold them, and its policy."""

import base64
import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

from proxima.data import UserError
from proxima.model.images.image_folder import read_image, read_names
from proxima.system.jsonl import dumps

PAGE = Path(__file__).parent / "page"
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)


def bundle(main: str, folders: Sequence[Path] = (PAGE,)) -> str:
    """Bundle modules into one script: each becomes a function that is called once, after those that it imports. Modules
    may import and export only names, and not in a cycle.

    Args:
        main: the module that starts the page; the others are those that it needs.
        folders: where modules are found, in this order.
    """
    done: dict[str, str] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"{name} imports itself through {' → '.join(above)}")
        place = next(folder / name for folder in folders if (folder / name).is_file())
        source = place.read_text(encoding="utf-8")
        for _, other in IMPORT.findall(source):
            if other not in done:
                add(other, (*above, name))
        body = IMPORT.sub(lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = modules[{match[2]!r}];", source)
        names = ", ".join(match[1] for match in EXPORT.findall(body))
        body = EXPORT.sub(r"\1 \2", body)
        done[name] = f"modules[{name!r}] = await (async () => {{\n{body}\nreturn {{{names}}};\n}})();"

    add(main, ())
    return "const modules = {};\n" + "\n".join(done.values()).replace("</script", "<\\/script")


def policy_of(script: str) -> str:
    """Return the content security policy of a page with this script: nothing else can run or be fetched."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"


def inert_json(value: object) -> str:
    """Encode JSON for a <script> element: without `<`, hence without `</script>` or `<!--`."""
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", dumps(value))


def thumbnails(run: Path, numbers: Sequence[int], side: int = 512) -> list[str]:
    """Images of a run by their numbers, as addresses that hold them, at most `side` pixels wide and high unless their
    files are small; empty for one that is gone or can't be read."""
    try:
        names = read_names(run / "images") if numbers else []
    except UserError:  # `proxima check` tells why
        names = []
    return [_address(run / "images", names, number, side) for number in numbers]


def _address(folder: Path, names: Sequence[str], number: int, side: int) -> str:
    if not 0 <= number < len(names):
        return ""
    name = names[number]
    try:
        content, image = read_image(folder, name)
    except (ImportError, UserError):  # no PIL, or a file that is gone or damaged
        return ""
    if len(content) > 64 * side:
        image.thumbnail((side, side))
        out = io.BytesIO()
        image.save(out, "PNG")
        content = out.getvalue()
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
