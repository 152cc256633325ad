"""The settings that each kind of engine declares, and the fields of a recipe that set them."""

from typing import Any

import pytest
import torch

from proxima.config.resolution import spec_from_words
from proxima.engine import ENGINES
from proxima.engine.serve.server_variations import ONE_DEVICE, RUNNING
from proxima.engine.variations import changed_fields

SERVED = ["serve.arguments=[--kv-cache-dtype, fp8, --tp-size=2]", "quantization=fp8"]
HERE = ["weights=int8", "noise=0.5"]
OF_KIND = {"local": HERE, "local_process": HERE, "vllm": SERVED, "sglang": SERVED}


def variations(kind: str, words: list[str]) -> tuple[Any, list[Any]]:
    spec = spec_from_words("engine", kind, words)
    return spec, list(spec.variations(torch.device("cpu")))


@pytest.mark.parametrize("kind", list(ENGINES))
def test_the_fields_that_are_printed_set_what_was_tried(kind: str) -> None:
    """Each as an override of the recipe; those that this machine can't try, too."""
    spec, found = variations(kind, OF_KIND[kind])
    assert len({each.name for each in found}) == len(found) >= 7
    for each in found:
        changed = each.change(spec)
        fields = [text.removeprefix("engine.") for text in changed_fields(spec, changed, "engine")]
        assert fields, each.name
        kept = [
            word for word in OF_KIND[kind] if word.partition("=")[0] not in {text.partition("=")[0] for text in fields}
        ]
        assert spec_from_words("engine", kind, [*kept, *fields]) == changed


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_is_running_is_not_changed(kind: str) -> None:
    _, found = variations(kind, [])
    assert {each.why_not for each in found} == {RUNNING}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_the_recipe_has_not_is_not_undone(kind: str) -> None:
    _, found = variations(kind, ["serve={}"])
    reasons = {each.name: each.why_not for each in found}
    assert reasons["TP: 1"] == ONE_DEVICE
    assert reasons["quantised cache: off"] and reasons["quantised weights: off"]
    _, found = variations(kind, SERVED)
    tried = {each.name for each in found if each.why_not is None}
    assert {"TP: 1", "quantised cache: off", "quantised weights: off"} <= tried


def test_a_cache_that_is_off_is_tried_on() -> None:
    spec, found = variations("vllm", ["serve.arguments=[--no-enable-prefix-caching]"])
    changed = next(each for each in found if each.name == "prefix cache: on").change(spec)
    assert changed.serve.arguments[-1] == "--enable-prefix-caching"
