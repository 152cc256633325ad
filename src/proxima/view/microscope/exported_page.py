"""A single file that shows a step, or the completions of one prompt, without a server; page and data are inline."""

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.data.jsonl import dumps
from proxima.view.microscope.app import PAGE
from proxima.view.microscope.completion_page import CompletionPage
from proxima.view.microscope.step_file import StepFile
from proxima.view.microscope.token_text import TokenText
from proxima.view.microscope.viewed_run import ViewedRun

MOST_TOKENS = 50_000  # tokens whose explanations are included; further completions have only figures
MOST_COMPLETIONS = 512
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)


def exported_page(run: ViewedRun, step: int, uid: int | None = None) -> str:
    """Return the page as HTML.

    Args:
        step: the step to show; uid: the only prompt whose completions are included; None: all prompts.

    Raises:
        UserError: the step has no completions, or no such prompt.
    """
    file = run.step(step)
    start = f"#/0/step/{step}" if uid is None else f"#/0/step/{step}/group/{uid}"
    return _single_file(dumps({"start": start, "data": dict(_answers(run, file, uid))}))


def step_of(run: ViewedRun, place: str) -> tuple[int, int | None]:
    """Return the step that `--export` names and, for `UID` or `STEP/UID`, the prompt. A number that is not a step is a
    UID.

    Raises:
        UserError: it names neither.
    """
    first, slash, second = place.partition("/")
    numbers = [int(part) for part in (first, second) if part.isdecimal()]
    steps = run.rollout_steps()
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    if len(numbers) == 1 and not slash:
        if numbers[0] in steps:
            return numbers[0], None
        for step in steps:
            if numbers[0] in run.step(step).table["prompt_uid"]:
                return step, numbers[0]
    raise UserError(f"--export {place}: the run has no such step and no such prompt; give STEP, UID or STEP/UID")


def _answers(run: ViewedRun, file: StepFile, uid: int | None) -> Iterator[tuple[str, Any]]:
    """Yield the server's answers, by their path after `/api/`."""
    at, text, exported = f"0/step/{file.step}", TokenText.of_run(run.files.path, run.model), 0
    yield "runs", [run.about() | {"run": 0, "folder": run.files.path.resolve().name}]
    yield "0/trend", run.trend() | {"rollout_steps": [file.step]}
    yield "0/state", run.state() | {"running": False, "steps": [file.step]}
    yield at, file.answer() | {"metrics": run.vital_signs(file.step)}
    uids = dict.fromkeys(file.table["prompt_uid"]) if uid is None else [uid]
    for prompt in uids:
        yield f"{at}/group/{prompt}", file.of_group(prompt)
    chosen = [key for key in file.rows if uid is None or key[0] == uid]
    for key in chosen[:MOST_COMPLETIONS]:
        page = CompletionPage(run, file, key, text)
        place = f"{at}/completion/{'.'.join(map(str, key))}"
        yield place, page.answer()
        exported += (length := len(page.row["tokens"]))
        if exported <= MOST_TOKENS:
            yield from ((f"{place}/token/{token}", page.token(token)) for token in range(length))


def _single_file(data: str) -> str:
    """Return index.html with its styles, its modules and the data inline; nothing else can run or be fetched."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    script = bundle(PAGE, re.findall(r'<script type="module" src="([\w.]+)"></script>', html)[0])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    inert = re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", data)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    scripts = f'<script type="application/json" id="exported">{inert}</script>\n<script type="module">{script}</script>'
    html = re.sub(r'<link rel="modulepreload"[^>]*>\n?|<script type="module" src="[\w.]+"></script>\n?', "", html)
    html = re.sub(r'<link rel="stylesheet" href="([\w.]+)">', lambda match: f"<style>{_text(match[1])}</style>", html)
    html = html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}', 1)
    return html.replace("</body>", f"{scripts}\n</body>", 1)


def _text(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def bundle(folder: Path, main: str) -> str:
    """Bundle modules into one script: each becomes a function that is called once, after those that it imports. Modules
    may import and export only names, and not in a cycle."""
    done: dict[str, str] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"{name} imports itself through {' → '.join(above)}")
        source = (folder / name).read_text(encoding="utf-8")
        for _, other in IMPORT.findall(source):
            if other not in done:
                add(other, (*above, name))
        body = IMPORT.sub(lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = modules[{match[2]!r}];", source)
        names = ", ".join(match[1] for match in EXPORT.findall(body))
        body = EXPORT.sub(r"\1 \2", body)
        done[name] = f"modules[{name!r}] = await (async () => {{\n{body}\nreturn {{{names}}};\n}})();"

    add(main, ())
    return "const modules = {};\n" + "\n".join(done.values()).replace("</script", "<\\/script")
