"""Images among token ids: the id of an image's token is negative, and encodes the image's number and the patch.

    token = -1 - (number * PATCHES + patch)

So code that compares or shares tokens, from the packed batch to the engine's cache, tells images apart without special
cases; only the embedding looks an image up.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data.columns import Ints

PATCHES = 1 << 12  # most tokens of an image
PROBE = (1 << 31) // PATCHES - 1  # number of an image that is drawn, for those who compare engines
IMAGES = PROBE  # most images of a run


def image_tokens(number: int, count: int, first: int = 0) -> Ints:
    """[count] int32, the tokens of an image, from its patch `first` on."""
    return (-1 - (number * PATCHES + first + np.arange(count))).astype(np.int32)


def image_and_patch(tokens: Any) -> tuple[Any, Any]:
    """The image and patch numbers of negative tokens, an array or an integer."""
    image, patch = divmod(-1 - tokens, PATCHES)
    return image, patch


def shown_images(tokens: Any) -> list[int]:
    """The distinct numbers of the images among the tokens, in order of appearance."""
    ids = np.asarray(tokens, np.int64)
    return list(dict.fromkeys(image_and_patch(ids[ids < 0])[0].tolist()))


def image_starts(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    """[T] for a token of an image, the position of the image's first token, if its tokens are contiguous; -1 for
    text."""
    _, patch = image_and_patch(tokens)
    return np.where(tokens < 0, np.arange(len(tokens)) - patch, -1)


def outside_image(tokens: Ints, at: int) -> int:
    """Return the position `at`, moved back to the start of an image if it is inside one."""
    if at >= len(tokens) or tokens[at] >= 0:
        return at
    return max(0, int(image_starts(tokens[: at + 1])[at]))


def patch_text(token: int) -> str:
    """The text that shows an image's token: `⟨image 3⟩` for the first patch, empty for the others."""
    image, patch = image_and_patch(token)
    if patch > 0:
        return ""
    return f"⟨image {image}⟩"
