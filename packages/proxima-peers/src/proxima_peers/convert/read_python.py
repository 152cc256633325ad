"""Options of a Python file that trains with TRL: parsed, never run."""

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from proxima.config.problems import one_problem
from proxima.data import UserError

UNREADABLE = "…"  # placeholder for an expression whose value is known only at run time
KINDS = ("GRPO", "RLOO", "SFT", "DPO", "KTO", "Reward", "GKD")  # of TRL's trainings, those that are converted
CALLS = tuple(f"{kind}Config" for kind in KINDS)
TRAINERS = tuple(f"{kind}Trainer" for kind in KINDS)
PARSED = "training_args"
DATA = ("args", "train_dataset", "eval_dataset")  # keywords of the trainer that are not options


def from_python(text: str, name: str = "file", usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The keywords of a file's only call of `CALLS` and of its trainer, and the attributes set in between.

    Reads literals, arithmetic on them and names assigned once at module level; anything else is `UNREADABLE`. A class
    of the file that extends one of these is read as that one: its defaults, and its name as `config_class` or
    `trainer_class`.

    Args:
        usage: options of the command line that the file's docstring shows, for a file that parses its arguments.

    Raises:
        ConfigError: there is no such call and no usage, there are several calls, the trainer is another one, or the
            text is not Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise one_problem(name, f"not Python: {error}") from None
    configs = _and_subclasses(tree, CALLS)
    trainers = _and_subclasses(tree, TRAINERS)
    calls = [call for name in configs for call in _calls(tree, name)]
    trained = [call for name in trainers for call in _calls(tree, name)]
    others = _other_trainers(tree)
    if others and not trained:
        raise one_problem(name, f"trains with {', '.join(others)}, which is {NOT_CONVERTED}; {CONVERTED}")
    used = next((node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in configs), None)
    if not calls and not (usage and used):
        raise one_problem(name, _without_options(tree, used))
    if len(calls) > 1:
        lines = ", ".join(str(node.lineno) for node in calls)
        raise one_problem(name, f"has {len(calls)} {used}(…) calls, in lines {lines}; keep one")
    constants = _constants(tree)
    holders = (PARSED, *_holders(tree, configs))
    if calls:
        flat = _defaults(configs[str(_called(calls[0]))], constants)
        flat |= _keywords(calls[0], constants)
    else:
        flat = _defaults(configs[str(used)], constants)
        flat |= usage or {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node in trained:
            flat |= _of_trainer(tree, node, constants)
            flat |= _own_class("trainer_class", trainers[str(_called(node))])
        elif isinstance(node, ast.Assign):
            holder, _, option = ast.unparse(node.targets[0]).rpartition(".")
            if holder in holders:
                flat[option] = _value(node.value, constants)
    for option, value in _data(tree, constants).items():
        flat.setdefault(option, value)
    leaves: dict[str, Any] = {}
    for option, value in flat.items():
        leaves |= _leaves(option, value)
    return leaves


NOT_CONVERTED = "not converted"
CONVERTED = "converted are the files of GRPO, RLOO, SFT, DPO, KTO, Reward and GKD"


def training_in_python(text: str) -> str | None:
    """The training of a Python file, such as `sft`, by the only class of TRL that it makes or names; else None."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    classes = _and_subclasses(tree, (*CALLS, *TRAINERS))
    called = {name for name in classes if any(_calls(tree, name))}
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in classes}
    kinds = {_kind_of(name, classes[name]) for name in called or named}
    if len(kinds) > 1:
        return None
    return next(iter(kinds), None)


def _kind_of(name: str, own: ast.ClassDef | None) -> str:
    if own is not None:
        name = next(base for base in map(_last, own.bases) if base in (*CALLS, *TRAINERS))
    return name.removesuffix("Config").removesuffix("Trainer").lower()


def _and_subclasses(tree: ast.Module, names: tuple[str, ...]) -> dict[str, ast.ClassDef | None]:
    """The classes, and those of the file that extend one of them, each with its definition if the file has it."""
    own = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    extended = {node.name: node for node in own if any(_last(base) in names for base in node.bases)}
    return dict.fromkeys(names) | extended


def _last(node: ast.expr) -> str:
    """The last name of `a.b.c`."""
    return ast.unparse(node).rpartition(".")[2]


def _own_class(option: str, own: ast.ClassDef | None) -> dict[str, Any]:
    if own is None:
        return {}
    return {option: f"{own.name}({', '.join(map(_last, own.bases))})"}


def _defaults(own: ast.ClassDef | None, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a config class of the file."""
    if own is None:
        return {}
    options = _own_class("config_class", own)
    for node in own.body:
        if isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            value = _value(_default(node.value), constants)
            options |= {target.id: value for target in _targets(node)}
    return options


def _default(value: ast.expr) -> ast.expr:
    """The value, or the default in `field(default=…)` or `field(default_factory=lambda: …)`."""
    if not isinstance(value, ast.Call) or _called(value) != "field":
        return value
    given = {key.arg: key.value for key in value.keywords}
    made = given.get("default", given.get("default_factory", value))
    if isinstance(made, ast.Lambda):
        return made.body
    return made


def _other_trainers(tree: ast.Module) -> list[str]:
    """The trainers of TRL that the file makes, other than those that are converted."""
    imported: dict[str, str] = {}  # by the file's own name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trl":
            imported |= {alias.asname or alias.name: alias.name for alias in node.names}
    others = {own: name for own, name in imported.items() if name.endswith("Trainer") and name not in TRAINERS}
    return sorted(name for own, name in others.items() if any(_calls(tree, own)))


def _without_options(tree: ast.Module, used: str | None) -> str:
    """The reason why a file gives no options."""
    if not tree.body:
        return "holds no code, only comments; give the file that trains, or the options as YAML"
    if used is None:
        return f"has no {CALLS[0]}(…) call; give the file that makes one, or the options as YAML"
    if any(_calls(tree, "TrlParser")) or any(_calls(tree, "HfArgumentParser")):
        return f"takes its {used} from a command line that it does not show; give a script with it, or its YAML"
    return f"has no {used}(…) call; give the file that makes one, or the options as YAML"


# methods that make rows
CHANGES = ("map", "filter", "rename_column", "rename_columns", "from_dict", "from_list", "from_generator")


def _data(tree: ast.Module, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The data set that the only `load_dataset(…)` names; also `train_dataset` if code creates or changes its rows."""
    calls = list(_calls(tree, "load_dataset"))
    options: dict[str, Any] = {}
    if len(calls) == 1 and calls[0].args:
        options = _loaded(calls[0], constants)
    made: dict[str, None] = {}
    for name in CHANGES:
        made |= {ast.unparse(node): None for node in _calls(tree, name) if _of_rows(node)}
    if made:
        options["train_dataset"] = "; ".join(map(_cut, made))
    return {name: value for name, value in options.items() if value is not None and value is not UNREADABLE}


def _loaded(call: ast.Call, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the arguments of `load_dataset(…)` are; a list of splits is the training's, then the test's."""
    given = {str(key.arg): _value(key.value, constants) for key in call.keywords}
    path = _value(call.args[0], constants)
    if path in ("json", "parquet", "csv"):
        path = given.get("data_files", path)
    split = given.get("split")
    options = {"dataset_name": path, "dataset_train_split": split}
    if len(call.args) > 1:
        options["dataset_config"] = _value(call.args[1], constants)
    if isinstance(split, list):
        options["dataset_train_split"] = split[0] if split else None
        if len(split) > 1:
            options["dataset_test_split"] = split[1]
    return options


def _cut(text: str) -> str:
    if len(text) > 80:
        return f"{text[:79]}…"
    return text


def _of_rows(call: ast.Call) -> bool:
    """Guess from its owner's name whether a method such as `map` or `filter` is one of a data set."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = ast.unparse(call.func.value).lower()
    return any(word in owner for word in ("data", "train", "eval", "split", "ds"))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted names of a dictionary's values."""
    if isinstance(value, dict) and value:
        for key, inside in value.items():
            yield from _leaves(f"{name}.{key}", inside)
    else:
        yield name, value


def _keywords(call: ast.Call, constants: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            options[f"**{ast.unparse(keyword.value)}"] = UNREADABLE
        else:
            options[keyword.arg] = _value(keyword.value, constants)
    return options


def _of_trainer(tree: ast.Module, call: ast.Call, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's own arguments: `model`, `reward_funcs`, and others such as `peft_config` and `tools`."""
    options = _keywords(call, constants)
    if options.get("model") not in (None, UNREADABLE):
        options["model_name_or_path"] = options["model"]
    for keyword in call.keywords:
        if keyword.arg == "reward_funcs":
            options["reward_funcs"] = _functions(tree, keyword.value, constants)
        if keyword.arg in ("tools", "environment_factory"):
            options[keyword.arg] = _references(tree, keyword.value)
        if keyword.arg == "rollout_func":
            options["rollout_func"] = ast.unparse(keyword.value)[:80]
        if keyword.arg == "processing_class":
            options["processing_class"] = _tokenizer(tree, keyword.value, options.get("model_name_or_path"), constants)
        if keyword.arg == "peft_config":
            made = _made_by(tree, keyword.value, "LoraConfig")
            if made is not None:
                options["peft_config"] = {"peft_type": "LORA"} | _keywords(made, constants)
    return {name: value for name, value in options.items() if name not in (*DATA, "model")}


HARMLESS = {"padding_side", "use_fast", "trust_remote_code", "revision"}  # arguments of a tokenizer


def _tokenizer(tree: ast.Module, node: ast.expr, model: Any, constants: Mapping[str, Any]) -> str | None:
    """The expression that creates the tokenizer; None if it is the model's own: `….from_pretrained(MODEL)`."""
    made = _made_by(tree, node, "from_pretrained")
    if made is not None and len(made.args) == 1:
        of = _value(made.args[0], constants)
        given = {key.arg for key in made.keywords}
        if model in (of, None, UNREADABLE) and given <= HARMLESS:
            return None
    return ast.unparse(_assigned(tree, node))[:80]


def _made_by(tree: ast.Module, node: ast.expr, called: str) -> ast.Call | None:
    """`node`, or the value assigned once to its variable, if it is a call of that name."""
    value = _assigned(tree, node)
    if isinstance(value, ast.Call) and _called(value) == called:
        return value
    return None


def _assigned(tree: ast.Module, node: ast.expr) -> ast.expr:
    """The value of a variable that is assigned exactly once; any other expression unchanged."""
    if not isinstance(node, ast.Name):
        return node
    assignments = [item for item in ast.walk(tree) if node.id in {target.id for target in _targets(item)}]
    if len(assignments) == 1 and isinstance(assignments[0], ast.Assign):
        return assignments[0].value
    return node


def _calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == name)


def _holders(tree: ast.Module, configs: Collection[str]) -> list[str]:
    """The variables to which a configuration is assigned."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    made = [node for node in assigned if isinstance(node.value, ast.Call) and _called(node.value) in configs]
    return [target.id for node in made for target in _targets(node)]


def _functions(tree: ast.Module, node: ast.expr, constants: Mapping[str, Any]) -> list[str]:
    """The functions in a list, or in its variable, as text, with their packages and with constants in calls."""
    nodes = list(ast.walk(tree))
    node = _assigned(tree, node)
    homes = {item.name: "__main__" for item in nodes if isinstance(item, ast.FunctionDef | ast.ClassDef)}
    for item in nodes:
        if isinstance(item, ast.ImportFrom):
            homes |= {alias.name: item.module or "" for alias in item.names if alias.asname in (None, alias.name)}
    return [_named(item, homes, constants) for item in _items(node)]


def _items(node: ast.expr) -> list[ast.expr]:
    """The items of a list, or the expression as the only one."""
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts
    return [node]


def _references(tree: ast.Module, node: ast.expr) -> list[str] | None:
    """`module:name` for each item of a list, or the single item, if the file imports it; otherwise the item as text."""
    node = _assigned(tree, node)
    places = dict[str, str]()
    for item in ast.walk(tree):
        if isinstance(item, ast.ImportFrom) and item.module and not item.level:
            for alias in item.names:
                name = alias.asname or alias.name
                places[name] = f"{item.module}:{alias.name}"
                if name.islower():  # it may be a module
                    places[f"{name}."] = f"{item.module}.{alias.name}:"
        elif isinstance(item, ast.Import):
            places |= {f"{alias.asname or alias.name}.": f"{alias.name}:" for alias in item.names}
    texts = [ast.unparse(item) for item in _items(node)]
    return [_reference(text, places)[:80] for text in texts if text != "None"] or None


def _reference(text: str, places: Mapping[str, str]) -> str:
    owner, dot, name = text.rpartition(".")
    if text in places:
        return places[text]
    if owner + dot in places:
        return f"{places[owner + dot]}{name}"
    return text


def _named(node: ast.expr, homes: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    def text(value: ast.expr) -> str:
        constant = _value(value, constants)
        if constant is UNREADABLE:
            return ast.unparse(value)
        return repr(constant)

    if isinstance(node, ast.Call):
        given = [text(value) for value in node.args]
        for keyword in node.keywords:
            before = f"{keyword.arg}=" if keyword.arg else "**"
            given.append(before + text(keyword.value))
        return f"{_named(node.func, homes, {})}({', '.join(given)})"
    name = ast.unparse(node)
    home = homes.get(name.partition(".")[0])
    return f"{home}.{name}" if home else name


def _called(node: ast.Call) -> str | None:
    """The last name of what is called; None for the result of another expression, `f()()`."""
    if isinstance(node.func, ast.Name):
        return node.func.id
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return None


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names assigned exactly once, at module level, to a readable value."""
    constants: dict[str, Any] = {}
    assigned = [target.id for node in ast.walk(tree) for target in _targets(node)]
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in _targets(node):
            if assigned.count(target.id) > 1:
                continue
            value = _value(node.value, constants)
            if value is not UNREADABLE:
                constants[target.id] = value
    return constants


def _targets(node: ast.AST) -> list[ast.Name]:
    """The plain names that a statement assigns to."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    return [target for target in targets if isinstance(target, ast.Name)]


def _value(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    try:
        return literal(node, constants)
    except ValueError:
        return UNREADABLE


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def literal(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """The value of a literal, of + - * / // on numbers, or of a known name. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(item, constants) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
        return {key: literal(value, constants) for key, value in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, constants)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _number(node.left, constants)
        right = _number(node.right, constants)
        if right or not isinstance(node.op, ast.Div | ast.FloorDiv):
            return _OPERATORS[type(node.op)](left, right)
    raise UserError(f"not a literal: {ast.unparse(node)}")


def _number(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    value = literal(node, constants)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"not a number: {ast.unparse(node)}")
    return value
