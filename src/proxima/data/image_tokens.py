"""Images among token ids: a token of an image is below zero and says which image, and which of its patches, it is.

    token = -1 - (number * PATCHES + patch)

So whatever compares or shares tokens, from the packed batch to the engine's cache, tells images apart without knowing
of them; only the embedding looks one up.
"""

from typing import Any

import numpy as np

from proxima.data.columns import Ints

MARK = "<image>"  # in a message: here an image is shown
PATCHES = 1 << 12  # most tokens of an image
IMAGES = (1 << 31) // PATCHES  # most images of a run


def image_tokens(number: int, count: int) -> Ints:
    """[count] the tokens of an image."""
    return (-1 - (number * PATCHES + np.arange(count))).astype(np.int32)


def image_and_patch(tokens: Any) -> tuple[Any, Any]:
    """The numbers of the images and of the patches of tokens below zero, arrays or integers."""
    image, patch = divmod(-1 - tokens, PATCHES)
    return image, patch
