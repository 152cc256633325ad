"""The images of a run: each is kept once, by its content, and becomes tokens and pixels through the model's own
processor."""

import base64
import io
import re
import shutil
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from proxima.data import UserError, require
from proxima.data.columns import Ints
from proxima.data.flow import IMAGE_PLACEHOLDER, Message
from proxima.data.image_tokens import IMAGES, PATCHES, PROBE, image_and_patch
from proxima.model.architecture import SHOWN_IMAGES
from proxima.model.chat.encode import encode_part, image_mark
from proxima.model.images.image_folder import INDEX, checksum, image_name, read_image, read_names, write_names
from proxima.model.pretrained import load_config, load_tokenizer, read_pretrained

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSED = 1 << 28  # most bytes of pixels that are kept


class ImageStore:
    """The images that prompts show to a model, by number.

    Numbers are given in the order in which images are first seen. Images are in memory alone until `keep_in`, and later
    until `write`.

    Args:
        model: whose processor is used.
        folder: images of an earlier attempt at the run; None, or a folder that does not exist: there are none.

    Raises:
        FieldError: the architecture is not among `SHOWN_IMAGES`.
    """

    def __init__(self, model: str, revision: str | None = None, folder: Path | None = None) -> None:
        self.model = model
        self.revision = revision
        self.folder = folder
        self.config: Any = load_config(model, revision)
        kind = str(self.config.model_type)
        bound = f"is a {kind}, which can't be shown images: {', '.join(sorted(SHOWN_IMAGES))} can"
        require(kind in SHOWN_IMAGES, "model.path", model, bound)
        self.tiled = kind in ("idefics3", "smolvlm")
        self.joined = kind == "gemma3"  # the patches of an image attend to each other
        self.plain = load_tokenizer(model, revision)
        name_of: Any = self.plain.convert_ids_to_tokens
        self.token = str(name_of(self.config.image_token_id))
        # what a template writes for an image, its end, and what stands before and behind it
        self.placeholder = self.token
        self.closing = ""
        self.lines = ""
        if kind == "gemma3":
            self.placeholder = str(name_of(self.config.boi_token_index))
            self.lines = "\n\n"
            self.closing = str(name_of(self.config.eoi_token_index))
        self._lock = Lock()  # prompts and environments may add at once
        self._unwritten: dict[str, bytes] = {}
        self._keeps = self._follows = False
        self._grids: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}
        self._tokens: dict[int, Ints] = {}
        self._processed: dict[int, tuple[str, dict[str, Tensor]]] = {}
        self._bytes = 0  # of these
        self._read_index()

    @cached_property
    def tokenizer(self) -> "ImageTokenizer":
        """The model's, for chats that show these images."""
        return ImageTokenizer(self.plain, self)

    @cached_property
    def processor(self) -> Any:
        """Makes pixels of an image; without torchvision, whose resizing differs in the last bits."""
        from transformers import AutoImageProcessor

        problem = "has no usable image processor"
        return read_pretrained(AutoImageProcessor, self.model, self.revision, problem, backend="pil")

    def add(self, image: "Image") -> int:
        """The number of an RGB image."""
        name = image_name(image)
        with self._lock:
            kept = self.folder is not None and (self.folder / f"{name}.png").is_file()
            if name in self._numbers and (name in self._unwritten or kept):
                return self._numbers[name]
        content = io.BytesIO()
        image.save(content, "PNG")  # takes a second, while others may add
        with self._lock:
            if name not in self._numbers:
                if len(self._names) == IMAGES:
                    raise UserError(f"a run shows at most {IMAGES:,} images", remedy="take fewer rows")
                self._numbers[name] = len(self._names)
                self._names.append(name)
            self._unwritten[name] = content.getvalue()
            return self._numbers[name]

    def keep_in(self, folder: Path) -> None:
        """Write the images to a folder, now and at each `write`; those of another run, which is replayed, are
        copied."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder != folder:
            for name in self._names:
                earlier = self.folder and self.folder / f"{name}.png"
                if earlier and earlier.exists() and not (folder / f"{name}.png").exists():
                    shutil.copyfile(earlier, folder / f"{name}.part").replace(folder / f"{name}.png")
            self._indexed = 0
            self._crc = 0
        (folder / INDEX).touch()
        self.folder = folder
        self._keeps = True
        self.write()

    def follow(self, folder: Path) -> None:
        """Forget all numbers, and read those that another process writes into a folder."""
        self.folder = folder
        self._follows = True
        for kept in (self._unwritten, self._grids, self._texts, self._tokens, self._processed):
            kept.clear()
        self._bytes = 0
        self._read_index()

    def _read_index(self) -> None:
        self._names = [] if self.folder is None else read_names(self.folder)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._indexed = len(self._names)
        self._crc = checksum(self._names)

    def shared_folder(self) -> Path:
        """The folder that another process may `follow`; a temporary one if they were in memory alone."""
        if not self._keeps:
            self._temporary = TemporaryDirectory(prefix="proxima-images-")
            self.keep_in(Path(self._temporary.name))
        assert self.folder is not None
        return self.folder

    def write(self) -> None:
        """Write the images that are new. Their names follow, and are on the disk before this returns."""
        with self._lock:
            if not self._keeps or (not self._unwritten and self._indexed == len(self._names)):
                return
            assert self.folder is not None
            for name, content in self._unwritten.items():
                part = self.folder / f"{name}.part"
                part.write_bytes(content)
                part.replace(self.folder / f"{name}.png")
            crc = checksum(self._names[self._indexed :], self._crc)
            write_names(self.folder, self._names, self._indexed, crc)
            self._indexed = len(self._names)
            self._crc = crc
            self._unwritten.clear()

    def image(self, number: int) -> "Image":
        """The RGB image of this number; raises as `content`."""
        return self._read(number)[1]

    def content(self, number: int) -> bytes:
        """The file of an image.

        Raises:
            UserError: it is gone or damaged, or shows another image.
        """
        return self._read(number)[0]

    def _read(self, number: int) -> tuple[bytes, "Image"]:
        from PIL import Image

        content: bytes | None
        if number == PROBE:
            content = _drawn()
        else:
            name = self.name(number)
            content = self._unwritten.get(name)
        if content is None:
            assert self.folder is not None
            return read_image(self.folder, name)
        return content, Image.open(io.BytesIO(content)).convert("RGB")

    def name(self, number: int) -> str:
        """The SHA-256 of an image: its file is NAME.png."""
        if number >= len(self._names) and self._follows:
            self._read_index()
        if not 0 <= number < len(self._names):
            raise UserError(f"image {number} is not among the {len(self._names)} of this run")
        return self._names[number]

    def processed(self, number: int) -> tuple[str, dict[str, Tensor]]:
        """The text that stands for an image in a prompt, and its pixels as `get_image_features` takes them: made once,
        as long as `PROCESSED` suffices."""
        kept = self._processed.get(number)
        if kept is None:
            kept = self._process(number)
            with self._lock:
                if number not in self._processed:
                    self._bytes += _size(kept)
                self._processed[number] = kept
                while self._bytes > PROCESSED and len(self._processed) > 1:
                    oldest = next(iter(self._processed))
                    self._bytes -= _size(self._processed.pop(oldest))
        return kept

    def _process(self, number: int) -> tuple[str, dict[str, Tensor]]:
        tiled = {"return_row_col_info": True} if self.tiled else {}
        image = self.image(number)
        try:
            pixels: dict[str, Any] = dict(self.processor(images=[image], return_tensors="pt", **tiled))
        except ValueError as error:  # Qwen's refuses what is 200 times as long as it is wide
            raise UserError(f"an image of {image.width} x {image.height} can't be shown: {error}") from error
        vision = self.config.vision_config
        if self.placeholder != self.token:
            shown = self.placeholder + self.token * int(self.config.mm_tokens_per_image) + self.closing
            return self.lines + shown + self.lines, {"pixel_values": pixels["pixel_values"]}
        if not self.tiled:
            self._grids[number] = pixels["image_grid_thw"][0].tolist()
            patches = int(pixels["image_grid_thw"].prod())
            return self.token * (patches // vision.spatial_merge_size**2), pixels
        rows = pixels.pop("rows")[0]
        columns = pixels.pop("cols")[0]
        patches = (vision.image_size // vision.patch_size) ** 2
        own = self.token * int(patches / self.config.scale_factor**2)
        return _tiles(int(np.max(rows)), int(np.max(columns)), own), pixels

    def grid(self, number: int) -> list[int]:
        """Time, rows and columns of an image's patches, of a model of three axes."""
        if number not in self._grids:  # known since the prompt was made, but in a run that was resumed
            self.processed(number)
        return self._grids[number]

    def text(self, number: int, mark: str) -> str:
        """What stands for an image in the text of a chat: its tokens as `NUMBER COUNT FIRST` between marks, wherever
        they follow each other, and the texts that the processor puts around and between them.

        Raises:
            UserError: it has more than `PATCHES` tokens.
        """
        if number not in self._texts:
            text, _ = self.processed(number)
            count = text.count(self.token)
            if count > PATCHES:
                width, height = self.image(number).size
                remedy = "show smaller images, or lower the processor's largest size in the model's folder"
                raise UserError(f"an image of {width} x {height} has {count} tokens, at most {PATCHES}", remedy=remedy)
            runs = re.split(f"((?:{re.escape(self.token)})+)", text)
            lengths = [run.count(self.token) for run in runs]
            firsts = [0, *accumulate(lengths)]
            pieces = []
            for run, length, first in zip(runs, lengths, firsts, strict=False):
                if length:
                    run = f"{mark}{number} {length} {first}{mark}"
                pieces.append(run)
            self._texts[number] = "".join(pieces)
        return self._texts[number]

    def numbered(self, messages: Sequence[Message], images: Sequence["Image"]) -> tuple[Message, ...]:
        """A chat in which each message has the numbers of the images that its placeholders stand for, as `images`; if
        no message has a placeholder, they stand before the text of the last message of the user.

        Raises:
            UserError: there is another number of marks than of images.
        """
        out = list[Message]()
        left = [self.add(image) for image in images]
        for message in _marked(messages, len(images)):
            count = _marks(message)
            if count:
                message = {**message, "images": left[:count]}
            out.append(message)
            left = left[count:]
        return tuple(out)

    def folded(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens with what a template writes in place of each image, for a server that expands it again, and the
        numbers of these images.

        Raises:
            UserError: the tokens of an image and those around it are not found as they were made.
        """
        out = list[int]()
        numbers = list[int]()
        at = 0
        placeholder: Any = self.plain.convert_tokens_to_ids(self.placeholder)
        while at < len(tokens):
            if tokens[at] >= 0:
                out.append(int(tokens[at]))
                at += 1
                continue
            number = int(image_and_patch(tokens[at])[0])
            own = self._between(number)
            before = next(place for place, token in enumerate(own) if token < 0)
            rest = list(map(int, tokens[at - before + len(own) :]))
            try:
                if list(tokens[at - before : at - before + len(own)]) != own:
                    raise ValueError
                out = self._without(out[: len(out) - before], self.lines, first=False)
                rest = self._without(rest, self.lines, first=True)
            except ValueError:
                reason = "are not those that the processor makes alone"
                raise UserError(f"the tokens around image {number} {reason}") from None
            out.append(placeholder)
            numbers.append(number)
            tokens = rest
            at = 0
        if out.count(placeholder) != len(numbers):
            raise UserError(f"the model wrote {self.placeholder}, which a server would take for an image")
        return out, numbers

    def _between(self, number: int) -> list[int]:
        """What stands for an image in a prompt, as tokens, but for the line ends around it."""
        own: list[int] = self.tokens(number).tolist()
        if not self.lines:
            return own
        id_of: Any = self.plain.convert_tokens_to_ids
        first = own.index(id_of(self.placeholder))
        last = own.index(id_of(self.closing))
        return own[first : last + 1]

    def _without(self, tokens: list[int], text: str, *, first: bool) -> list[int]:
        """The tokens without a text with which they begin, or end; its tokens may have been joined with others.

        Raises:
            ValueError: they have no such text there.
        """
        while text:
            at = 0 if first else len(tokens) - 1
            own = str(self.plain.decode(tokens[at : at + 1]))
            short, long = sorted((own, text), key=len)
            agrees = long.startswith(short) if first else long.endswith(short)
            if not short or not agrees:
                raise ValueError
            left = long[len(short) :] if first else long[: -len(short)]
            kept = []
            if len(own) > len(text):
                kept = self.plain(left, add_special_tokens=False)["input_ids"]
            tokens = [*kept, *tokens[1:]] if first else [*tokens[:at], *kept]
            text = left if len(own) < len(text) else ""
        return tokens

    def tokens(self, number: int) -> Ints:
        """What stands for an image in a prompt, as tokens."""
        if number not in self._tokens:
            text = self.text(number, image_mark(self.tokenizer))
            self._tokens[number] = np.array(encode_part(text, self.tokenizer), np.int32)
        return self._tokens[number]

    def address(self, number: int) -> str:
        """The file of an image as an address that holds it."""
        return f"data:image/png;base64,{base64.b64encode(self.content(number)).decode()}"


class ImageTokenizer:
    """A tokenizer whose chats show images of a store; otherwise as it was."""

    def __init__(self, plain: Any, images: ImageStore) -> None:
        self.plain = plain
        self.images = images

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def __call__(self, *text: Any, **options: Any) -> Any:
        return self.plain(*text, **options)

    def __len__(self) -> int:
        return len(self.plain)


def _size(processed: tuple[str, dict[str, Tensor]]) -> int:
    return sum(pixels.nbytes for pixels in processed[1].values())


def _drawn() -> bytes:
    """The file of an image of waves, which cross in all colours."""
    from PIL import Image

    row, column, colour = np.mgrid[:64, :96, :3]
    waves = np.sin(row / (3 + 2 * colour)) + np.sin(column / (7 - 2 * colour))
    out = io.BytesIO()
    Image.fromarray((127.5 + 63 * waves).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def _tiles(rows: int, columns: int, own: str) -> str:
    """The text for an image of Idefics3 and SmolVLM: its tiles row by row, if it was cut, then the whole."""
    edge = "<fake_token_around_image>"
    lines = [
        "".join(f"{edge}<row_{row}_col_{column}>{own}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    if lines:
        lines.append("\n")
    return "".join(lines) + f"{edge}<global-img>{own}{edge}"


def _marks(message: Message) -> int:
    """The images that a message shows; what the system or the model writes is text."""
    if message["role"] not in ("user", "tool"):
        return 0
    content: str = message["content"]
    return content.count(IMAGE_PLACEHOLDER)


def _marked(messages: Sequence[Message], images: int) -> Sequence[Message]:
    """The messages with as many marks as there are images."""
    marks = sum(map(_marks, messages))
    if marks == 0:
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
        shown = {**messages[last], "content": IMAGE_PLACEHOLDER * images + messages[last]["content"]}
        return [*messages[:last], shown, *messages[last + 1 :]]
    if marks != images:
        remedy = f"write {IMAGE_PLACEHOLDER} once for each image, or nowhere: then they stand before the question"
        raise UserError(
            f"there are {images} images, and {IMAGE_PLACEHOLDER} stands {marks} times in the messages", remedy=remedy
        )
    return messages
