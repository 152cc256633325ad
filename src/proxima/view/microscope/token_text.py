"""Token ids as text, by the tokenizer of the run's model; needs only its tokenizer.json, no model."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from proxima.data.image_tokens import patch_text

BROKEN = "\N{REPLACEMENT CHARACTER}"  # the text of a token that is part of a character


class TokenText:
    """Decodes ids one by one.

    Args:
        file: tokenizer.json; None: not available here, so that a token is shown as its id.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file

    @classmethod
    def of_run(cls, folder: Path, model: str) -> "TokenText":
        """Load the tokenizer from the model's folder, from a checkpoint of the run, or from the hub's cache."""
        places = [Path(model), *sorted((folder / "checkpoints").glob("*/model"), reverse=True)]
        path = next((file for place in places if (file := place / "tokenizer.json").is_file()), None)
        return cls(path if path is not None or not model else _cached(model))

    @cached_property
    def _tokenizer(self) -> Any:
        if self.file is None:
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(self.file))
        except Exception:  # tokenizers' own class, for an unreadable file
            return None

    def each(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. A character made of several tokens is the text of the last one; the others
        have an empty text."""
        if self._tokenizer is None:
            return [f"⟨{token}⟩" for token in ids]
        shown = {at: patch_text(token) for at, token in enumerate(ids) if token < 0}
        ids = [max(token, 0) for token in ids]
        texts = self._tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        for at, token in enumerate(ids):
            if not texts[at] or (piece := texts[at])[0].isspace():
                continue
            if piece[0] != BROKEN and (self._tokenizer.id_to_token(token) or "").startswith("▁"):
                texts[at] = f" {piece}"  # decoders of such tokens drop the leading space
        return [shown.get(at, text) for at, text in enumerate(self._joined(ids, texts))]

    def _joined(self, ids: list[int], texts: list[str]) -> list[str]:
        """Join the parts that together make whole characters."""
        at = 0
        while at < len(ids):
            if BROKEN in texts[at]:
                for end in range(at + 2, min(at + 5, len(ids) + 1)):
                    if BROKEN not in (whole := self._tokenizer.decode(ids[at:end], skip_special_tokens=False)):
                        texts[at:end] = [*([""] * (end - at - 1)), whole]
                        at = end - 1
                        break
            at += 1
        return texts


def _cached(model: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model, "tokenizer.json")
    except Exception:  # not a model name of the hub
        return None
    return Path(file) if isinstance(file, str) else None
