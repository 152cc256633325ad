"""Loads a model so that every rank reads its own slices of the weights, and no rank ever holds all of them; each weight
is located in the files, also one that transformers stacks from a tensor per expert.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from proxima.data.json_reader import load_json
from proxima.model.parallel.mesh import rank_device
from proxima.model.parallel.shard import shard_model
from proxima.model.parallel.sharding import Sharding, fill_weight, local_part, own_slice
from proxima.model.pretrained import (
    LoadedModel,
    load_config,
    load_generation_config,
    load_tokenizer,
    refuse_not_finite,
    unreadable_model,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class FilePiece:
    """A tensor of a file: a whole weight, or with `place` = (i, j, n) part j of n equal parts of the rows of expert i
    in a weight [experts, rows, …]."""

    name: str
    file: Path
    place: tuple[int, int, int] | None = None

    def among(self, whole: Tensor) -> int:
        """The number of pieces of a weight."""
        if self.place is None:
            return 1
        return self.place[2] * len(whole)

    def fits(self, whole: Tensor, shape: list[int]) -> bool:
        """True if a tensor of this shape can be this piece of a weight."""
        if self.place is None:
            return shape == list(whole.shape)
        expert, _, parts = self.place
        rows, *rest = shape
        return expert < len(whole) and [parts * rows, *rest] == list(whole.shape[1:])

    def fill(self, weight: Tensor, piece: Any) -> None:
        """Copy `piece`, a tensor or a slice of a safetensors file, to its place in a weight, plain or sharded."""
        if self.place is None:
            return fill_weight(weight, piece)
        local, offset = local_part(weight)
        expert, part, parts = self.place
        height = weight.shape[1] // parts
        above = part * height
        row = expert - offset[0]
        start = max(offset[1], above)
        stop = min(offset[1] + local.shape[1], above + height)
        if 0 <= row < len(local) and start < stop and local.numel():
            rest = tuple(slice(at, at + size) for at, size in zip(offset[2:], local.shape[2:], strict=True))
            own = local[row, start - offset[1] : stop - offset[1]]
            with torch.no_grad():
                own.copy_(piece[slice(start - above, stop - above), *rest])
        return None


def load_sliced(
    reader: Any,
    path: str,
    revision: str | None,
    *,
    dtype: torch.dtype,
    device: str,
    may_lack: Collection[str],
    sharding: Sharding,
    config: Any,
    prepare: Callable[[Any], None] | None,
) -> tuple[LoadedModel, list[str]] | None:
    """`load_weights`, but each rank reads only its own slices; weights that the files lack are zeros. Collective.
    `prepare(model)` puts adapters on the model that do not depend on its weights; all ranks draw the same values.

    None: the files must be read whole, because they have other names or shapes than the model and need transformers'
    conversion, the model keeps some modules in another precision, or they hold a tied matrix twice.
    """
    config = config or load_config(path, revision)
    place = rank_device(device)
    try:
        files = sliceable_files(path, revision)
        if files is None or getattr(config, "quantization_config", None) is not None:
            return None
        model = unloaded_model(partial(reader.from_config, config, dtype=dtype, trust_remote_code=False))
        ends = [name for name, p in model.named_parameters(remove_duplicate=False) if p is _embedding(model)]
        if len(files.keys() & set(ends)) > 1:  # transformers compares them, and unties what differs
            return None
        if prepare is not None:
            _prepared(model, prepare)
        sources = _sources(model, files)
        missing = sorted(name for name, pieces in sources.items() if not pieces)
        mixed = model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
        if set(missing) - set(may_lack) or (mixed and model.dtype != torch.float32):
            return None
        if not _fits(model, sources):
            return None
        shard_model(model, sharding, place)
        resting = torch.device("cpu") if sharding.offload else place
        _replaced(model, lambda p: torch.zeros_like(p, device=resting) if p.is_meta else None)
        _read(model, sources)
    except SafetensorError as error:
        raise unreadable_model(path, "can't be loaded", error) from error
    refuse_not_finite(path, _not_finite_anywhere(model))
    generation = load_generation_config(path, revision) if model.can_generate() else None
    if generation is not None:
        model.generation_config = generation
    model.config.name_or_path = path
    tokenizer = load_tokenizer(path, revision)
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, path=path, sharding=sharding, device=place), missing


def sliceable_files(path: str, revision: str | None) -> dict[str, Path] | None:
    """The safetensors file of each weight, of a folder or a hub name; None if they are missing."""
    index = _file(path, revision, INDEX)
    single = _file(path, revision, SINGLE)
    if index is not None:
        places: dict[str, str] = load_json(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: _file(path, revision, name) for name in sorted(set(places.values()))}
        local = {name: file for name, file in files.items() if file is not None}
        if len(local) == len(files):
            return {name: local[file] for name, file in places.items()}
        return None
    if single is None:
        return None
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


def _file(path: str, revision: str | None, name: str) -> Path | None:
    folder = Path(path).expanduser()
    if folder.exists():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils.hub import cached_file

    try:
        return Path(str(cached_file(path, name, revision=revision)))
    except OSError:
        return None


def _embedding(model: Any) -> Any:
    return getattr(model.get_input_embeddings(), "weight", None)


def unloaded_model(make: Any) -> Any:
    """The model that `make()` builds, with parameters on the meta device and buffers computed as usual."""
    with torch.random.fork_rng(devices=[]), _parameters_on_meta():
        return make()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Each parameter that this thread registers is put on the meta device; tensors that no file has, such as the
    frequencies of rotary embeddings, are computed as usual."""
    plain = nn.Module.register_parameter
    thread = threading.get_ident()

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:  # tied ones stay so
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]  # of every module
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]  # as before


def _prepared(model: nn.Module, prepare: Callable[[Any], None]) -> None:
    """Call `prepare(model)` with zeros that take no memory in place of the weights, so that the adapters it adds are
    real."""

    def to_meta(parameter: Tensor) -> Tensor | None:
        return parameter.to("meta") if id(parameter) in weights else None

    weights = _replaced(model, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    prepare(model)
    _replaced(model, to_meta)


def _replaced(model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> dict[int, nn.Parameter]:
    """Replace each parameter by the result of `change`, keeping ties; None leaves one unchanged. Returns the new
    parameters by id."""
    new = dict[int, nn.Parameter]()
    parameters = dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in new:
                with torch.no_grad():
                    value = change(parameter)
                if value is None:
                    continue
                new[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            replacement = new[id(parameter)]
            parameters[id(replacement)] = replacement
            module._parameters[name] = replacement
    return parameters


def _sources(model: nn.Module, files: Mapping[str, Path]) -> dict[str, list[FilePiece]]:
    """The pieces of each weight and each saved buffer, by its first name in the model, found under any of its names."""
    owner = dict[int, str]()
    sources = dict[str, list[FilePiece]]()
    pieces = pieces_of_weights(model, files)
    for name, tensor in _saved(model):
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            continue  # an adapter's
        first = owner.setdefault(id(tensor), name)
        if not sources.get(first):
            sources[first] = pieces.get(name.replace(".base_layer.", "."), [])
    return sources


def pieces_of_weights(model: Any, files: Mapping[str, Path]) -> dict[str, list[FilePiece]]:
    """The pieces of each weight by its name. Where transformers would stack some, the conversions between the model's
    names and those in files are stored on the model, as by `from_pretrained`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    pieces = {name: [FilePiece(name, file)] for name, file in files.items()}
    mapping = get_model_conversion_mapping(model)
    stacking = [entry for entry in mapping if isinstance(entry, WeightConverter) and _stacks(entry)]
    if not stacking:
        return pieces
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    patterns = dict[str, list[str]]()
    for entry in stacking:
        patterns |= dict.fromkeys(entry.source_patterns, entry.source_patterns)
    stacked = dict[str, dict[str, list[str]]]()
    for name in sorted(files, key=dot_natural_key):
        weight, pattern = rename_source_key(name, renamings, stacking)
        if pattern is not None:
            stacked.setdefault(weight, {name: [] for name in patterns[pattern]})[pattern].append(name)
        elif weight not in pieces:
            pieces[weight] = [FilePiece(name, files[name])]
    for weight, parts in stacked.items():
        pieces[weight] = list(_placed(parts, files))
    used = [entry for entry in mapping if entry.was_used()]
    if used:
        model._weight_conversions = used
    return pieces


def _placed(parts: Mapping[str, list[str]], files: Mapping[str, Path]) -> Iterator[FilePiece]:
    for part, names in enumerate(parts.values()):
        yield from (FilePiece(name, files[name], (expert, part, len(parts))) for expert, name in enumerate(names))


def _stacks(entry: Any) -> bool:
    """True if a conversion stacks the experts' matrices and then at most joins them by rows."""
    operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in entry.operations]
    return operations in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    kept = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _fits(model: nn.Module, sources: Mapping[str, list[FilePiece]]) -> bool:
    saved = dict(_saved(model))
    complete = all(len(pieces) == pieces[0].among(saved[name]) for name, pieces in sources.items() if pieces)
    return complete and all(
        piece.fits(tensor, list(opened.get_slice(piece.name).get_shape()))
        for opened, tensor, piece in _opened(saved, sources)
    )


def _read(model: nn.Module, sources: Mapping[str, list[FilePiece]]) -> None:
    for opened, tensor, piece in _opened(dict(_saved(model)), sources):
        piece.fill(tensor, opened.get_slice(piece.name))


def _opened(
    tensors: Mapping[str, Tensor], sources: Mapping[str, list[FilePiece]]
) -> Iterator[tuple[Any, Tensor, FilePiece]]:
    """An open file, a tensor of the model, and a piece of it in the file; each file is opened once."""
    by_file = dict[Path, list[tuple[str, FilePiece]]]()
    for own, pieces in sources.items():
        for piece in pieces:
            by_file.setdefault(piece.file, []).append((own, piece))
    for file, wanted in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for own, piece in wanted:
                yield opened, tensors[own], piece


def _not_finite_anywhere(model: nn.Module) -> list[str]:
    """The weights that are not finite on some rank, in the model's order."""
    names = []
    own = set[str]()
    ranks = list[Any]([None] * dist.get_world_size())
    for name, parameter in model.named_parameters():
        names.append(name)
        if not bool(own_slice(parameter).isfinite().all()):
            own.add(name)
    dist.all_gather_object(ranks, own)
    return [name for name in names if any(name in bad for bad in ranks)]
