"""What makes images into input of a decoder."""

from typing import Any

from proxima.model.lora import SCALAR_HEAD
from proxima.model.pretrained import SHOWN_IMAGES


def beside_decoder(model: Any) -> dict[str, Any]:
    """The parameters, by name, of what makes images into input of the decoder; empty for a model of text alone."""
    if model.config.model_type not in SHOWN_IMAGES:
        return {}
    own = model.get_decoder(), model.get_output_embeddings(), getattr(model, SCALAR_HEAD, None)
    inside = {id(parameter) for module in own if module is not None for parameter in module.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in inside}
