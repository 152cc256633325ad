"""Checks rewards, engines and running servers."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from proxima.engine.protocol import EngineSetup
from proxima.laws.bare_server import BareServer, NoTokenizer
from proxima.laws.engine_case import EngineUnderTest, tiny_model
from proxima.laws.engine_laws import ENGINE_LAWS
from proxima.laws.law import Law, LawResult, check_law, check_laws, described, not_tried
from proxima.laws.reward_laws import REWARD_LAWS
from proxima.laws.sampling_laws import SAMPLING_LAWS
from proxima.laws.server_laws import CONTROL_LAWS, SERVER_LAWS
from proxima.model.load import load
from proxima.model.pretrained import load_tokenizer
from proxima.reward.base import as_reward

CHECKED = Law("check", "a run ends before it begins", lambda spec, case: None, root=True)
CHECKED = dataclasses.replace(CHECKED, cure="raise from check() a UserError alone, with a line for the user")


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
    """Check the laws of engines on a model; without a path, on a tiny one created on the fly."""
    holds = bool(getattr(type(spec), "needs_weights", False))
    loaded = functools.cache(tiny_model if model is None else functools.partial(load, model))
    if holds or model is None:
        setup = EngineSetup.of(loaded())
    else:
        setup = EngineSetup(model_path=model, tokenizer=load_tokenizer(model), load_weights=loaded)
    # An engine that holds no weights here and was given no model may return anything, so it is not compared.
    compared = loaded if holds or model is not None else None
    yield from check_laws(ENGINE_LAWS, EngineUnderTest(spec, setup, compared, dtype=getattr(spec, "dtype", None)))


OF_BARE_SERVERS = {"columns", "log_probs", "determinism", *(law.name for law in SAMPLING_LAWS)}


def check_live_server(
    server: BareServer, model: str | None = None, *, control: bool = False, draws: int = 3000
) -> Iterator[LawResult]:
    """Check the laws of servers on a running server.

    Args:
        model: folder with the weights that the server should have; None: laws that need them are skipped.
        control: also pause the server and load the weights of `model`.
        draws: the number of tokens drawn to compare their frequencies.
    """
    loaded = None if model is None else functools.cache(functools.partial(load, model))
    setup = EngineSetup(
        model_path=model or server.facts.model,
        tokenizer=NoTokenizer() if model is None else load_tokenizer(model),
        load_weights=loaded or tiny_model,
        max_length=server.facts.max_length,
    )
    quantized = server.facts.quantization is not None
    case = EngineUnderTest(server, setup, loaded, dtype=server.facts.dtype, quantized=quantized, draws=draws)
    for law in (*SERVER_LAWS, *(law for law in ENGINE_LAWS if law.name in OF_BARE_SERVERS)):
        yield check_law(law, case)
    for law in CONTROL_LAWS:
        yield check_law(law, case) if control else LawResult(law, "skipped", "it disturbs others: give --control")
