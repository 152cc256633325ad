"""The log-probs of a whole episode in one forward are those of its turns, each with what the model saw before it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from proxima.data.trajectory import Trajectory
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.rollout.episodes.conversation import Conversation, TurnTemplate
from tests.model.rows import loaded
from tests.tiny import KINDS, tiny_tokenizer

SMOLLM2 = Path("models/smollm2-135m-instruct")
CLOSE = 1e-4  # nats


def played(tokenizer, forget=False):
    """Paths of an episode of four turns, one of them empty and one cut; `forget`: earlier turns are rewritten."""
    if forget:
        tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'] | trim")
    conversation = Conversation(TurnTemplate(tokenizer, {}), [{"role": "user", "content": "Guess."}])
    contexts, turns = [], []
    for text in ("50 \n<|im_end|>", "", "2", "12<|im_end|>"):
        contexts.append(conversation.context)
        turns.append(np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32))
        conversation.add_turn(turns[-1], text, "stop")
        conversation.observe([{"role": "user", "content": "low"}])
    return conversation, contexts, turns


def apart(policy, tokenizer, forget):
    """The largest difference between the log-probs of the paths and those of the turns, and how many there are."""
    conversation, contexts, turns = played(tokenizer, forget)
    paths = conversation.paths()
    assert len(paths) == 1 + forget
    whole = [
        Trajectory(group=0, prompt_tokens=conversation.prompt, tokens=p.tokens, sampled=p.sampled, loss_mask=p.sampled)
        for p in paths
    ]
    alone = [
        Trajectory(group=i, prompt_tokens=c, tokens=t) for i, (c, t) in enumerate(zip(contexts, turns, strict=True))
    ]
    with torch.no_grad():
        together = policy(policy.pack(whole)).log_prob[torch.tensor(np.concatenate([p.sampled for p in paths]))]
        each = torch.cat([policy(policy.pack([row])).log_prob for row in alone])
    assert len(each) == len(together) == sum(map(len, turns))
    return float((together - each).abs().max())


@pytest.mark.parametrize(
    ("kind", "share", "forget"),
    [*((kind, True, False) for kind in KINDS), *(("llama", share, True) for share in (True, False))],
)
def test_one_forward_is_turn_by_turn(kind, share, forget):
    assert apart(Policy(loaded(kind), share_prompt=share), tiny_tokenizer(), forget) <= CLOSE


@pytest.mark.slow
@pytest.mark.campaign("tests/rollout/episodes/test_episode_log_prob.py::test_one_forward_is_turn_by_turn")
@pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not here")
def test_one_forward_of_smollm2_is_turn_by_turn():
    model = load(str(SMOLLM2), dtype=torch.float32)
    assert apart(Policy(model), model.tokenizer, forget=True) <= CLOSE
