"""The scorers of completions in verl: a user's function, a reward manager, or the scorer of the row's data set."""

from proxima_peers.convert import common
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options

SECTIONS = ("reward.custom_reward_function.", "custom_reward_function.")
PATHS, NAMES = (tuple(section + name for section in SECTIONS) for name in ("path", "name"))
KEY = "data.reward_fn_key"
MANAGERS = ("reward.reward_manager.name", "reward_model.reward_manager")
CLASSES = ("reward.reward_manager.module.path", "reward_model.reward_loop_module_path")
PARTS = ("reward.reward_manager.module.name", "reward_model.reward_loop_class_name")
SOURCES = ("reward.reward_manager.source", "reward_model.reward_loop_source")


def scored_by_function(o: Options) -> bool:
    """Return True if the file names a scoring function."""
    return o.given(*PATHS)


def scorer(d: Draft, o: Options) -> None:
    """`custom_reward_function`, which is called here as in verl; else the reward of the data."""
    key = o.get(KEY, default="data_source")
    if not scored_by_function(o):
        if "task.tasks.0.name" not in d.entries:  # a mix, whose sources have their own
            common.reward(d)
        d.drops_given(o, "there is no custom_reward_function.path", *NAMES)
        if key != "data_source":
            d.wait("reward", KEY, f"{key}: verl's scorer is chosen by that column of each row; choose `reward`")
        else:
            d.drops_given(o, "the scorer is chosen by `reward`", KEY)
        return
    name = str(o.get(*NAMES, default="compute_score"))
    module = str(o.get(*PATHS, default="./reward.py")).removeprefix("file://")
    packaged = module.startswith("pkg://")
    note = "called with data_source, solution_str, ground_truth and extra_info, as verl calls it"
    origin = f"{o.origin(*PATHS)}, {o.origin(*NAMES).removeprefix('from ')}"
    d.append("reward", "function", o.origin(*PATHS), note, path=(f"{module.removeprefix('pkg://')}:{name}", origin))
    if not packaged and not module.endswith(".py"):
        d.wait("reward.0.path", PATHS[1], f"{module}: give it as ./FILE.py:FUNCTION or package.module:FUNCTION")
    for option in o.flat:
        if option.startswith(tuple(f"{section}reward_kwargs." for section in SECTIONS)) and o.given(option):
            why = f"{o.get(option)}: make it the default of the function's parameter"
            d.wait("reward.0.path", option, why)
    if key != "data_source":
        d.wait("reward.0.path", KEY, f"{key}: verl passes that column as data_source; rename it in the rows")
    else:
        d.drops_given(o, "the column that verl passes as data_source", KEY)


def reward_manager(d: Draft, o: Options) -> None:
    """The reward manager, which calls the scorer; one of the user's own has to be filled in."""
    o.given(*SOURCES)
    if o.given(*CLASSES):
        place = f"{o.get(*CLASSES)}:{o.get(*PARTS)}"
        d.wait("reward", o.origin(*CLASSES).removeprefix("from "), f"{place}: a custom reward manager: {PORT}")
        o.given(*MANAGERS)
        return
    name = o.origin(*MANAGERS).removeprefix("from ")
    manager = o.get(*MANAGERS, default="naive")
    if manager == "dapo" and scored_by_function(o):
        d.drops(name, "it calls the function for each completion, as here; its overlong buffer is a separate reward")
    elif manager == "dapo":
        scores = "where verl's scorer gives +1 and -1, as for DAPO's data, {kind: math, weight: 2} is as far apart"
        d.wait("reward", name, f"dapo: choose `reward`; {scores}")
    elif manager != "naive":
        d.wait("reward", name, f"{manager}: how this manager calls the scorer is not converted: choose `reward`")


PORT = "port it as a function, {kind: function, path: ./FILE.py:FUNCTION}"
