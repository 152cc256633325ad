"""Reads the dump of one update step: `.npz` or `.safetensors`, whose settings are JSON. Nothing is unpickled.

    mask              [B, T]   1 where the policy wrote a token
    log_prob          [B, T]   of the policy in this update, nats
    loss_mask         [B, T]   1 where a token is in the loss, if rejections or filters have taken some out of `mask`
    old_log_prob      [B, T]   recomputed before the update, nats; rollout_log_prob: the engine's; reference_log_prob
    entropy           [B, T]   nats
    value             [B, T]   of the critic before the token, reward units
    token             [B, T]   ids, for the report
    reward            [B]      of the answer
    group             [B]      the same whole number for answers to one prompt; rank and micro_batch: where it was
    truncated         [B]      1 where the answer was cut at the limit
    advantage, weight [B] or [B, T]   as they enter the loss; the weight multiplies it
    loss, grad_norm   []       of the whole update, of the parameters
    grad_log_prob     [B, T]   d loss / d log_prob

Only `mask` and `log_prob` are required. `settings` is JSON in a text array (npz) or in the metadata (safetensors).
"""

import io
import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from proxima.config.problems import one_problem
from proxima.data import UserError
from proxima.data.errors import suggestion
from proxima.data.json_reader import load_json
from proxima.data.outcomes import Outcomes
from proxima.data.policy_batch import PolicyBatch
from proxima.system.foreign_folder import ForeignFileError, read_file
from proxima_peers.shadow.shadow_settings import ShadowSettings, resolved_settings

LARGEST_FILE = 1 << 30  # bytes, also of what a compressed file unpacks to
LARGEST_SETTINGS = 1 << 20  # characters
MOST_POSITIONS = 1 << 22  # B times T; some minutes
SETTINGS = "settings"

# name: the dimensions that it may have, and whether it is of whole numbers, of 0 and 1, or of any
ARRAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "mask": (("BT",), "flag"),
    "log_prob": (("BT",), "float"),
    "loss_mask": (("BT",), "flag"),
    "old_log_prob": (("BT",), "float"),
    "rollout_log_prob": (("BT",), "float"),
    "reference_log_prob": (("BT",), "float"),
    "entropy": (("BT",), "float"),
    "value": (("BT",), "float"),
    "token": (("BT",), "int"),
    "reward": (("B",), "float"),
    "group": (("B",), "int"),
    "rank": (("B",), "int"),
    "micro_batch": (("B",), "int"),
    "truncated": (("B",), "flag"),
    "advantage": (("B", "BT"), "float"),
    "weight": (("B", "BT"), "float"),
    "loss": (("",), "float"),
    "grad_norm": (("",), "float"),
    "grad_log_prob": (("BT",), "float"),
}
REQUIRED = ("mask", "log_prob")
OF_TOKENS = tuple(name for name, (dims, kind) in ARRAYS.items() if "BT" in dims and kind == "float")
WORDS = {"": "one number", "B": "one for each answer", "BT": "one for each position"}


@dataclass(frozen=True)
class Dump:
    """One update step. Tensors are float64, int64 or bool; those [B, T] may hold anything outside `mask`.

    Args:
        arrays: by name; see the table above. `advantage` and `weight` are [B, T].
        settings: what the trainer is believed to compute.
        single: the trainer's numbers are rounded to float32 or less.
    """

    arrays: dict[str, Tensor]
    settings: ShadowSettings
    single: bool

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    def get(self, name: str) -> Tensor | None:
        """An array, or None if the dump lacks it."""
        return self.arrays.get(name)

    @property
    def shape(self) -> tuple[int, int]:
        """B and T."""
        rows, width = self["mask"].shape
        return rows, width

    @property
    def loss_mask(self) -> Tensor:
        """[B, T] bool, the tokens in the loss."""
        return self.arrays.get("loss_mask", self["mask"])

    @property
    def rtol(self) -> float:
        """What rounding may change, relative to the magnitudes that were added."""
        return 1e-6 if self.single else 1e-7

    def batch(self, mask: Tensor, log_prob: Tensor, **fields: Tensor) -> PolicyBatch:
        """The rows as a batch in which every position is a token, so that [N] is [B, T] flattened.

        Args:
            mask: [B, T] bool, the loss mask. log_prob: [B, T]. fields: others of `PolicyBatch`, [B, T].
        """
        rows, width = self.shape
        flat = {name: value.reshape(-1) for name, value in fields.items()}
        edges = torch.arange(rows + 1) * width
        return PolicyBatch(log_prob=log_prob.reshape(-1), loss_mask=mask.reshape(-1), cu_seqlens=edges, **flat)

    def outcomes(self) -> Outcomes:
        """Rewards and groups, with the number of loss tokens. The dump must have both."""
        length = self.loss_mask.sum(1)
        base = Outcomes.of(self["reward"], self["group"])
        return Outcomes(reward=base.reward, valid=base.valid, group=base.group, length=length, truncated=base.truncated)


def read_dump(file: str) -> Dump:
    """Read a dump.

    Raises:
        UserError: it can't be read, is damaged or too large, lacks an array, or has one that is unknown or of another
            shape, type or range than it must be; one line that names the file, the array and what it must be.
    """
    path = Path(file)
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise _refused(file, f"is neither {' nor '.join(readers)}; write one of them")
    try:
        content = read_file(path, LARGEST_FILE)
    except OSError as error:
        raise _refused(file, f"can't be read ({error.strerror}); give the file of a dump") from None
    except ForeignFileError as error:
        raise _refused(file, f"is refused: {error}; dump one update step") from None
    arrays, text = readers[path.suffix](file, content)
    settings = resolved_settings(_parsed(file, text), file)
    typed = _typed(file, arrays)
    single = not all(value.dtype == torch.float64 for name, value in arrays.items() if value.is_floating_point())
    dump = Dump(typed, settings, single)
    _check(file, dump)
    return dump


def _refused(file: str, message: str) -> UserError:
    return one_problem(file, message)


def _parsed(file: str, text: str) -> dict[str, Any]:
    if len(text) > LARGEST_SETTINGS:
        raise _refused(file, f"has settings of {len(text):,} characters; at most {LARGEST_SETTINGS:,}")
    try:
        values = load_json(text)
    except ValueError as error:
        raise _refused(file, f"has settings that are not JSON ({error}); write them with json.dumps") from None
    if not isinstance(values, dict):
        raise _refused(file, f"has settings that are a {type(values).__name__}; write an object with json.dumps")
    return values


def _read_npz(file: str, content: bytes) -> tuple[dict[str, Tensor], str]:
    """The arrays of an npz, and its settings. The sizes that its headers claim are checked before they are believed."""
    arrays = {}
    text = "{}"
    left = LARGEST_FILE
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.infolist():
                left -= member.file_size
                if left < 0:
                    raise _refused(file, f"unpacks to more than {LARGEST_FILE:,} bytes; dump fewer rows")
                name = member.filename.removesuffix(".npy")
                value = _array(archive.read(member))
                if name == SETTINGS and value.dtype.kind == "U" and value.ndim == 0:
                    text = str(value)
                elif value.dtype.kind in "fiub":
                    arrays[name] = torch.from_numpy(_native(value))
                else:
                    raise _refused(file, f"{name} is of {value.dtype}; write numbers, and {SETTINGS} as text")
    except UserError:
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise _refused(file, f"is damaged, or no npz file ({why:.120}); write it with numpy.savez") from None
    return arrays, text


def _array(content: bytes) -> numpy.ndarray[Any, Any]:
    """The array of an npy file; ValueError if its header claims more than it has."""
    stream = io.BytesIO(content)
    version = npy.read_magic(stream)
    if version == (1, 0):
        header = npy.read_array_header_1_0
    else:
        header = npy.read_array_header_2_0
    shape, _, dtype = header(stream)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise ValueError("the header of an array does not fit its content")
    stream.seek(0)
    value: numpy.ndarray[Any, Any] = npy.read_array(stream, allow_pickle=False)
    return value


def _native(value: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The array in this machine's byte order and a type that torch has."""
    kind = value.dtype.kind
    if kind == "f":
        if value.dtype.itemsize <= 8:
            target = value.dtype.newbyteorder("=")
        else:
            target = numpy.dtype("float64")
        return numpy.ascontiguousarray(value, dtype=target)
    dtype = "bool" if kind == "b" else "int64"
    return numpy.ascontiguousarray(value, dtype=dtype)


def _read_safetensors(file: str, content: bytes) -> tuple[dict[str, Tensor], str]:
    try:
        length = int.from_bytes(content[:8], "little")
        header = load_json(content[8 : 8 + length].decode())
        arrays = load_safetensors(content)
        text = (header.get("__metadata__") or {}).get(SETTINGS, "{}")
    except (SafetensorError, ValueError, AttributeError, KeyError, TypeError, OverflowError) as error:
        why = " ".join(str(error).split())
        raise _refused(file, f"is damaged, or no safetensors file ({why:.120}); write it with save_file") from None
    for name, value in arrays.items():
        if value.is_complex() or value.element_size() < 1 or value.dtype.itemsize > 8:
            raise _refused(file, f"{name} is of {value.dtype}; write float32 or float64")
    return arrays, str(text)


def _typed(file: str, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays in the types of `Dump`, their names and shapes checked."""
    for name in arrays:
        if name not in ARRAYS:
            raise _refused(file, f"{name} is no array of a dump; {suggestion(name, ARRAYS)}")
    for name in REQUIRED:
        if name not in arrays:
            raise _refused(file, f"{name} is missing; a dump needs {' and '.join(REQUIRED)}")
    mask = arrays["mask"]
    if mask.dim() != 2 or not 0 < mask.numel() <= MOST_POSITIONS:
        raise _refused(
            file, f"mask has shape {list(mask.shape)}; it must be [B, T] of 1 to {MOST_POSITIONS:,} positions"
        )
    sizes = {"": (), "B": (len(mask),), "BT": tuple(mask.shape)}
    typed = {}
    for name, value in arrays.items():
        dims, kind = ARRAYS[name]
        if kind != "float" and value.is_floating_point() and not bool((value == value.round()).all()):
            raise _refused(file, f"{name} has values that are not whole numbers; write whole numbers")
        shape = tuple(value.shape)
        if dims == ("",) and value.numel() == 1:
            value = value.reshape(())
        elif shape == (len(mask), 1) and "B" in dims:
            value = value[:, 0]
        elif shape not in [sizes[dim] for dim in dims]:
            wanted = " or ".join(f"{list(sizes[dim])}, {WORDS[dim]}" for dim in dims)
            raise _refused(file, f"{name} has shape {list(shape)}; it must be {wanted}")
        if kind == "flag":
            if bool(((value != 0) & (value != 1)).any()):
                raise _refused(file, f"{name} has values other than 0 and 1; write a mask")
            value = value != 0
        else:
            value = value.double() if kind == "float" else value.long()
        if dims == ("B", "BT") and value.dim() == 1:
            value = value[:, None].expand(sizes["BT"]).contiguous()
        typed[name] = value
    return typed


def _check(file: str, dump: Dump) -> None:
    """Refuse a dump without a loss token, with a token in the loss that no answer has, or with values that no trainer
    computes from."""
    mask = dump.loss_mask
    if not bool(mask.any()):
        raise _refused(file, "no token is in the loss; dump a step that has some")
    if bool((mask & ~dump["mask"]).any()):
        row, at = (mask & ~dump["mask"]).nonzero()[0].tolist()
        raise _refused(file, f"loss_mask has row {row}, position {at}, which mask has not; mask is the larger one")
    centre = dump.settings.centre
    if centre in ("old", "rollout") and f"{centre}_log_prob" not in dump:
        raise _refused(file, f"has centre={centre} in its settings, and no {centre}_log_prob; dump it")
    for name in OF_TOKENS:
        if name not in dump:
            continue
        wrong = mask & ~dump[name].isfinite()
        if bool(wrong.any()):
            row, at = wrong.nonzero()[0].tolist()
            raise _refused(file, f"{name} is {float(dump[name][row, at])} in the loss, at row {row}, position {at}")
    for name in ("reward", "loss", "grad_norm"):
        if name in dump and not bool(dump[name].isfinite().all()):
            raise _refused(file, f"{name} is not finite; there is nothing to explain")
