"""Whose fault an exception is: that of the model's code, or of ours.

A model that can't be run as the others are is refused, or run another way. An exception of our own must not look like
that: it would hide a bug, or an unreadable file, behind "not supported".
"""

import dis
from types import TracebackType

from proxima.data import UserError
from proxima.system.out_of_memory import is_out_of_memory

LIBRARIES = ("torch", "transformers", "transformers_modules")  # whose code is the model's; the last is from its folder
VALIDATES_CONFIGS = "huggingface_hub.dataclasses"  # for the config classes of transformers
# What the structure of a model can't cause.
NEVER = (MemoryError, NameError, OSError, UnicodeError)
RAISES = ("RAISE_VARARGS", "RERAISE")


def is_ours(error: BaseException, model: type) -> bool:
    """Return True if an exception, caught where the code of a model and ours run together, is a fault of ours.

    It is the model's if its code or a library's raised it, and where an operation of ours can't handle what the model
    gave: shapes that differ, a layer without keys and values. It is ours if our code, or what that called, raised it by
    a statement, lacks a name or an attribute, or could not read a file; and always if memory ran out. `UserError` is
    never ours.

    Args:
        model: the class of the model.
    """
    if isinstance(error, UserError):
        return False
    if is_out_of_memory(error):
        return True
    own = {kind.__module__ for kind in model.__mro__}
    last = None
    of_model = False
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        room = module.partition(".")[0]
        if room in LIBRARIES or module in own or module == VALIDATES_CONFIGS:
            of_model = True
        elif room == "proxima":
            of_model = False
        last = trace
        trace = trace.tb_next
    if last is None or of_model:
        return False
    if isinstance(error, AttributeError) and type(error.obj).__module__.startswith("proxima."):
        return True
    return isinstance(error, NEVER) or _was_raised(last)


def _was_raised(last: TracebackType) -> bool:
    """True if the innermost frame of Python ends in a `raise`, not in an operation."""
    at = last.tb_lasti
    code = last.tb_frame.f_code
    return any(step.offset == at and step.opname in RAISES for step in dis.get_instructions(code))
