"""Generated images: how many squares are there?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from proxima.data import require
from proxima.data.random import mix
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, user_message

if TYPE_CHECKING:
    from PIL.Image import Image

CELL = 8  # pixels of a cell, which a square does not fill


@dataclass(frozen=True, kw_only=True)
class Shapes(PlayedTask):
    """Distinct images of `side` x `side` cells of 8 pixels, 1 to `most` of which hold a square of any colour.

    Args:
        most: most squares; 1 to 9.
        side: cells of a row.
        size: number of images.
        split: `train` or `test`, which draw unlike images.
        shuffled: each question is shown the image of another one: a control, in which nothing can be learned but how
            often each number is right.
        template: the question.
    Returns: rows whose answer is the number of squares as text.
    """

    images: ClassVar[bool] = True

    most: int = 4
    side: int = 4
    size: int = 1000
    split: Literal["train", "test"] = "train"
    shuffled: bool = False
    template: str = "How many?"

    def __post_init__(self) -> None:
        require(2 <= self.side <= 16, "side", self.side, "must be in 2 … 16")
        require(1 <= self.most <= min(9, self.side**2), "most", self.most, "must be in 1 … 9, and in the cells")
        require(self.size >= 1, "size", self.size, "must be >= 1")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")

    def rows(self, seed: int) -> Rows:
        """Return the questions; the seed draws the images."""
        return MappedRows(range(self.size), lambda number, _: self._row(seed, number))

    def _row(self, seed: int, number: int) -> Row:
        shown = (number + 1) % self.size if self.shuffled else number
        key = mix(seed, int(self.split == "test"))
        count, _ = self._drawn(key, number)
        return Row(messages=user_message(self.template), answer=str(count), images=(self._image(key, shown),))

    def _drawn(self, key: int, number: int) -> tuple[int, list[int]]:
        """The number of squares, and their cells."""
        cells = sorted(range(self.side**2), key=lambda cell: mix(key, number, cell))
        count = 1 + mix(key, number, -1) % self.most
        return count, cells[:count]

    def _image(self, key: int, number: int) -> "Image":
        from PIL import Image, ImageDraw

        image: Image.Image = Image.new("RGB", (self.side * CELL, self.side * CELL), "black")
        draw = ImageDraw.Draw(image)
        for cell in self._drawn(key, number)[1]:
            draws = [mix(key, number, cell, part) for part in range(6)]
            row, column = divmod(cell, self.side)
            left, top, size = column * CELL + draws[0] % 3, row * CELL + draws[1] % 3, 4 + draws[2] % 2
            colour = tuple(100 + draw % 156 for draw in draws[3:])
            draw.rectangle((left, top, left + size, top + size), fill=colour)
        return image
