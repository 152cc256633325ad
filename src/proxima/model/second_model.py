"""Reads a model that computes on the tokens of the policy: a teacher, a critic."""

from proxima.data import FieldError, renamed
from proxima.model.pretrained import UnloadedModel


def read_beside(policy: UnloadedModel, path: str, revision: str | None, field: str, remedy: str) -> UnloadedModel:
    """Read such a model, before its weights are loaded; `field` is that of its path.

    Raises:
        FieldError: it can't be read, or its token ids have a different meaning.
    """
    with renamed("model.path", field):
        other = UnloadedModel.read(path, revision)
    if problem := _vocabulary_problem(policy.tokenizer.get_vocab(), other.tokenizer.get_vocab()):
        raise FieldError(field, path, problem, remedy=remedy)
    return other


def _vocabulary_problem(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """Describe how another model's vocabulary differs from the policy's; None if every token has the same id in
    both."""
    different = [token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)]
    if not different:
        return None
    token = min(different, key=lambda token: (min(ours.get(token, 1 << 40), theirs.get(token, 1 << 40)), token))
    there, here = (f"id {ids[token]}" if token in ids else "missing" for ids in (theirs, ours))
    return f"has another vocabulary: {token!r} is {there} there and {here} in model.path ({len(different):,} differ)"
