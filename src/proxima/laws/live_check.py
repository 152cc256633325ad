"""Checks rewards and engines, servers among them."""

import functools
from collections.abc import Iterator
from typing import Any

from proxima.data import UserError
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.protocol import EngineSetup, close_engine
from proxima.laws.engine_case import EngineUnderTest, tiny_model
from proxima.laws.engine_laws import ENGINE_LAWS
from proxima.laws.law import Law, LawResult, check_laws, described, not_tried
from proxima.laws.reward_laws import REWARD_LAWS
from proxima.model.load import load
from proxima.model.pretrained import load_tokenizer
from proxima.reward.base import as_reward

CURE = "raise from check() a UserError alone, with a line for the user"
CHECKED = Law("check", "a run ends before it begins", lambda spec, case: None, cure=CURE, root=True)


def check_reward(spec: Any) -> Iterator[LawResult]:
    """Check the laws of rewards; all are skipped if something that the reward needs is missing."""
    try:
        as_reward(spec).check()
    except ValueError as error:
        yield from (LawResult(law, "skipped", str(error)) for law in REWARD_LAWS)
        return
    except Exception as error:  # third-party code may raise anything
        yield LawResult(CHECKED, "FAILED", described(error))
        yield not_tried(REWARD_LAWS, CHECKED)
        return
    yield from check_laws(REWARD_LAWS, spec)


def check_engine(spec: Any, model: str | None = None) -> Iterator[LawResult]:
    """Check the laws of engines on a model; without a path, on a tiny one created on the fly.

    A server answers as in a run: it is asked for what it can do, and `versions` pushes the weights of the model to it.

    Raises:
        UserError: the engine is a server, and there is no model to compare with its own; or it can't be used.
    """
    if model is None and isinstance(spec, ServerSettings):
        raise UserError(
            "a server is checked against its model", remedy="add --model FOLDER, with the weights that it serves"
        )
    holds = bool(getattr(type(spec), "needs_weights", False))
    loaded = functools.cache(tiny_model if model is None else functools.partial(load, model))
    if holds or model is None:
        setup = EngineSetup.of(loaded())
    else:
        setup = EngineSetup(model_path=model, tokenizer=load_tokenizer(model), load_weights=loaded)
    if isinstance(spec, ServerSettings) and spec.serve is None:
        close_engine(spec.build(setup))  # what prevents this is about the server, and about no law
    # An engine that holds no weights here and was given no model may return anything, so it is not compared.
    compared = loaded if holds or model is not None else None
    quantized = getattr(spec, "quantization", None) is not None
    case = EngineUnderTest(spec, setup, compared, dtype=getattr(spec, "dtype", None), quantized=quantized)
    yield from check_laws(ENGINE_LAWS, case)
