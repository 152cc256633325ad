"""The graders that the worker processes run, by name. A worker loads only this file, which imports only the standard
library, so that it starts without torch.

Arguments and results are JSON values; an exception is the completion's error.
"""

import ast
import re
import sys
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import lru_cache
from typing import Any

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.reward.workers import run_unit_tests
from proxima.reward.workers.algebra import verify
from proxima.reward.workers.user_function import call_function, load_function, sources


def grade_format(*, pattern: str, text: str) -> dict[str, Any]:
    """1 if the pattern is found."""
    return {"value": float(re.search(pattern, text, re.DOTALL) is not None)}


def grade_regex(*, pattern: str, text: str) -> dict[str, Any]:
    """The last match of the pattern: its group `answer`, else group 1, else all of it."""
    compiled = re.compile(pattern, re.DOTALL)
    matches = list(compiled.finditer(text))
    if not matches:
        return {"answer": None}
    return {"answer": matches[-1].group("answer" if "answer" in compiled.groupindex else min(compiled.groups, 1))}


def grade_math(*, answer: str, texts: list[str]) -> dict[str, Any]:
    """1 if math-verify accepts all texts. Its own timeouts are off: the worker's CPU limit applies."""
    from math_verify import parse

    parsed = [parse(text.replace("\0", ""), parsing_timeout=None) for text in texts]
    equal = [verify(_reference(answer), formula) for formula in parsed]
    correct = all(equal)
    return {"value": float(correct), "correct": correct}


@lru_cache(maxsize=4096)
def _reference(answer: str) -> Any:
    from math_verify import parse

    parsed = parse(_delimited(answer), parsing_timeout=None)
    if not parsed:
        raise ValueError(f"the row's answer {answer!r:.80} can't be read as mathematics")
    return parsed


def _delimited(answer: str) -> str:
    """The formula between the delimiters that math-verify expects."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


def check_math_answer(*, answer: str) -> dict[str, Any]:
    """The reason why math-verify can't parse the row's answer as mathematics, or None. math-verify returns plain text
    for anything that it can't parse."""
    from math_verify import parse

    parsed = parse(_delimited(answer), parsing_timeout=None)
    return {"why": None if any(not isinstance(part, str) for part in parsed) else "can't be read as mathematics"}


def grade_reasoning_gym(*, source: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """The task's own score of the answer."""
    dataset = _reasoning_gym(source["task"], repr(decode_json(source["config"])))
    entry = decode_json(source["entry"])
    try:
        return {"value": float(dataset.score_answer(answer, entry))}
    except (ArithmeticError, IndexError, KeyError, SyntaxError, TypeError, ValueError):
        dataset.score_answer(entry["answer"], entry)  # also raises if the scorer itself is broken
        return {"value": 0.0}


# The scorers that pass the model's answer to `eval`; all they expect is a list literal.
EVAL_TASKS = ("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion")


@lru_cache(maxsize=256)
def _reasoning_gym(task: str, config: str) -> Any:
    import reasoning_gym

    settings = ast.literal_eval(config)
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name.rpartition(".")[2] in EVAL_TASKS:
            vars(module)["eval"] = ast.literal_eval
    return reasoning_gym.create_dataset(task, **settings)


def decode_json(value: Any) -> Any:
    """JSON that the task `reasoning_gym` encoded, with its tuples and non-text keys restored."""
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(decode_json(item) for item in value["__tuple__"])
    if value.keys() == {"__pairs__"}:
        return {decode_json(key): decode_json(item) for key, item in value["__pairs__"]}
    return {key: decode_json(item) for key, item in value.items()}


def grade_function(
    *,
    path: str,
    values: Mapping[str, Any],
    positional: int = 0,
    prompt: str | None = None,
    completion: str | None = None,
    verl: bool = False,
) -> dict[str, Any]:
    """The return value of the user's function, as a dict with `value`. `values` is keyed by parameter, and its first
    `positional` values are passed by position. `prompt` and `completion` name the parameters that get objects. With
    `verl`, a returned dict has verl's keys."""
    given = dict(values)
    if prompt is not None:
        given[prompt] = _prompt(given[prompt])
    if completion is not None:
        given[completion] = Completion(**given[completion])
    arguments = [given.pop(name) for name in list(given)[:positional]]
    try:
        result = call_function(path, *arguments, **given)
    except (AttributeError, TypeError) as error:
        if completion is not None and "Completion" in str(error):
            error.add_note(f"{completion} is an object: write {completion}.text, or {completion}: str in the signature")
        raise
    return _as_dict(_from_verl(result) if verl and isinstance(result, Mapping) else result)


def _from_verl(result: Mapping[str, Any]) -> dict[str, Any]:
    """`score` as the value, `acc` as `correct` if it is 0 or 1, and the other numbers; a text (`pred`) is dropped."""
    if "score" not in result:
        raise ValueError(f"returned a dict without 'score' (keys: {', '.join(map(str, result)) or 'none'})")
    acc = result.get("acc")
    verdict = {"value": result["score"], "correct": bool(acc) if acc in (0, 1) else None}
    return {key: value for key, value in result.items() if key != "score" and hasattr(value, "__float__")} | verdict


def grade_function_lists(*, path: str, values: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The result of the user's function for `count` completions: for each a dict, its `error`, or None."""
    try:
        result = call_function(path, **values)
    except (AttributeError, TypeError) as error:
        texts = isinstance((values.get("completions") or values.get("prompts") or [""])[0], str)
        error.add_note(
            "it got texts; chat: true passes messages" if texts else "it got messages; chat: false passes texts"
        )
        raise
    scores = _listed(result, f"a list of {count} numbers")
    if len(scores) != count:
        raise ValueError(f"returned {len(scores)} scores for {count} completions")
    return {"scores": [[None if score is None else _score_or_error(score) for score in scores]]}


def grade_function_batch(*, path: str, groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of the user's function for all groups: per group a list with a dict per completion, or its `error`."""
    typed = tuple(
        Group(
            prompt=_prompt(group["prompt"]),
            completions=tuple(Completion(**fields) for fields in group["completions"]),
            scores=tuple(Score(**fields) for fields in group["scores"]),
        )
        for group in groups
    )
    expected = f"{len(typed)} lists with one score for each completion"
    lists = [_listed(scores, expected) for scores in _listed(call_function(path, typed), expected)]
    if [len(scores) for scores in lists] != [len(group.completions) for group in typed]:
        raise ValueError(f"returned {len(lists)} lists with {sum(map(len, lists))} scores, expected {expected}")
    return {"scores": [[_score_or_error(score) for score in scores] for scores in lists]}


def _listed(result: Any, expected: str) -> list[Any]:
    """The items of a list, tuple, array or generator; ValueError for anything else, including a dict, text or set."""
    try:
        scores = None if isinstance(result, (str, bytes, Mapping, Set)) else iter(result)
    except TypeError:  # including an array without dimensions
        scores = None
    if scores is None:
        raise ValueError(f"returned {_repr(result)}, expected {expected}")
    return list(scores)


def _score_or_error(score: Any) -> dict[str, Any]:
    try:
        return _as_dict(score)
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def _prompt(fields: Mapping[str, Any]) -> Any:
    return Prompt(**{**fields, "messages": tuple(fields["messages"])})


def _as_dict(result: Any) -> dict[str, Any]:
    """A number, bool, `Score` or dict as a dict with `value` and floats, so that JSON can hold it."""
    if isinstance(result, Score):
        if not result.valid:
            raise RuntimeError(result.error or "returned an invalid score")
        result = {**result.parts, "value": result.value, "correct": result.correct}
    if not isinstance(result, Mapping):
        verdict = {"correct": bool(result)} if isinstance(_scalar(result), bool) else {}
        return {"value": to_float(result, "value"), **verdict}
    if "value" not in result:
        raise ValueError(f"returned a dict without 'value' (keys: {', '.join(map(str, result)) or 'none'})")
    numbers = {str(key): to_float(value, str(key)) for key, value in result.items() if key != "correct"}
    return {**numbers, "correct": _to_bool(result.get("correct"))}


def to_float(value: object, key: str) -> float:
    """A returned number as a float; ValueError, with key and value, if it is not a number."""
    try:
        if hasattr(value, "__float__"):  # true of numbers of numpy and torch, not of text
            return float(value)
    except (ArithmeticError, RuntimeError, TypeError, ValueError):  # too large, or an array of several
        pass
    raise ValueError(f"returned {key}={_repr(value)}, expected a number")


def _to_bool(value: Any) -> bool | None:
    scalar = _scalar(value)
    if scalar not in (None, True, False):
        raise ValueError(f"returned correct={_repr(value)}, expected true, false or nothing")
    return None if scalar is None else bool(scalar)


def _scalar(value: Any) -> Any:
    """Convert a number or bool of numpy or torch to Python's own; return anything else unchanged."""
    with suppress(AttributeError, RuntimeError, TypeError, ValueError):  # not such a number, or an array of several
        return value.item()
    return value


def _repr(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number of thousands of digits"


def load_user_function(*, path: str, source: str | None = None) -> dict[str, Any]:
    """Load a user's function, so that the loading time is not charged to its first call. `source` is the text of its
    file when the run started: a worker that starts later runs the same text."""
    sources[path.rpartition(":")[0]] = source
    load_function(path)
    return {}


def grade_unit_tests(**arguments: Any) -> dict[str, Any]:
    """Run the unit tests of a row against the completion's code."""
    run_unit_tests.hide_memory()
    return run_unit_tests.run_unit_tests(**arguments)


# Formulas of every common shape: the LaTeX parser builds its tables as it meets them, and all workers inherit them.
SHAPES = tuple(
    r"""
12  -3.5  12,000  \frac{1}{2}  -\dfrac{3x}{4y}  \sqrt{2}  2\sqrt[3]{5}  x^2+3x-1  (x+1)(x-2)  3\pi
\frac{a+b}{c^2}  (1,2)  (-1,\frac{1}{2},3)  [0,1)  (-\infty,2]\cup[3,4)  \{1,2,3\}  x=5  y=2x+1  x\leq3
x>-2  50\%  30^\circ  \sin(x)  \log_2(8)  e^{-x}  2^{10}  10!  \binom{5}{2}  |x-1|  \text{even}
\begin{pmatrix}1&2\\3&4\end{pmatrix}  x\in[1,2]  5\cdot10^3  a_1+a_2  1\frac{1}{2}  \pm\sqrt{3}  3+4i
n\equiv1  x=1,y=2  \left(-3,\frac{5}{2}\right)  \left(-\infty,-2\right]\cup\left[3,\frac{7}{2}\right)
\left\{-1,0,\frac{1}{2}\right\}  (x-3)\cdot(x+4)  \frac{-1+\sqrt{5}}{2}  y=-3x+\frac{1}{2}  -5<x\leq15
3e^{-2}  2\ln3  \frac{5!}{2!\,3!}  \frac{3}{4}\pi  \dfrac{\pi\cdot3}{4}  x\in(-5,15]
\begin{bmatrix}-1&\frac{1}{2}\\0&3\end{bmatrix}  \mathrm{even}  \textbf{C}  2-3i  \approx3.25  3.25\text{ m}
12{,}000  5\cdot\sqrt{3}  \frac{15}{\sqrt{3}}  -\frac{3}{7}  a^{2}b  2x+3y=6  \frac{a}{b}=\frac{c}{d}
0.\overline{3}  \sqrt{x^2+1}  [-1,\frac{1}{2}]  x^3-2x
""".strip()
    .replace("\n", "  ")
    .split("  ")
)


def parse_in_two_stages() -> None:
    """Make math-verify's LaTeX parser try ANTLR's SLL prediction before LL: the same trees, several times as fast.

    SLL either returns the tree of LL or reports a syntax error (ANTLR's documentation of `PredictionMode`). LL computes
    its full-context lookups again each time, SLL fills a table. Applied in the worker processes only.
    """
    try:
        from antlr4.atn.PredictionMode import PredictionMode
        from latex2sympy2_extended import latex2sympy2 as module

        one_stage = module._Latex2Sympy
        _ = one_stage.create_parser, one_stage.parse
    except (ImportError, AttributeError):  # another version of the parser: leave it unchanged
        return

    class TwoStages(one_stage):  # type: ignore[misc, valid-type]
        mode = PredictionMode.SLL

        def create_parser(self, text: str) -> Any:
            parser = super().create_parser(text)
            parser._interp.predictionMode = self.mode
            return parser

        def parse(self, text: str) -> Any:
            try:
                return super().parse(text)
            except Exception:
                self.mode = PredictionMode.LL
                return super().parse(text)

    module._Latex2Sympy = TwoStages


def warm_math() -> None:
    """Load math-verify and fill the tables of its parser."""
    parse_in_two_stages()
    for shape in SHAPES:
        grade_math(answer=shape, texts=[f"\\boxed{{{shape}}}"])
        grade_math(answer="1", texts=[f"so $z={shape}$, that is $${shape}.$$"])
    grade_math(answer="1", texts=["The answer is 12.5."])


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "format": grade_format,
    "function": grade_function,
    "function_batch": grade_function_batch,
    "function_lists": grade_function_lists,
    "math": grade_math,
    "math_answer": check_math_answer,
    "load": load_user_function,
    "reasoning_gym": grade_reasoning_gym,
    "regex": grade_regex,
    "unit_tests": grade_unit_tests,
}
