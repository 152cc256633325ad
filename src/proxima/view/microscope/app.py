"""The microscope's routes, which docs/view.md describes, and its access control; readers' notes, held-out answers."""

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxima.data import UserError, require
from proxima.data.flow import Key, prompt_name
from proxima.data.json_reader import load_json
from proxima.evaluation.eval_files import step_of
from proxima.evaluation.headline import ACCURACY
from proxima.evaluation.results import QuestionResult, read_completions
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.runtime.state.folder import RunFolder
from proxima.system.atomic_files import write_atomic
from proxima.system.bounded_reading import TooLargeError, parse_json, read_at_most
from proxima.system.damage import reading
from proxima.system.jsonl import dumps, json_text, utf8
from proxima.system.web_requests import LOOPBACK_NAMES, refused
from proxima.view.formatting import fixed, shortened
from proxima.view.microscope.completion_page import CompletionPage, completion_key, first_difference
from proxima.view.microscope.single_file import PAGE
from proxima.view.microscope.step_file import StepFile
from proxima.view.microscope.viewed_run import ViewedRun

COOKIE = "proxima-view"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address may contain the key
    "Cache-Control": "no-store",
}
MOST_BODY = 64 * 1024
LONGEST_QUERY = 500
PAGES_KEPT = 2
Answer = Callable[..., Any]


class MicroscopeApp:
    """Answers the requests of a page about some runs; read-only.

    Args:
        folders: folders of the runs. A request names a run by its number: no path comes from outside.
        key: the key that a client must send; empty: none.
        host: the name by which clients address the server, in addition to the loopback's names.
    """

    def __init__(self, runs: Sequence[ViewedRun], key: str = "", host: str = "") -> None:
        self.runs = runs
        self.key = key
        self.hosts = set(LOOPBACK_NAMES)
        if host:
            self.hosts.add(host.lower())
        self._pages: dict[tuple[int, int, Key], CompletionPage] = {}
        self.page = {f"/{file.name}": file for file in PAGE.glob("*") if file.suffix in TYPES}
        self._reader = ThreadPoolExecutor(1, "microscope")  # one request at a time, to limit memory
        step = "/api/{run:int}/step/{step:int}"
        completion = f"{step}/completion/{{key}}"
        answers: dict[str, Answer] = {
            "/api/runs": lambda request: [run.about() for run in self.runs],
            "/api/{run:int}/trend": self.trend,
            "/api/{run:int}/state": lambda request: self._run(request).state(),
            "/api/{run:int}/held-out": lambda request: held_out_answers(self._run(request).files),
            "/api/{run:int}/timeline": lambda request: self._run(request).timeline(),
            step: self.step,
            f"{step}/search": self.search,
            f"{step}/group/{{uid:int}}": lambda request: self._step(request).of_group(request.path_params["uid"]),
            completion: lambda request: self._completion(request).answer(),
            f"{completion}/token/{{token:int}}": self.token,
            f"{completion}/compare": self.compare,
        }
        self.asgi = Starlette(
            routes=[
                *(Route(path, self._answering(answer)) for path, answer in answers.items()),
                Route("/api/{run:int}/notes", self._answering(self.notes), methods=["GET", "POST"]),
                Route("/{path:path}", self._answering(self.file)),
            ],
            exception_handlers={HTTPException: _refused, ValueError: self._unreadable, Exception: _failed},
        )
        self.asgi.router.redirect_slashes = False  # a redirect would skip `admit` and echo the request's `Host`

    # ---- access control ----------------------------------------------------------------------------------------------

    def _answering(self, answer: Answer) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            self.admit(request)
            if request.method == "POST":
                request.state.body = await _body(request)
            try:
                value = await asyncio.get_running_loop().run_in_executor(self._reader, self._made, answer, request)
            except UserError as error:
                value = _error(404, str(error))
            except Exception as error:  # a fault in one file: the others can still be shown
                value = await _failed(request, error)
            if self.key and request.query_params.get("key"):
                value.set_cookie(COOKIE, self.key, httponly=True, samesite="strict")
            return value

        return endpoint

    def _made(self, answer: Answer, request: Request) -> Response:
        """Build the response, including its JSON, in the reader's thread."""
        with reading("a file of the run", "proxima check RUN tells which one is damaged"):
            value = answer(request)
            if isinstance(value, Response):
                return value
            return _json(value)

    def admit(self, request: Request) -> None:
        """Raise HTTPException for an unauthorised request: one from a page of another site, or without the key."""
        refusal = refused(request.headers, self.hosts, "start the server with --host NAME")
        if refusal:
            raise HTTPException(*refusal)
        sent = request.query_params.get("key") or request.headers.get("x-proxima-key") or request.cookies.get(COOKIE)
        if self.key and not hmac.compare_digest((sent or "").encode(), self.key.encode()):
            raise HTTPException(401, "the key is missing or wrong; open the whole address that the terminal printed")

    async def _unreadable(self, request: Request, error: Exception) -> Response:
        """Answer a request whose path has a number with more digits than Python reads."""
        try:
            self.admit(request)
        except HTTPException as refusal:
            return await _refused(request, refusal)
        return _error(400, "a number in the address has too many digits")

    # ---- the answers -------------------------------------------------------------------------------------------------

    def _run(self, request: Request, number: int | None = None) -> ViewedRun:
        if number is None:
            number = request.path_params["run"]
        if not 0 <= number < len(self.runs):
            raise UserError(f"there is no run {number}")
        return self.runs[number]

    def _step(self, request: Request) -> StepFile:
        return self._run(request).step(request.path_params["step"])

    def trend(self, request: Request) -> dict[str, Any]:
        after = _number(request, "after") if "after" in request.query_params else 0
        return self._run(request).trend(after)

    def step(self, request: Request) -> dict[str, Any]:
        run = self._run(request)
        number = request.path_params["step"]
        return self._step(request).answer() | {"metrics": run.vital_signs(number), "verdicts": run.verdicts(number)}

    def search(self, request: Request) -> dict[str, list[int]]:
        query = request.query_params.get("q", "")
        if not 0 < len(query) <= LONGEST_QUERY:
            raise UserError(f"q must have 1 to {LONGEST_QUERY} characters")
        return {"rows": self._step(request).matches(query, regex=request.query_params.get("regex") == "1")}

    def token(self, request: Request) -> dict[str, Any]:
        return self._completion(request).token(request.path_params["token"])

    def compare(self, request: Request) -> dict[str, Any]:
        mine = self._completion(request)
        other = self._completion(request, elsewhere=True)
        return first_difference(mine.row["tokens"], other.row["tokens"]) | {"completion": other.answer()}

    def _completion(self, request: Request, *, elsewhere: bool = False) -> CompletionPage:
        """Return the completion that a request names, or the same one at the run and step of its query. The latest are
        cached, since each click on a token sends another request."""
        number: int = request.path_params["run"]
        step: int = request.path_params["step"]
        if elsewhere:
            number = _number(request, "run")
            step = _number(request, "step")
        run = self._run(request, number)
        file = run.step(step)
        key = completion_key(request.path_params["key"])
        place = (number, file.step, key)
        page = self._pages.pop(place, None)
        if page is None or page.file is not file:
            page = CompletionPage(run, file, key)
        self._pages[place] = page
        while len(self._pages) > PAGES_KEPT:
            del self._pages[next(iter(self._pages))]
        return page

    def notes(self, request: Request) -> dict[str, str]:
        folder = self._run(request).files.path
        if request.method == "GET":
            return read_notes(folder)
        note = request.state.body
        if not (isinstance(note, dict) and all(isinstance(note.get(name), str) for name in ("key", "text"))):
            raise UserError('a note is {"key": TEXT, "text": TEXT}')
        return write_note(folder, note["key"], note["text"])

    def file(self, request: Request) -> Response:
        path = request.url.path
        if path == "/":
            path = "/index.html"
        file = self.page.get(path)
        if file is None:
            return _error(404, "there is no such page")
        return Response(file.read_bytes(), media_type=TYPES[file.suffix], headers=HEADERS)


async def _body(request: Request) -> Any:
    """Read the JSON of a request. Raises: HTTPException if it is too large, too slow or invalid."""
    try:
        async with asyncio.timeout(ScorerLimits.read_seconds):
            content = await read_at_most(request.stream(), MOST_BODY)
    except TimeoutError:
        raise HTTPException(408, f"the body was not complete after {ScorerLimits.read_seconds} s") from None
    except TooLargeError:
        raise HTTPException(413, f"a request has at most {MOST_BODY} bytes") from None
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "the body must be application/json")  # a form of another site can't send it
    try:
        return parse_json(content)
    except ValueError as error:
        raise HTTPException(400, f"the body can't be read: {error}") from None


def _number(request: Request, name: str) -> int:
    value = request.query_params.get(name, "")
    if not value.isdecimal() or len(value) > 9:
        raise UserError(f"{name} must be a number")
    return int(value)


def _json(value: object, status: int = 200) -> Response:
    return Response(dumps(value).encode(), status, HEADERS, "application/json")


def _error(status: int, reason: str) -> Response:
    return _json({"error": " ".join(reason.split())}, status)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, f"{type(error).__name__}: {error}"[:300])


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail))


MOST = 5000  # notes of a run
KEY_LENGTH = 200  # characters
TEXT_LENGTH = 10_000  # characters


def notes_file(folder: Path) -> Path:
    """`<run folder>.notes.json`."""
    place = folder.resolve()
    return place.with_name(f"{place.name}.notes.json")


def read_notes(folder: Path) -> dict[str, str]:
    """Return key → text. Raises: UserError if the file is damaged."""
    file = notes_file(folder)
    try:
        notes = load_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file.name} can't be read ({error}); restore it, or move it away") from error
    if isinstance(notes, dict):
        return {str(key): str(text) for key, text in notes.items()}
    return {}


def write_note(folder: Path, key: str, text: str) -> dict[str, str]:
    """Write a note, or delete it if the text is empty, and return the updated notes. The server calls it from one
    thread.

    Raises:
        UserError: the key or the text is too long, there are too many, or the file is damaged.
        OSError: the disk is full or read-only.
    """
    require(0 < len(key) <= KEY_LENGTH, "key", key, f"must have 1 to {KEY_LENGTH} characters")
    require(len(text) <= TEXT_LENGTH, "text", len(text), f"must have at most {TEXT_LENGTH} characters")
    notes = read_notes(folder) | {utf8(key): utf8(text)}
    notes = {name: value for name, value in notes.items() if value}
    require(len(notes) <= MOST, "notes", len(notes), f"must be at most {MOST}")
    write_atomic(notes_file(folder), json_text(notes))
    return notes


ANSWERS = 4  # of a question on each side
TEXT = 2000  # characters of an answer
#: What became of a question, in the order of the list: what is wrong comes before what is right.
KINDS = ("worse", "wrong", "better", "right", "same", "unknown")


def held_out_answers(files: RunFolder) -> dict[str, Any]:
    """Return `labels` of the evaluations, the `metric` that tells better from worse, and `rows`: each question with
    what changed (`kind` of `KINDS`), and on each side its answers with their marks. An unchanged accuracy is `right`
    at 1 and `wrong` below; without accuracy an unchanged reward is `same`.

    Raises:
        UserError: the run has no evaluation, or a file can't be read.
    """
    rows: list[dict[str, Any]] = []
    labels: list[str] = []
    metrics: dict[str, None] = {}  # each once, in order
    for name in ["", *files.eval_sets()]:
        evaluations = files.eval_files(name)
        if not evaluations:
            continue
        ends = list(dict.fromkeys([evaluations[0], evaluations[-1]]))
        sides = [read_completions(file) for file in ends]
        if len(labels) <= len(ends):
            labels = [_label(step_of(file)) for file in ends]
        judged = any(map(_is_judged, sides))
        metric = ACCURACY if judged else "reward"
        metrics[metric] = None
        for uid, question in sides[0].items():
            both = [side[uid] for side in sides if uid in side]
            change = _change(both, metric)
            row = {
                "name": prompt_name(uid),
                "set": name,
                "question": question.question,
                "answer": load_json(question.answer),
                "kind": _kind(both[-1], change, judged, first=len(sides) == 1),
            }
            rows.append(row | {"change": change, "sides": [_answers(each, judged) for each in both]})
    if not rows:
        raise UserError("the run has no held-out answers: it was not evaluated, or its evals/ are gone")
    # stable: questions of a set stay in the order of their uids
    rows.sort(key=lambda row: (KINDS.index(row["kind"]), row["change"] or 0.0, row["set"]))
    return {"labels": labels, "metric": " and ".join(metrics), "rows": rows}


def _is_judged(side: Mapping[int, QuestionResult]) -> bool:
    """True if some answer of an evaluation is right or wrong."""
    verdicts = chain.from_iterable(question.correct for question in side.values())
    return any(verdict is not None for verdict in verdicts)


def _label(step: int) -> str:
    if step:
        return f"after step {step}"
    return "before the first step"


def _change(sides: Sequence[QuestionResult], metric: str) -> float | None:
    """The mean of the last side minus that of the first; None with a single side, or without a score on one."""
    scores = [[float(value) for value in side.values(metric) if value is not None] for side in sides]
    if len(scores) > 1 and all(scores):
        return fmean(scores[-1]) - fmean(scores[0])
    return None


def _kind(last: QuestionResult, change: float | None, judged: bool, *, first: bool) -> str:
    """What became of a question, one of `KINDS`; `first`: there is one evaluation, hence no change."""
    known = [correct for correct in last.correct if correct is not None]
    if change is None and not (first and known):
        return "unknown"
    if change is not None and abs(change) > 1e-12:
        return "worse" if change < 0 else "better"
    if not judged:
        return "same"
    return "right" if all(known) else "wrong"


def _answers(question: QuestionResult, judged: bool) -> list[dict[str, str]]:
    if judged:
        verdicts = {True: "right", False: "wrong", None: "no score"}
        marks = [verdicts[correct] for correct in question.correct]
    else:
        marks = list(map(_reward_mark, question.values("reward")))
    answers = zip(marks, question.texts, strict=True)
    return [{"mark": mark, "text": shortened(text, TEXT)} for mark, text in islice(answers, ANSWERS)]


def _reward_mark(reward: float | None) -> str:
    return "no score" if reward is None else f"reward {fixed(reward, 3)}"
