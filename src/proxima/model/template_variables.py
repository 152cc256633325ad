"""The variables that a chat template reads: tools, and arguments of the user."""

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from proxima.data import FieldError
from proxima.model.template_bounds import bounded_environment

SET_HERE = frozenset({"messages", "add_generation_prompt", "continue_final_message"})
NOT_ARGUMENTS = frozenset({"namespace", "raise_exception", "range", "dict", "strftime_now", "cycler", "joiner"})


def reads_tools(tokenizer: Any) -> bool:
    """True if the chat template shows tools to the model."""
    if tokenizer.chat_template is None:
        return False
    read = _variables(tokenizer.get_chat_template(tools=[{}]))  # a dummy tool: some have a separate template for tools
    return read is not None and "tools" in read


def unread(tokenizer: Any, arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that the chat template does not read, or that proxima sets."""
    if tokenizer.chat_template is None:
        return list(arguments)
    read = _variables(tokenizer.get_chat_template(tools=arguments.get("tools")))
    return [name for name in arguments if name in SET_HERE or (read is not None and name not in read)]


def require_read(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the chat template does not read: a mistyped one would change nothing."""
    read = _variables(tokenizer.get_chat_template(tools=arguments.get("tools")))
    for name in unread(tokenizer, arguments):
        theirs = sorted((read or set()) - SET_HERE - NOT_ARGUMENTS - set(tokenizer.special_tokens_map))
        near = difflib.get_close_matches(name, theirs, 1)
        remedy = f"did you mean {near[0]!r}?" if near else f"it reads {', '.join(theirs) or 'none'}"
        reason = "is set by proxima" if name in SET_HERE else "is not read by the model's chat template"
        raise FieldError(f"data.template_arguments.{name}", arguments[name], reason, remedy=remedy)


@lru_cache(maxsize=8)
def _variables(template: str) -> set[str] | None:
    """The names that a template expects from its caller; None if it can't be parsed: rendering then says why."""
    from jinja2 import meta

    try:
        return meta.find_undeclared_variables(bounded_environment().parse(template))
    except Exception:  # of a parser that recurses, too
        return None
