"""TRL's reward functions by name: those of `trl.rewards`, and those of open-r1, whose recipes are GRPOConfigs with
options for these functions."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proxima_peers.convert import common
from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Options
from proxima_peers.convert.pruning_fork import is_pruning_fork
from proxima_peers.convert.read_python import literal

Found = tuple[str, Fields] | None  # our kind with its fields; None: no equivalent
# ast.parse raises these for text that is not an expression, or nested too deeply
UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)
THINK = r"^<think>(?!.*<think>).*?</think>"
THINK_ANSWER = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>(\n|$)"


@dataclass(frozen=True)
class NamedReward:
    """A reward function as the file names it: `accuracy_reward`, or `get_soft_overlong_punishment(4096, 512)`.

    Args:
        text: the text in the file.
        name: name of the function, without its package if that is TRL, open_r1 or unknown.
        arguments: arguments of the call by name or position; None if one can't be read.
        called: the text is a call.
        is_model: the text names a reward model.
    """

    text: str
    name: str
    arguments: dict[str | int, Any] | None
    called: bool
    is_model: bool = False

    @classmethod
    def of(cls, text: str) -> "NamedReward":
        bare = text.strip().strip("'\"")
        if _HUB_NAME.fullmatch(bare):
            return cls(text, bare, None, False, is_model=True)
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except UNPARSED:
            return cls(text, text.strip(), None, False)
        called = isinstance(node, ast.Call)
        function = node.func if isinstance(node, ast.Call) else node
        name = ast.unparse(function)
        package, _, last = name.rpartition(".")
        if package.partition(".")[0] in ("", "trl", "open_r1"):
            name = last
        try:
            given: dict[str | int, Any] = {}
            if isinstance(node, ast.Call):
                given |= {index: literal(argument, {}) for index, argument in enumerate(node.args)}
                given |= {str(keyword.arg): literal(keyword.value, {}) for keyword in node.keywords}
        except ValueError:
            return cls(text, name, None, called)
        return cls(text, name, given, called)

    def place(self, o: Options) -> str | None:
        """`package.module:function` for a function that `trl grpo` would import by name; None for one in a script,
        because importing it would run the script."""
        module, _, name = self.name.rpartition(".")
        importable = module not in ("", "__main__") and not self.called and re.fullmatch(r"[\w.]+", self.text.strip())
        if importable and not o.file.endswith(".py"):
            return f"{module}:{name}"
        return None


MODEL = "reward_model_name_or_path"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def reads_solutions(o: Options) -> bool:
    """Return True if a reward compares with the column `solution`."""
    return any(function.name in ("accuracy_reward", "accuracy") for function in _functions(o))


def _functions(o: Options) -> list[NamedReward]:
    """The rewards in TRL's order: the reward model, then `reward_funcs`."""
    written = o.get("reward_funcs")
    model = o.get(MODEL)
    functions = []
    if model is not None:
        functions.append(NamedReward(str(model), str(model), None, False, is_model=True))
    if isinstance(written, list):
        functions += [NamedReward.of(str(text)) for text in written]
    elif written:
        functions += map(NamedReward.of, _split(str(written)))
    return functions


def rewards(d: Draft, o: Options) -> None:
    """`reward_funcs` with `reward_weights`; one of the script is to be filled in, with its weight."""
    functions = _functions(o)
    weights = o.get("reward_weights")
    if weights is not None and not (isinstance(weights, list) and all(_is_number(weight) for weight in weights)):
        weights = o.refuse("must be a list of numbers", "reward_weights")
    if weights is not None and functions and len(weights) != len(functions):
        d.lacks("reward_weights", f"{weights}: {len(weights)} for {len(functions)} rewards")
        weights = None
    if o.given("environment_factory"):
        _of_environment(d, alone=not functions)
    if not functions:
        if not o.given("environment_factory"):
            common.reward(d)
        if weights is not None:
            d.lacks("reward_weights", f"{weights}: they are the `weight` of each entry of `reward`")
    how = o.get("multi_objective_aggregation", default="sum_then_normalize")
    summed = weights if how == "sum_then_normalize" else None
    for index, function in enumerate(functions):
        place = f"reward.{common.rewards_of(d)}"
        _one(d, o, place, index, function)
        if summed is not None and summed[index] != 1:
            weight = summed[index]
            own = d.entries.get(f"{place}.weight")
            if own:
                weight *= own.value
            d.put(f"{place}.weight", weight, "from reward_weights")
    for name, function_of in OPTIONS.items():
        if not any(function.name == function_of for function in functions):
            d.drops_given(o, f"reward_funcs does not name {function_of}", name)


def _of_environment(d: Draft, alone: bool) -> None:
    """In TRL, an environment's `get_reward`, if it has that method, is a reward of weight 1 besides the functions."""
    if alone:
        d.append("reward", "environment", "the get_reward of environment_factory")
    else:
        why = "where its class has get_reward, TRL adds that with weight 1: add {kind: environment}"
        d.wait("reward", "environment_factory", why)


def _one(d: Draft, o: Options, place: str, index: int, function: NamedReward) -> None:
    """Add the entry of one reward."""
    origin = f"from reward_funcs: {function.name}"
    own = None
    if is_pruning_fork(o) and not function.called:
        own = IN_CPPO.get(function.name)
    make = None
    if function.arguments is not None:
        make = own or KNOWN.get((function.name, function.called))
    if function.is_model:
        named_by = MODEL if o.given(MODEL) else "reward_funcs"
        d.append("reward", "model", o.origin(named_by), path=(function.name, origin))
        return
    reward = make(function, o) if make is not None else None
    if reward is not None:
        d.append("reward", reward[0], origin, **reward[1])
        return
    path = function.place(o)
    if path is not None:
        d.append("reward", "function", origin, path=(path, "as TRL imports it"))
        return
    home, _, name = function.name.removeprefix("__main__.").rpartition(".")
    if home:
        where = f"{home}:{name}"
    elif ":" in name:
        where = name
    else:
        where = f"rewards.py:{name}"
    why = f"name it as {{kind: function, path: {where}}}, in a separate file"
    d.ask(place, "math", f"{function.text}: {why}", kind=True)
    d.put(f"{place}.name", _label(function, index), "the function's")


def _label(function: NamedReward, index: int) -> str:
    """A unique name for the entry of a function."""
    last = re.sub(r"\W", "", function.name.rpartition(".")[2])[:40]
    return f"{last or 'function'}_{index}"


def _split(text: str) -> list[str]:
    """The items of a Python list, or words separated by blanks or commas."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except UNPARSED:
        return text.replace(",", " ").split()
    if isinstance(node, ast.List | ast.Tuple):
        return [ast.unparse(item) for item in node.elts]
    return [text.strip()]


def _is_number(value: Any, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _plain(kind: str, **fields: Any) -> Callable[[NamedReward, Options], Found]:
    return lambda function, o: (kind, {name: (value, f"as {function.name}") for name, value in fields.items()})


def _argument(
    function: NamedReward, o: Options, position: int, name: str, default: Any, option: str
) -> tuple[Any, str]:
    """An argument of the call, by name or position, or, without a call, an option of open-r1; with its origin."""
    if function.called:
        given = function.arguments or {}
        return given.get(name, given.get(position, default)), name
    if isinstance(default, int):
        value = o.whole(option, default=default)
    else:
        value = o.number(option, default=default)
    origin = f"from {option}" if o.given(option) else f"open-r1's default of {option}"
    return value, origin


def _overlong(function: NamedReward, o: Options) -> Found:
    """`overlong`, with TRL's penalty at every length; None without a buffer, because TRL's penalty is then a step that
    no completion reaches."""
    defaults = (None, None) if function.called else (16384, 4096)
    most = _argument(function, o, 0, "max_completion_len", defaults[0], "max_completion_len")
    buffer = _argument(function, o, 1, "soft_punish_cache", defaults[1], "soft_punish_cache")
    if not _is_number(most[0], int) or not _is_number(buffer[0], int) or not 1 <= buffer[0] <= most[0]:
        return None
    return "overlong", {"max_tokens": most, "buffer_tokens": buffer}


def _repetition(function: NamedReward, o: Options) -> Found:
    """`repetition`; TRL writes the penalty as a negative number, and counts tokens, open-r1 words."""
    if function.called and set(function.arguments or {}) - {"ngram_size", "max_penalty", 0, 1}:
        return None
    n = _argument(function, o, 0, "ngram_size", 3, "repetition_n_grams")
    penalty, origin = _argument(function, o, 1, "max_penalty", -1.0, "repetition_max_penalty")
    if not _is_number(n[0], int) or not _is_number(penalty) or n[0] < 1 or penalty > 0:
        return None
    if function.called:
        unit = ("tokens", "TRL's")
    else:
        unit = ("words", "open-r1's")
    return "repetition", {"n": n, "unit": unit, "max_penalty": (0 - penalty, origin)}


def _accuracy_in_cppo(function: NamedReward, o: Options) -> Found:
    """2 for an exact answer to a question of GSM8K, 1.5 for an equal number; 2 for a right answer of another set."""
    if "gsm8k" in str(o.get("dataset_name", default="")).lower():
        return "accuracy_1_5_2", {}
    return "math", {"weight": (2, "as rewards_math.py of CPPO pays")}


OPTIONS = {
    "max_completion_len": "soft_overlong_punishment",
    "soft_punish_cache": "soft_overlong_punishment",
    "repetition_n_grams": "repetition_penalty",
    "repetition_max_penalty": "repetition_penalty",
}
KNOWN: dict[tuple[str, bool], Callable[[NamedReward, Options], Found]] = {  # (name, called) → our reward
    ("accuracy_reward", False): _plain("math"),
    ("think_format_reward", False): _plain("format", pattern=THINK),
    ("get_soft_overlong_punishment", True): _overlong,
    # as `trl grpo` knows it by name
    ("get_soft_overlong_punishment", False): _plain("overlong", max_tokens=1280, buffer_tokens=256),
    ("get_repetition_penalty_reward", True): _repetition,
    ("accuracy", False): _plain("math"),
    ("format", False): _plain("format", pattern=THINK_ANSWER),
    ("soft_overlong_punishment", False): _overlong,
    ("repetition_penalty", False): _repetition,
}
IN_CPPO = {"accuracy": _accuracy_in_cppo, "format": _plain("format")}  # completion pruning's own, by open-r1's names
