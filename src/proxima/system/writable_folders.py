"""Whether a folder that a recipe names can be written to, before a run begins."""

from pathlib import Path
from tempfile import TemporaryDirectory

from proxima.data.errors import FieldError


def check_writable(field: str, value: str, remedy: str) -> None:
    """Raise FieldError if the folder that a field names, or a file in it, can't be made. Only a folder that exists is
    written to, because other processes may make the same one at this moment. Leaves nothing behind."""
    try:
        folder = Path(value).expanduser().absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        TemporaryDirectory(dir=there).cleanup()
        for name in folder.relative_to(there).parts:  # a name too long is told only where the folder above it exists
            (there / name).exists()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte; a user who does not exist
        reason = f"can't be written: {getattr(error, 'strerror', None) or error}"
        raise FieldError(field, value, reason, remedy=remedy) from error
