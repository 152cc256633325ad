"""Generated images: the answer is what is drawn, and the control shows another image."""

import numpy as np
import pytest

from proxima.data import FieldError
from proxima.task.generated import CELL, Shapes


def cells(row):
    """How many cells have a square."""
    image = np.asarray(row.images[0]).max(2)
    side = len(image) // CELL
    return int((image.reshape(side, CELL, side, CELL).max((1, 3)) > 0).sum())


def test_the_answer_is_the_number_of_squares():
    rows = Shapes(size=50, most=6).rows(1)
    assert [int(rows[i].answer) for i in range(50)] == [cells(rows[i]) for i in range(50)]
    assert {rows[i].answer for i in range(50)} == set("123456")


def test_the_control_has_the_same_answers_and_other_images():
    rows, control = Shapes(size=50).rows(1), Shapes(size=50, shuffled=True).rows(1)
    assert [row.answer for row in map(rows.__getitem__, range(50))] == [control[i].answer for i in range(50)]
    assert all(control[i].images[0].tobytes() == rows[(i + 1) % 50].images[0].tobytes() for i in range(50))


def test_images_are_of_seed_and_split():
    images = [Shapes(split=split).rows(seed)[0].images[0].tobytes() for split in ("train", "test") for seed in (1, 2)]
    assert len(set(images)) == 4
    assert Shapes().rows(1)[0].images[0].tobytes() == images[0]


@pytest.mark.parametrize(("field", "value"), [("side", 1), ("most", 10), ("most", 0), ("size", 0), ("split", "dev")])
def test_wrong_fields_are_named(field, value):
    with pytest.raises(FieldError, match=field):
        Shapes(**{field: value})
