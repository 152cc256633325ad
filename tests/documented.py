"""A spec is a frozen dataclass whose docstrings describe its fields."""

import dataclasses
import inspect


def assert_documented(cls: type) -> None:
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    first, blank, *_ = [*inspect.cleandoc(cls.__dict__["__doc__"]).splitlines(), ""]
    assert first.endswith(".") and (blank == "" or blank.startswith("Args:")), first
    docs = [inspect.cleandoc(base.__dict__.get("__doc__") or "") for base in cls.__mro__]  # each of its own fields
    arguments = "\n".join(text.partition("Args:\n")[2].partition("\nReturns:")[0] for text in docs)
    for field in dataclasses.fields(cls):
        assert f"\n    {field.name}: " in f"\n{arguments}", f"{cls.__name__}.{field.name} is not documented"
