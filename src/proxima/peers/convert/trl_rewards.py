"""TRL's reward functions by name: those of `trl.rewards`, and of open-r1, whose recipes are GRPOConfigs with the
functions' options."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proxima.peers.convert import common
from proxima.peers.convert.draft import Draft, Fields
from proxima.peers.convert.options import Options
from proxima.peers.convert.read_python import literal

Found = tuple[str, Fields] | None
# ast.parse raises these for text that is not an expression, or nested too deeply
UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)
THINK = r"^<think>(?!.*<think>).*?</think>"
THINK_ANSWER = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>(\n|$)"


@dataclass(frozen=True)
class Named:
    """A reward function as the file names it: `accuracy_reward`, or `get_soft_overlong_punishment(4096, 512)`.

    Args:
        text: as in the file.
        name: of the function, without its package where that is TRL, open_r1 or unknown.
        arguments: of the call by name or position; None where one can't be read.
        called: whether the text is a call.
    """

    text: str
    name: str
    arguments: dict[str | int, Any] | None
    called: bool

    @classmethod
    def of(cls, text: str) -> "Named":
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except UNPARSED:
            return cls(text, text.strip(), None, False)
        called = isinstance(node, ast.Call)
        package, _, name = ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")
        name = name if package.partition(".")[0] in ("", "trl", "open_r1") else f"{package}.{name}"
        try:
            given: dict[str | int, Any] = {}
            if isinstance(node, ast.Call):
                given |= {index: literal(argument, {}) for index, argument in enumerate(node.args)}
                given |= {str(keyword.arg): literal(keyword.value, {}) for keyword in node.keywords}
        except ValueError:
            return cls(text, name, None, called)
        return cls(text, name, given, called)


def rewards(d: Draft, o: Options) -> None:
    """`reward_funcs` with `reward_weights`; a placeholder with its weight stands in for an unknown function."""
    written, weights = o.get("reward_funcs"), o.get("reward_weights")
    texts = written if isinstance(written, list) else _split(str(written)) if written else []
    functions = [Named.of(str(text)) for text in texts]
    if weights is not None and not (isinstance(weights, list) and all(_is_number(one) for one in weights)):
        weights = o.refuse("must be a list of numbers", "reward_weights")
    if weights is not None and functions and len(weights) != len(functions):
        d.lacks("reward_weights", f"{weights}: {len(weights)} for {len(functions)} functions in reward_funcs")
        weights = None
    if not functions:
        common.reward(d)
        if weights is not None:
            d.lacks("reward_weights", f"{weights}: they are the `weight` of each entry of `reward`")
    how = o.get("multi_objective_aggregation", default="sum_then_normalize")
    summed = weights if how == "sum_then_normalize" else None
    for index, function in enumerate(functions):
        place = f"reward.{common.rewards_of(d)}"
        if (one := _known(function, o)) is not None:
            d.append("reward", one[0], f"from reward_funcs: {function.name}", **one[1])
        else:
            why = "port it and name it as {kind: function, path: …}; `math` stands in"
            d.ask(place, "math", f"{function.text}: {why}", kind=True)
            d.put(f"{place}.name", _label(function, index), "the function's")
        if summed is not None and summed[index] != 1:
            d.put(f"{place}.weight", summed[index], "from reward_weights")
    for name, function_of in OPTIONS.items():
        if not any(function.name == function_of for function in functions):
            d.drops_given(o, f"reward_funcs does not name {function_of}", name)


def _label(function: Named, index: int) -> str:
    """A name for the entry of a function, one for each."""
    last = re.sub(r"\W", "", function.name.rpartition(".")[2])[:40]
    return f"{last or 'function'}_{index}"


def _split(text: str) -> list[str]:
    """The items of a Python list, or words separated by blanks or commas."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except UNPARSED:
        return text.replace(",", " ").split()
    return [ast.unparse(item) for item in node.elts] if isinstance(node, ast.List | ast.Tuple) else [text.strip()]


def _known(function: Named, o: Options) -> Found:
    """Our kind with its fields; None for a function without an equivalent."""
    make = KNOWN.get((function.name, function.called))
    return make(function, o) if make is not None and function.arguments is not None else None


def _is_number(value: Any, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _plain(kind: str, **fields: Any) -> Callable[[Named, Options], Found]:
    return lambda function, o: (kind, {name: (value, f"as {function.name}") for name, value in fields.items()})


def _overlong(most: Any, buffer: Any, most_from: str, buffer_from: str) -> Found:
    """The same penalty at every length; None without a buffer, where TRL's is a step that no completion reaches."""
    if not _is_number(most, int) or not _is_number(buffer, int) or not 1 <= buffer <= most:
        return None
    return "overlong", {"max_tokens": (most, most_from), "buffer_tokens": (buffer, buffer_from)}


def _repetition(n: Any, penalty: Any, unit: str, n_from: str, penalty_from: str) -> Found:
    """TRL writes the penalty as a negative number."""
    if not _is_number(n, int) or not _is_number(penalty) or n < 1 or penalty > 0:
        return None
    source = "TRL's" if unit == "tokens" else "open-r1's"
    return "repetition", {"n": (n, n_from), "unit": (unit, source), "max_penalty": (0 - penalty, penalty_from)}


def _called_overlong(function: Named, o: Options) -> Found:
    given = function.arguments or {}
    most, buffer = given.get("max_completion_len", given.get(0)), given.get("soft_punish_cache", given.get(1))
    return _overlong(most, buffer, "max_completion_len", "soft_punish_cache")


def _called_repetition(function: Named, o: Options) -> Found:
    given = function.arguments or {}
    if set(given) - {"ngram_size", "max_penalty", 0, 1}:
        return None
    n, penalty = given.get("ngram_size", given.get(0, 3)), given.get("max_penalty", given.get(1, -1.0))
    return _repetition(n, penalty, "tokens", "ngram_size", "max_penalty")


def _optional_overlong(function: Named, o: Options) -> Found:
    names = ("max_completion_len", "soft_punish_cache")
    most, buffer = (o.whole(name, default=default) for name, default in zip(names, (16384, 4096), strict=True))
    return _overlong(most, buffer, *(_open_r1(o, name) for name in names))


def _optional_repetition(function: Named, o: Options) -> Found:
    n, penalty = "repetition_n_grams", "repetition_max_penalty"
    numbers = o.whole(n, default=3), o.number(penalty, default=-1.0)
    return _repetition(*numbers, "words", _open_r1(o, n), _open_r1(o, penalty))


def _open_r1(o: Options, name: str) -> str:
    return f"from {name}" if o.given(name) else f"open-r1's default of {name}"


OPTIONS = {
    "max_completion_len": "soft_overlong_punishment",
    "soft_punish_cache": "soft_overlong_punishment",
    "repetition_n_grams": "repetition_penalty",
    "repetition_max_penalty": "repetition_penalty",
}
KNOWN: dict[tuple[str, bool], Callable[[Named, Options], Found]] = {  # (name, called) → our reward
    ("accuracy_reward", False): _plain("math"),
    ("think_format_reward", False): _plain("format", pattern=THINK),
    ("get_soft_overlong_punishment", True): _called_overlong,
    # as `trl grpo` knows it by name
    ("get_soft_overlong_punishment", False): _plain("overlong", max_tokens=1280, buffer_tokens=256),
    ("get_repetition_penalty_reward", True): _called_repetition,
    ("accuracy", False): _plain("math"),
    ("format", False): _plain("format", pattern=THINK_ANSWER),
    ("soft_overlong_punishment", False): _optional_overlong,
    ("repetition_penalty", False): _optional_repetition,
}
