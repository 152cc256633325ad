"""A single file that shows a step, or the completions of one prompt, without a server; page and data are inline."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.system.atomic_files import write_atomic
from proxima.system.damage import reading
from proxima.view.microscope.completion_page import CompletionPage
from proxima.view.microscope.single_file import PAGE, bundle, inert_json, policy_of
from proxima.view.microscope.step_file import StepFile
from proxima.view.microscope.viewed_run import ViewedRun

MOST_TOKENS = 50_000  # tokens whose explanations are included; further completions have only figures
MOST_COMPLETIONS = 512


def exported_page(run: ViewedRun, step: int, uid: int | None = None) -> str:
    """Return the page as HTML.

    Args:
        step: the step to show; uid: the only prompt whose completions are included; None: all prompts.

    Raises:
        UserError: the step has no completions, or no such prompt, or its file is damaged.
    """
    file = run.step(step)
    start = f"#/0/step/{step}"
    if uid is not None:
        start += f"/group/{uid}"
    with reading(file.path):
        answers = dict(_answers(run, file, uid))
    return _single_file({"start": start, "data": answers})


def write_exported_page(run: ViewedRun, place: str) -> Path:
    """Write the page of a step, or of a prompt, to the current folder, as `RUN-step-12.html`; return its path."""
    step, uid = step_of(run, place)
    name = f"{run.files.path.resolve().name}-step-{step}"
    if uid is not None:
        name += f"-prompt-{uid}"
    file = Path(f"{name}.html")
    write_atomic(file, exported_page(run, step, uid))
    return file


def step_of(run: ViewedRun, place: str) -> tuple[int, int | None]:
    """Return the step that `--export` names and, for `UID` or `STEP/UID`, the prompt. A number that is not a step is a
    UID.

    Raises:
        UserError: it names neither.
    """
    first, slash, second = place.partition("/")
    numbers = [int(part) for part in (first, second) if part.isdecimal() and len(part) < 10]
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
    at = f"0/step/{file.step}"
    exported = 0
    yield "runs", [run.about() | {"run": 0, "folder": run.files.path.resolve().name}]
    yield "0/trend", run.trend() | {"rollout_steps": [file.step]}
    yield "0/state", run.state() | {"running": False, "steps": [file.step]}
    yield at, file.answer() | {"metrics": run.vital_signs(file.step), "verdicts": run.verdicts(file.step)}
    uids = list(dict.fromkeys(file.table["prompt_uid"])) if uid is None else [uid]
    for prompt in uids:
        yield f"{at}/group/{prompt}", file.of_group(prompt)
    chosen = [key for key in file.rows if uid is None or key[0] == uid]
    for key in chosen[:MOST_COMPLETIONS]:
        page = CompletionPage(run, file, key)
        place = f"{at}/completion/{'.'.join(map(str, key))}"
        yield place, page.answer()
        length = len(page.row["tokens"])
        exported += length
        if exported <= MOST_TOKENS:
            for token in range(length):
                yield f"{place}/token/{token}", page.token(token)


def _single_file(content: object) -> str:
    """Return index.html with its styles, its modules and the data inline; nothing else can run or be fetched."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    script = bundle(re.findall(r'<script type="module" src="([\w.]+)"></script>', html)[0])
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy_of(script)}">'
    data = f'<script type="application/json" id="exported">{inert_json(content)}</script>'
    html = re.sub(r'<link rel="modulepreload"[^>]*>\n?|<script type="module" src="[\w.]+"></script>\n?', "", html)
    html = re.sub(r'<link rel="stylesheet" href="([\w.]+)">', lambda match: f"<style>{_text(match[1])}</style>", html)
    html = html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}', 1)
    return html.replace("</body>", f'{data}\n<script type="module">{script}</script>\n</body>', 1)


def _text(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
