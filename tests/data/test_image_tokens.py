"""Images among tokens: where each begins, and places that are not inside one."""

import numpy as np
import pytest

from proxima.data.image_tokens import (
    image_and_patch,
    image_starts,
    image_tokens,
    outside_image,
    patch_text,
    shown_images,
)


def row(*parts):
    return np.concatenate([np.atleast_1d(np.asarray(part, np.int32)) for part in parts])


TOKENS = row(5, image_tokens(2, 3), 0, image_tokens(0, 2), image_tokens(1, 1), 9)


def test_an_image_s_tokens_know_its_number_and_their_patches():
    image, patch = image_and_patch(TOKENS[[1, 2, 3, 5, 6, 7]])
    assert (image.tolist(), patch.tolist()) == ([2, 2, 2, 0, 0, 1], [0, 1, 2, 0, 1, 0])
    assert shown_images(row(TOKENS, image_tokens(2, 1))) == [2, 0, 1]


def test_the_first_token_of_an_image_says_which_it_is():
    assert [patch_text(int(token)) for token in image_tokens(3, 3)] == ["⟨image 3⟩", "", ""]


def test_each_token_of_an_image_points_to_the_first_and_text_to_none():
    assert image_starts(TOKENS).tolist() == [-1, 1, 1, 1, -1, 5, 5, 7, -1]


@pytest.mark.parametrize(
    ("at", "place"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 4), (5, 5), (6, 5), (7, 7), (8, 8), (9, 9), (12, 12)]
)
def test_a_place_inside_an_image_becomes_its_beginning_and_any_other_stays(at, place):
    assert outside_image(TOKENS, at) == place  # the token at 4 has the id 0


def test_an_image_whose_beginning_is_cut_off_begins_at_the_first_token():
    cut = row(image_tokens(3, 2, first=2), 7)
    assert [outside_image(cut, at) for at in range(3)] == [0, 0, 2]
