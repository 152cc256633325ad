"""Images among token ids: a token of an image is below zero and says which image, and which of its patches, it is.

    token = -1 - (number * PATCHES + patch)

So whatever compares or shares tokens, from the packed batch to the engine's cache, tells images apart without knowing
of them; only the embedding looks one up.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data.columns import Ints

PATCHES = 1 << 12  # most tokens of an image
PROBE = (1 << 31) // PATCHES - 1  # number of an image that is drawn, for those who compare engines
IMAGES = PROBE  # most images of a run


def image_tokens(number: int, count: int, first: int = 0) -> Ints:
    """[count] the tokens of an image, from its patch `first` on."""
    return (-1 - (number * PATCHES + first + np.arange(count))).astype(np.int32)


def image_and_patch(tokens: Any) -> tuple[Any, Any]:
    """The numbers of the images and of the patches of tokens below zero, arrays or integers."""
    image, patch = divmod(-1 - tokens, PATCHES)
    return image, patch


def shown_images(tokens: Any) -> list[int]:
    """The numbers of the images that tokens show, in order, each once."""
    ids = np.asarray(tokens, np.int64)
    return list(dict.fromkeys(image_and_patch(ids[ids < 0])[0].tolist()))


def image_starts(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    """[T] for a token of an image the place of the image's first one, if its tokens follow each other; -1 for text."""
    _, patch = image_and_patch(tokens)
    return np.where(tokens < 0, np.arange(len(tokens)) - patch, -1)


def outside_image(tokens: Ints, at: int) -> int:
    """A place among tokens, or the beginning of the image that it is inside of."""
    return at if at >= len(tokens) or tokens[at] >= 0 else max(0, int(image_starts(tokens[: at + 1])[at]))


def patch_text(token: int) -> str:
    """A token of an image as text: the first says which one, the others are empty."""
    image, patch = image_and_patch(token)
    return f"⟨image {image}⟩" if patch == 0 else ""
