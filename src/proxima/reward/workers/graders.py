"""What the worker processes do, by name. Standard library only at import: a worker loads this file alone, so that it
starts without torch.

Arguments and results are JSON values; an exception is the completion's error.
"""

import ast
import asyncio
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any


def grade_format(*, pattern: str, text: str) -> dict[str, Any]:
    """1 if the pattern is found."""
    return {"value": float(re.search(pattern, text, re.DOTALL) is not None)}


def grade_regex(*, pattern: str, text: str) -> dict[str, Any]:
    """The last capture of the pattern: group `answer`, else group 1, else the match."""
    compiled = re.compile(pattern, re.DOTALL)
    matches = list(compiled.finditer(text))
    if not matches:
        return {"found": None}
    return {"found": matches[-1].group("answer" if "answer" in compiled.groupindex else min(compiled.groups, 1))}


def grade_math(*, answer: str, texts: list[str]) -> dict[str, Any]:
    """math-verify's verdict, right where all texts are. Its time-outs are off: they use signals; the worker's CPU limit
    holds."""
    from math_verify import parse, verify

    right = True
    for text in texts:
        known = _verdicts.get((answer, text))
        if known is None:
            known = bool(
                verify(_gold(answer), parse(text.replace("\0", ""), parsing_timeout=None), timeout_seconds=None)
            )
            _verdicts[answer, text] = known
            if len(_verdicts) > 20_000:
                _verdicts.clear()
        right = right and known
    return {"value": float(right), "correct": right}


_verdicts: dict[tuple[str, str], bool] = {}  # a group often holds the same answer several times


@lru_cache(maxsize=4096)
def _gold(answer: str) -> Any:
    from math_verify import parse

    parsed = parse(_marked(answer), parsing_timeout=None)
    if not parsed:
        raise ValueError(f"the row's answer {answer!r:.80} can't be read as mathematics")
    return parsed


def _marked(answer: str) -> str:
    """A bare formula as math-verify knows one."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


def read_math_answer(*, answer: str) -> dict[str, Any]:
    """Why the row's answer is no mathematics: unreadable, or to math-verify a mere text, to which only the same text is
    equal."""
    from math_verify import parse

    read = parse(_marked(answer), parsing_timeout=None)
    return {"why": None if any(not isinstance(one, str) for one in read) else "can't be read as mathematics"}


def grade_reasoning_gym(*, source: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """The task's own score of the answer."""
    dataset = _reasoning_gym(source["task"], repr(decode_json(source["config"])))
    entry = decode_json(source["entry"])
    try:
        return {"value": float(dataset.score_answer(answer, entry))}
    except (ArithmeticError, IndexError, KeyError, SyntaxError, TypeError, ValueError):
        dataset.score_answer(entry["answer"], entry)  # raises too where the scorer itself is broken
        return {"value": 0.0}


# The scorers that evaluate the model's answer as Python; a list literal is all they expect.
EVALUATING = ("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion")


@lru_cache(maxsize=256)
def _reasoning_gym(task: str, config: str) -> Any:
    import reasoning_gym

    settings = ast.literal_eval(config)
    if task == "composite":
        settings["datasets"] = [
            reasoning_gym.composite.DatasetSpec(**{"weight": 1.0, "config": {}, **part})
            for part in settings["datasets"]
        ]
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name.rpartition(".")[2] in EVALUATING:
            vars(module)["eval"] = ast.literal_eval
    return reasoning_gym.create_dataset(task, **settings)


def decode_json(value: Any) -> Any:
    """JSON as the task `reasoning_gym` wrote it, with its tuples and odd keys restored."""
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(decode_json(item) for item in value["__tuple__"])
    if value.keys() == {"__pairs__"}:
        return {decode_json(key): decode_json(item) for key, item in value["__pairs__"]}
    return {key: decode_json(item) for key, item in value.items()}


def grade_function(*, path: str, prompt: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
    """What the user's function returns, as a dict with `value`."""
    result = load_function(path)(_prompt(prompt), _completion(completion))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    return _returned(result)


def grade_function_batch(*, path: str, groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What the user's function returns of all groups, a list for each with a dict for each completion, or `error` where
    it made none."""
    from proxima.data import Group, Score

    whole = tuple(
        Group(
            prompt=_prompt(group["prompt"]),
            completions=tuple(_completion(one) for one in group["completions"]),
            scores=tuple(Score(**one) for one in group["scores"]),
        )
        for group in groups
    )
    result = load_function(path)(whole)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    rows = [list(row) for row in result]
    if [len(row) for row in rows] != [len(group.completions) for group in whole]:
        wanted = f"{len(whole)} lists with one score for each completion"
        raise ValueError(f"returned {len(rows)} lists with {sum(map(len, rows))} scores, expected {wanted}")
    return {"scores": [[_attempted(score) for score in row] for row in rows]}


def _attempted(score: Any) -> dict[str, Any]:
    try:
        return _returned(score)
    except Exception as problem:
        return {"error": " ".join(f"{type(problem).__name__}: {problem}".split())[:300]}


def _prompt(fields: Mapping[str, Any]) -> Any:
    from proxima.data import Prompt

    return Prompt(**{**fields, "messages": tuple(fields["messages"])})


def _completion(fields: Mapping[str, Any]) -> Any:
    from proxima.data import Completion

    return Completion(**fields)


def _returned(result: Any) -> dict[str, Any]:
    """A number, a `Score` or a dict as a dict with `value`, all numbers floats: what JSON can't carry costs this score
    alone."""
    from proxima.data import Score

    if isinstance(result, Score):
        if not result.valid:
            raise RuntimeError(result.error or "returned an invalid score")
        result = {**result.parts, "value": result.value, "correct": result.correct}
    if isinstance(result, Mapping):
        if "value" not in result:
            raise ValueError(f"returned a dict without 'value' (keys: {', '.join(map(str, result)) or 'none'})")
        whole = {str(key): number_of(value, str(key)) for key, value in result.items() if key != "correct"}
        return {**whole, "correct": _verdict(result.get("correct"))}
    return {"value": number_of(result, "value")}


def number_of(value: object, key: str) -> float:
    """A returned number as a float; anything else is a ValueError that names it."""
    try:
        if hasattr(value, "__float__"):  # numbers of numpy and torch have one, texts have not
            return float(value)
    except (ArithmeticError, RuntimeError, TypeError, ValueError):  # too large, or an array of several
        pass
    raise ValueError(f"returned {key}={_shown(value)}, expected a number")


def _verdict(value: Any) -> bool | None:
    plain = value.item() if hasattr(value, "item") and callable(value.item) else value  # numpy's and torch's own
    if plain not in (None, True, False):
        raise ValueError(f"returned correct={_shown(value)}, expected true, false or nothing")
    return None if plain is None else bool(plain)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # thousands of digits, which Python doesn't write
        return "a number of thousands of digits"


@lru_cache(maxsize=64)
def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module:name` or `file.py:name`.

    Raises:
        ValueError: one line that says which part of the path is wrong.
    """
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name:
        raise ValueError("must be 'package.module:function' or './file.py:function'")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known) or 'no function'}"
        raise ValueError(f"names {where!r}, which has no function {name!r}; {hint}")
    return function  # type: ignore[no-any-return]


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"names a file that does not exist, {str(file)!r}")
    name = f"proxima_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # so that the file's neighbours can be imported, as when it runs as a script
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        raise ValueError(
            f"names {str(file)!r}, which can't be loaded: {type(problem).__name__}: {problem}"
        ) from problem
    return module


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        raise ValueError(
            f"can't be imported: no module {problem.name!r} (looking for {name!r}); is its folder on PYTHONPATH?"
        ) from problem
    except Exception as problem:
        raise ValueError(
            f"names the module {name!r}, which can't be loaded: {type(problem).__name__}: {problem}"
        ) from problem


def load_user_function(*, path: str) -> dict[str, Any]:
    """Load a user's function before its first call, outside the time of any completion."""
    load_function(path)
    return {}


# Formulas of every common shape: the LaTeX parser builds its tables as it meets them, and all workers inherit them.
SHAPES = (
    *(
        r"12",
        r"-3.5",
        r"12,000",
        r"\frac{1}{2}",
        r"-\dfrac{3x}{4y}",
        r"\sqrt{2}",
        r"2\sqrt[3]{5}",
        r"x^2+3x-1",
        r"(x+1)(x-2)",
    ),
    *(
        r"3\pi",
        r"\frac{a+b}{c^2}",
        r"(1,2)",
        r"(-1,\frac{1}{2},3)",
        r"[0,1)",
        r"(-\infty,2]\cup[3,4)",
        r"\{1,2,3\}",
        r"x=5",
    ),
    *(r"y=2x+1", r"x\leq3", r"x>-2", r"50\%", r"30^\circ", r"\sin(x)", r"\log_2(8)", r"e^{-x}", r"2^{10}", r"10!"),
    *(r"\binom{5}{2}", r"|x-1|", r"\text{even}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"x\in[1,2]", r"5\cdot10^3"),
    *(r"a_1+a_2", r"1\frac{1}{2}", r"\pm\sqrt{3}", r"3+4i", r"n\equiv1", r"x=1,y=2"),
    *(
        r"\left(-3,\frac{5}{2}\right)",
        r"\left(-\infty,-2\right]\cup\left[3,\frac{7}{2}\right)",
        r"\left\{-1,0,\frac{1}{2}\right\}",
    ),
    *(
        r"(x-3)\cdot(x+4)",
        r"\frac{-1+\sqrt{5}}{2}",
        r"y=-3x+\frac{1}{2}",
        r"-5<x\leq15",
        r"3e^{-2}",
        r"2\ln3",
        r"\frac{5!}{2!\,3!}",
    ),
    *(
        r"\frac{3}{4}\pi",
        r"\dfrac{\pi\cdot3}{4}",
        r"x\in(-5,15]",
        r"\begin{bmatrix}-1&\frac{1}{2}\\0&3\end{bmatrix}",
        r"\mathrm{even}",
    ),
    *(
        r"\textbf{C}",
        r"2-3i",
        r"\approx3.25",
        r"3.25\text{ m}",
        r"12{,}000",
        r"5\cdot\sqrt{3}",
        r"\frac{15}{\sqrt{3}}",
        r"-\frac{3}{7}",
    ),
    *(
        r"a^{2}b",
        r"2x+3y=6",
        r"\frac{a}{b}=\frac{c}{d}",
        r"0.\overline{3}",
        r"\sqrt{x^2+1}",
        r"[-1,\frac{1}{2}]",
        r"x^3-2x",
    ),
)


def parse_in_two_stages() -> None:
    """Let math-verify's LaTeX parser try ANTLR's SLL prediction first, and LL only where that fails: the same trees,
    several times as fast.

    SLL either gives the tree that LL gives or reports a syntax error (ANTLR's documentation of `PredictionMode`); and
    what LL looks up with full context it computes anew each time, while SLL fills a table. Done in the worker processes
    alone.
    """
    try:
        from antlr4.atn.PredictionMode import PredictionMode
        from latex2sympy2_extended import latex2sympy2 as module

        one_stage = module._Latex2Sympy
        _ = one_stage.create_parser, one_stage.parse
    except (ImportError, AttributeError):  # another version of the parser: as fast as it is
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
    """Load math-verify and fill its parser's tables, once, before workers are forked."""
    parse_in_two_stages()
    for shape in SHAPES:
        grade_math(answer=shape, texts=[f"\\boxed{{{shape}}}"])
        grade_math(answer="1", texts=[f"so $z={shape}$, that is $${shape}.$$"])
    grade_math(answer="1", texts=["The answer is 12.5."])
    _verdicts.clear()


def warm_reasoning_gym() -> None:
    """Load reasoning_gym, once, before workers are forked."""
    import reasoning_gym  # noqa: F401


def warm_function() -> None:
    """Load what every function needs, once, before workers are forked."""
    import proxima.data  # noqa: F401


GRADERS: dict[str, Callable[..., dict[str, Any]]] = {
    "format": grade_format,
    "function": grade_function,
    "function_batch": grade_function_batch,
    "math": grade_math,
    "math_answer": read_math_answer,
    "load": load_user_function,
    "reasoning_gym": grade_reasoning_gym,
    "regex": grade_regex,
}

WARM: dict[str, Callable[[], None]] = {
    "function": warm_function,
    "math": warm_math,
    "reasoning_gym": warm_reasoning_gym,
}
