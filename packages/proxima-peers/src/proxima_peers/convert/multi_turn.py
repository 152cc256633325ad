"""Tools, environments and turns: `task.environment`, `task.tools` and `episode`, for the peers that have them."""

import re
from dataclasses import replace

from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options

WORLD = "task.environment"
TOOLS = "task.tools"
AGENT = "it plays by itself: an agent, {kind: agent, run: MODULE:FUNCTION} (docs/environments.md)"
ENDLESS = "No limit there; a turn has at least one token."
LAST = "Calls in the last message run here, and nobody reads the answer; there they do not run."
WHOLE = "There, too, of the whole episode, answers of tools among it, and of each turn."
FORKS = "What a chat template rewrites, as Qwen3's does thoughts, begins a new path here: episode.forks."


def held_out(d: Draft) -> None:
    """Use the environment and tools of the training for held-out questions, too."""
    for name in ("environment", "tools"):
        if f"task.{name}" in d.entries and "eval.task.kind" in d.entries:
            d.entries[f"eval.task.{name}"] = replace(d.entries[f"task.{name}"], note="")


def read_last(d: Draft, kind: str, note: str) -> None:
    """Add a note to the rewards of a kind, which read more of an episode in the peer than here."""
    for place, entry in d.entries.items():
        if re.fullmatch(r"reward\.\d+\.kind", place) and entry.value == kind:
            d.entries[place] = replace(entry, note=f"{entry.note}. {note}".removeprefix(". "))


# ---- TRL -------------------------------------------------------------------------------------------------------------

ROUNDS = "max_tool_calling_iterations"
RAISED = "TRL shows the model whatever a tool raises; here only of wrong calls; otherwise the episode is restarted."
SWAPPED = f"TRL swaps in a chat template that keeps what the model saw. {FORKS}"


def trl_episodes(d: Draft, o: Options, longest: tuple[int, str]) -> None:
    """`tools`, `environment_factory`, `max_tool_calling_iterations`; a `rollout_func` is an agent."""
    if o.given("rollout_func"):
        d.wait(WORLD, "rollout_func", f"{o.get('rollout_func')}: {AGENT}")
    given = [(name, path) for name, path in (("environment_factory", WORLD), ("tools", TOOLS)) if o.given(name)]
    for name, path in given:
        _by_name(d, o, name, path)
    if not given:
        d.drops_given(o, "read with tools or environment_factory only", ROUNDS)
        return
    most = o.whole(ROUNDS, least=0)
    origin = o.origin(ROUNDS)
    if most is None:
        turns = (longest[0], origin, ENDLESS)
    else:
        turns = (most + 1, f"{origin}, plus the message after them", LAST)
    d.put("episode.turns", *turns)
    d.put("episode.tokens", *longest, WHOLE)
    d.put("episode.forks", "train", "our default", f"{SWAPPED} {RAISED}")
    read_last(d, "function", "TRL passes all messages of an episode; here it is the model's last one.")


def _by_name(d: Draft, o: Options, option: str, path: str) -> None:
    """Functions or a class by their modules; those defined in the script have to be filled in."""
    written = o.get(option)
    if isinstance(written, list) and written:
        texts = [str(text) for text in written]
    else:
        texts = [str(written)]
    named = list(map(_reference, texts))
    if path == TOOLS:
        d.put(path, named, o.origin(option))
    else:
        d.put(path, named[0], o.origin(option))
    rest = [text for text in texts if text not in named]
    if rest:
        why = "put it into a separate file, for an import of the script would run it, and name it"
        if path == WORLD and "{" in rest[0]:
            why += "; several are a task of the kind mix"
        d.wait(path, option, f"{', '.join(rest)}: {why}")


REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _reference(text: str) -> str:
    """`module:name` as it is; for anything else, the same with what is to be filled in."""
    if REFERENCE.fullmatch(text):
        return text
    last = text.rpartition(".")[2]
    if last.isidentifier():
        return f"MODULE:{last}"
    return "MODULE:NAME"


# ---- verl ------------------------------------------------------------------------------------------------------------

ROLLOUT = "actor_rollout_ref.rollout."
MULTI = f"{ROLLOUT}multi_turn."
LOOP = f"{ROLLOUT}agent.default_agent_loop"
OFF = "single_turn_agent"
ON = "tool_agent"
FORMATS = {"hermes": "hermes", "qwen25": "hermes", "llama3_json": "llama", "qwen3_coder": "xml"}
CODE = {  # option: our field, and its equivalent here
    "tool_config_path": (
        WORLD,
        "a class with these tools as methods; `reset` gets each row's columns, as its tools_kwargs",
    ),
    "function_tool_path": (TOOLS, "its functions, without verl's decorator, as MODULE:NAME"),
    "interaction_config_path": (WORLD, "a class whose `respond` answers as the user"),
    "completion_callback": (WORLD, AGENT),
}


def verl_episodes(d: Draft, o: Options, longest: tuple[int, str]) -> None:
    """`multi_turn.*` and the agent loop."""
    on = o.flag(f"{MULTI}enable")
    loop = str(o.get(LOOP, default=OFF))
    if not on and loop == OFF:
        d.drops_given(o, "off, or neutral", f"{MULTI}enable", LOOP)
        return
    if loop not in (OFF, ON):
        d.wait(WORLD, LOOP, f"{loop}: {AGENT}")
    _verls_code(d, o, loop)
    _verls_turns(d, o, longest)
    written = str(o.get(f"{MULTI}format", default="hermes"))
    if written in FORMATS:
        d.put("episode.tool_format", FORMATS[written], o.origin(f"{MULTI}format"))
    else:
        d.lacks(
            f"{MULTI}format", f"{written}: here {', '.join(FORMATS)}; calls are read as the chat template shows them"
        )
    calls = o.whole(f"{MULTI}max_parallel_calls", default=1, least=0)
    d.lacks(
        f"{MULTI}max_parallel_calls", f"{calls}: further calls of a message are not run there; here all of them are"
    )
    side = o.choice(("left", "middle", "right"), f"{MULTI}tool_response_truncate_side", default="middle")
    most = o.whole(f"{MULTI}max_tool_response_length", default=256, least=0)
    cut = f"{most} characters of an answer, cut at its {side}; here it is whole: cut it in the tool"
    d.lacks(f"{MULTI}max_tool_response_length", cut)
    unread = (f"{MULTI}tokenization_sanity_check_mode", f"{MULTI}use_inference_chat_template")
    d.drops_given(o, "sampled tokens are never encoded again; see episode.forks", *unread)
    read_last(d, "function", "verl's solution_str has all turns and answers; here it is the model's last message.")
    read_last(d, "overlong", "verl's length has the answers of tools in it; here it is what the model wrote.")


def _verls_code(d: Draft, o: Options, loop: str) -> None:
    """The files of tools and interactions, which are user code."""
    named = False
    for option, (path, what) in CODE.items():
        names = (MULTI + option, f"data.{option}")
        if o.given(*names):
            named = True
            value = o.get(*names)
            d.wait(path, next(name for name in names if o.flat.get(name) is not None), f"{value}: {what}")
    if not named and loop in (OFF, ON):
        d.wait(WORLD, f"{MULTI}enable", "the file names neither tools nor an interaction")


def _verls_turns(d: Draft, o: Options, longest: tuple[int, str]) -> None:
    """The smaller of two bounds: the model's messages, or the answers to them plus the message after the last."""
    own = f"{MULTI}max_assistant_turns"
    theirs = f"{MULTI}max_user_turns"
    most = o.whole(own, least=0)
    answers = o.whole(theirs, least=0)
    bounds = []
    if most:
        bounds.append((most, o.origin(own)))
    if answers:
        bounds.append((answers + 1, f"{o.origin(theirs)}, plus the message after them"))
    if bounds:
        turns, origin = min(bounds, key=lambda bound: bound[0])
        d.put("episode.turns", turns, origin, LAST)
    else:
        d.put("episode.turns", longest[0], o.origin(own), ENDLESS)
    d.put("episode.tokens", *longest, WHOLE)
    d.put(
        "episode.forks",
        "train",
        "our default",
        f"verl keeps what the model saw. {FORKS} {RAISED.replace('TRL', 'verl')}",
    )


# ---- AReaL, UniRL ----------------------------------------------------------------------------------------------------


def workflow_turns(d: Draft, o: Options, *names: str) -> None:
    """`max_turns` of a workflow, which is user code: the maximum of the model's messages, as here; 1 is no episode."""
    most = o.whole(*names, default=1, least=1)
    if most > 1:
        d.put("episode.turns", most, o.origin(*names))
        d.wait(WORLD, o.origin(*names).removeprefix("from "), f"{most}: {WORKFLOW}")
        held_out(d)
    else:
        d.drops_given(o, "off, or neutral", *names)


WORKFLOW = (
    "several turns, by code of yours: make it a class with tools or `respond`, or an agent (docs/environments.md)"
)
