"""Readers' notes on a run, stored in a file next to its folder, so that nothing in the folder changes."""

from pathlib import Path

from proxima.data import UserError, require
from proxima.data.json_reader import load_json
from proxima.system.atomic_files import write_atomic
from proxima.system.jsonl import json_text, utf8

MOST, KEY_LENGTH, TEXT_LENGTH = 5000, 200, 10_000


def notes_file(folder: Path) -> Path:
    """`<run folder>.notes.json`."""
    place = folder.resolve()
    return place.with_name(f"{place.name}.notes.json")


def read_notes(folder: Path) -> dict[str, str]:
    """Return key → text. Raises: UserError if the file is damaged."""
    file = notes_file(folder)
    try:
        notes = load_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file.name} can't be read ({error}); restore it, or move it away") from error
    return {str(key): str(text) for key, text in notes.items()} if isinstance(notes, dict) else {}


def write_note(folder: Path, key: str, text: str) -> dict[str, str]:
    """Write a note, or delete it if the text is empty, and return the updated notes. The server calls it from one
    thread.

    Raises:
        UserError: the key or the text is too long, there are too many, or the file is damaged.
        OSError: the disk is full or read-only.
    """
    require(0 < len(key) <= KEY_LENGTH, "key", key, f"must have 1 to {KEY_LENGTH} characters")
    require(len(text) <= TEXT_LENGTH, "text", len(text), f"must have at most {TEXT_LENGTH} characters")
    notes = read_notes(folder) | {utf8(key): utf8(text)}
    notes = {name: value for name, value in notes.items() if value}
    require(len(notes) <= MOST, "notes", len(notes), f"must be at most {MOST}")
    write_atomic(notes_file(folder), json_text(notes))
    return notes
