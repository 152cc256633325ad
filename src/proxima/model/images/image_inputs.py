"""The input of a decoder where tokens are those of images: features of the model's own vision tower in place of
embeddings, and positions of three axes where the model has them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proxima.data import UserError
from proxima.data.image_tokens import image_and_patch, image_starts
from proxima.data.packed_batch import PackedBatch, indices_of
from proxima.model.attention import Segments, ShownImages
from proxima.model.images.image_store import ImageStore

KEPT = 1 << 16  # most tokens whose features are kept


class ImageReader:
    """Reads the images of a model's prompts. An image's features are computed once, as long as the vision tower and
    what follows it up to the decoder are not trained, or `forget` is called.

    Args:
        model: with its tower; `get_decoder` is what gets the input.
        store: the images.
        trained: the tower is; features have gradients, and are computed in each pass.
    """

    def __init__(self, model: nn.Module, store: ImageStore, *, trained: bool = False) -> None:
        self.core: Any = model.base_model
        self.store = store
        self.trained = trained
        self.joined = store.joined
        self.three_axes = hasattr(self.core, "get_rope_index")
        self._features: dict[int, list[Tensor]] = {}

    def of_batch(self, batch: PackedBatch) -> ShownImages:
        """The images of a packed batch."""
        position = self._batch_position(batch) if self.three_axes else batch.position
        inputs = self.inputs(batch.tokens, position)
        if not self.joined:
            return ShownImages(inputs)
        image = torch.from_numpy(image_starts(batch.tokens.cpu().numpy()))
        return ShownImages(inputs, Segments(batch, image.to(batch.tokens.device)))

    def forget(self) -> None:
        """Compute features anew: the weights have changed."""
        self._features.clear()

    def _features_of(self, image: int) -> list[Tensor]:
        """[T, D] in place of the embeddings of an image's tokens; then what is added to the states of those tokens
        after the first layers, one for each, if the model does."""
        if self.trained:
            return self._computed(image)
        if image not in self._features:
            while sum(len(kept[0]) for kept in self._features.values()) > KEPT:
                del self._features[next(iter(self._features))]
            with torch.no_grad():
                self._features[image] = self._computed(image)
        return self._features[image]

    def _computed(self, image: int) -> list[Tensor]:
        device = next(self.core.parameters()).device
        _, pixels = self.store.processed(image)
        moved = {name: value.to(device) for name, value in pixels.items()}
        out = self.core.get_image_features(**moved, return_dict=True)
        deep = getattr(out, "deepstack_features", None) or []
        return [_rows(features) for features in (out.pooler_output, *deep)]

    def inputs(self, tokens: Tensor, position: Tensor) -> dict[str, Any]:
        """Of tokens [L] at `position` [L], or [3, L] for a model of three axes."""
        embedded = self.core.get_input_embeddings()(tokens.clamp(min=0)[None])
        shown = tokens < 0
        image, patch = image_and_patch(tokens[shown].cpu().numpy())
        features_of_layers: dict[str, Any] = {}
        if len(image):
            numbers, which = np.unique(image, return_inverse=True)
            features = [self._features_of(number) for number in numbers.tolist()]
            starts = np.cumsum([0, *(len(of[0]) for of in features)])
            rows = torch.from_numpy(starts[which] + patch).to(tokens.device)
            embeds, *deep = (torch.cat(parts)[rows] for parts in zip(*features, strict=True))
            embedded = embedded.masked_scatter(shown[None, :, None], embeds.to(embedded.dtype))
            if deep:
                features_of_layers = {"visual_pos_masks": shown[None], "deepstack_visual_embeds": deep}
        return {"inputs_embeds": embedded, "position_ids": position[..., None, :], **features_of_layers}

    def _batch_position(self, batch: PackedBatch) -> Tensor:
        tokens = batch.tokens.cpu().numpy()
        out = np.tile(batch.position.cpu().numpy(), (3, 1))
        if (tokens < 0).any():
            for segment, spans in enumerate(batch.contexts()):
                start, end = batch.edges[segment : segment + 2]
                whole = np.concatenate([tokens[indices_of(spans).numpy()], tokens[start:end]])
                out[:, start:end] = self.position(whole)[:, len(whole) - (end - start) :]
        return torch.from_numpy(out).to(batch.tokens.device)

    def position(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """[3, T] time, row and column of the tokens of a sequence: equal for text, which counts on; an image is one
        step of time, and what follows it continues from its longer side (arXiv 2409.12191, section 2.1)."""
        out = np.tile(np.arange(len(tokens), dtype=np.int64), (3, 1))
        shown = tokens < 0
        image, patch = image_and_patch(tokens)
        begins = np.flatnonzero(shown & (patch == 0))
        for begin in begins.tolist():
            height, width = self._grid(int(image[begin]))
            count = min(height * width, len(tokens) - begin)
            first = out[0, begin]
            inside = np.arange(count)
            out[:, begin : begin + count] = first + np.stack([0 * inside, inside // width, inside % width])
            rest = np.arange(len(tokens) - begin - count)
            out[:, begin + count :] = first + max(height, width) + rest
        return out

    def shift(self, tokens: NDArray[np.integer]) -> int:
        """What is added to the number of a token after these to get its position on all three axes."""
        if not self.three_axes or (tokens >= 0).all():
            return 0
        return int(self.position(np.append(tokens, 0))[0, -1]) - len(tokens)

    def _grid(self, image: int) -> tuple[int, int]:
        """Rows and columns of an image's tokens."""
        merged = int(self.core.config.vision_config.spatial_merge_size)
        _, height, width = self.store.grid(image)
        return height // merged, width // merged


def _rows(features: Any) -> Tensor:
    """[T, D] of an image's features, which models give as one tensor, or one for each image or tile."""
    joined: Tensor = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    if joined.ndim < 2:
        raise UserError("the model's vision tower returned no features")
    return joined.flatten(0, -2)
