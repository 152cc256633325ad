"""Explains why Hugging Face can't read a model."""

from proxima.data import FieldError


def unreadable_model(path: str, what: str, error: Exception) -> FieldError:
    """The error for a model that Hugging Face can't read; a model's own code is never run."""
    if "trust_remote_code" in str(error):
        remedy = "use a model whose architecture is in transformers"
        return FieldError("model.path", path, "needs custom Python code, which proxima does not run", remedy=remedy)
    return FieldError("model.path", path, f"{what}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
