"""A model by its name: where its weights are, and how they are loaded and run."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from proxima.model.adapters.lora import Lora
from proxima.model.architecture import vision_parameters
from proxima.model.device_segments import grow_segments
from proxima.model.files import model_files
from proxima.model.images.image_store import ImageStore
from proxima.model.load import load
from proxima.model.log_prob import ROWS_ON_CPU
from proxima.model.packed_model import PassSettings
from proxima.model.parallel.sharding import Sharding
from proxima.model.policy import Policy
from proxima.model.positions import fix_positions
from proxima.model.precision import compute_dtype
from proxima.model.pretrained import DTYPES, LoadedModel, resolve_device
from proxima.model.scalar_model import ScalarModel, load_scalar_model


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that can be loaded and run, as often as it is needed.

    Args:
        path, revision, device: see `load`; `dtype` is a name of `DTYPES`.
        lora: adapters to train instead of the weights; None: no adapters.
        seed: of the random initialisation of new adapters and heads.
        attention, share_prompt, gradient_checkpointing, compile: see `PackedModel`; `compute_dtype` is a name of
            `DTYPES` or `auto`, see `precision`.
        log_prob_chunk: see `Policy`.
        lends_memory: other processes read its memory on a GPU, whose segments then do not grow, see `grow_segments`.
        max_length: tokens of the longest sequence, where the factors of positions depend on it, see `fix_positions`;
            None: the model's own limit.
        images: the `ImageStore` of its prompts, if they show any; vision_lr_ratio: see `LoadedModel`.
        sharding: spread over the ranks of torch.distributed, see `load`; loading is then collective. None: one process.
    """

    path: str
    revision: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    lora: Lora | None = None
    seed: int = 0
    attention: str = "auto"
    share_prompt: bool = True
    compute_dtype: str = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    lends_memory: bool = False
    log_prob_chunk: int | None = None
    sharding: Sharding | None = None
    images: ImageStore | None = None
    vision_lr_ratio: float = 0.0
    max_length: int | None = None

    def load(self, saved: str | None = None) -> LoadedModel:
        """Load the model, or the one of the same architecture that a checkpoint stored in the folder `saved`."""
        path, revision, lora = self._location(saved)
        self._grow_segments()
        loaded = load(
            path=path,
            revision=revision,
            dtype=DTYPES[self.dtype],
            device=self.device,
            lora=lora,
            seed=self.seed,
            sharding=self.sharding,
            max_length=self.max_length,
        )
        return self._shown(loaded)

    def _grow_segments(self) -> None:
        if not self.lends_memory:
            grow_segments(resolve_device(self.device))

    def _shown(self, loaded: LoadedModel) -> LoadedModel:
        """The model with its positions fixed and its images, and with a tower that is trained only where the settings
        say so."""
        fix_positions(loaded.model, self.max_length, loaded.max_length)
        if self.images is None:
            return loaded
        for parameter in vision_parameters(loaded.model).values():
            parameter.requires_grad_(self.vision_lr_ratio > 0)
        tokenizer: Any = self.images.tokenizer
        return replace(loaded, tokenizer=tokenizer, vision_lr_ratio=self.vision_lr_ratio)

    def load_scalar(self, saved: str | None = None, *, head_std: float) -> LoadedModel:
        """Load the model with a scalar head, see `load_scalar_model`, or the one that a checkpoint stored in
        `saved`."""
        has_head = saved is not None and self.lora is None
        new_head = None if has_head else head_std
        path, revision, lora = self._location(saved)
        self._grow_segments()
        loaded = load_scalar_model(
            path=path,
            revision=revision,
            dtype=DTYPES[self.dtype],
            device=self.device,
            new_head=new_head,
            seed=self.seed,
            lora=lora,
            sharding=self.sharding,
            max_length=self.max_length,
        )
        return self._shown(loaded)

    def policy(
        self, loaded: LoadedModel, value_head: nn.Linear | None = None, *, replays_routes: bool = False
    ) -> Policy:
        """A policy that runs loaded weights."""
        settings = self._pass_settings()
        settings["replays_routes"] = replays_routes
        return Policy(loaded, log_prob_chunk=self.log_prob_chunk, value_head=value_head, **settings)

    def scalar(self, loaded: LoadedModel) -> ScalarModel:
        """A scalar model that runs loaded weights."""
        return ScalarModel(loaded, **self._pass_settings())

    def identity(self) -> dict[str, str]:
        """The inputs that determine the log-probs of its weights, without an adapter: hashes of its files, and
        settings, by name. Empty if the files are not known."""
        files = model_files(self.path, self.revision)
        if not files:
            return {}
        names = ("path", "dtype", "compute_dtype", "attention", "share_prompt")
        settings = {name: str(getattr(self, name)) for name in names}
        settings["log_prob_chunk"] = str(
            self.log_prob_chunk or ROWS_ON_CPU
        )  # on a GPU its memory decides: see `device`
        adapter = {} if self.lora is None else {"base of an adapter": "off"}
        settings["compute_dtype"] = str(self._computes_in).removeprefix("torch.")
        return {**files, **settings, "device": resolve_device(self.device).type, **adapter}

    @property
    def _computes_in(self) -> torch.dtype:
        return compute_dtype(self.compute_dtype, self.device, DTYPES[self.dtype])

    def _location(self, saved: str | None) -> tuple[str, str | None, Lora | None]:
        """Path, revision and adapters to load. A checkpoint has the whole model in `saved`, or only its adapter."""
        if saved is not None and self.lora is None:
            return saved, None, None
        lora = self.lora
        if lora is not None and saved is not None:
            lora = replace(lora, path=saved)
        return self.path, self.revision, lora

    def _pass_settings(self) -> PassSettings:
        return {
            "attention": self.attention,
            "share_prompt": self.share_prompt,
            "compute_dtype": self._computes_in,
            "gradient_checkpointing": self.gradient_checkpointing,
            "compile": self.compile,
        }
