"""The record of a served model, as `proxima view` shows it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from tinker.types import AdamParams, LoraConfig

from proxima.view.microscope.app import MicroscopeApp
from proxima.view.microscope.server import open_runs
from proxima_tinker import served_record as record_module
from proxima_tinker.datum import Datum
from proxima_tinker.losses import ClientLoss
from proxima_tinker.served_record import ServedRecord
from proxima_tinker.trained_model import TrainedModel

from .data_of_clients import run_whole

pytestmark = pytest.mark.slow

ADAM = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0)
CPPO = "importance_sampling", {"surrogate": "cppo", "surrogate.delta": 0.15}
SFT = "cross_entropy", {}
ROWS = ("is it", "is it, no", "maybe")  # the last of a prompt of its own


class Client:
    """A model that is trained, and its record."""

    def __init__(self, base, folder, rank=4):
        self.base, self.folder, self.spec = base, folder, LoraConfig(rank=rank, seed=0)
        self.trained = TrainedModel(base, self.spec, compute_dtype=torch.float32, budget=1024)
        self.start()

    def start(self):
        """As after a start of the server."""
        self.record = ServedRecord(self.folder, self.base, self.spec.model_dump())

    def pages(self):
        (run,) = open_runs([self.folder])
        client = TestClient(MicroscopeApp([run]).asgi, base_url="http://127.0.0.1:8123")

        def get(place):
            answer = client.get(f"/api/{place}")
            assert answer.status_code == 200, answer.text
            return answer.json()

        return get

    def datum(self, prompt, answer, advantage=None, gap=None):
        """An example of a prompt and an answer; with an advantage it has the log-probs of now, half a nat off."""
        before, after = (self.base.tokenizer.encode(text) for text in (prompt, answer))
        ids = np.array([*before, *after, *self.base.stop_tokens[:1]], np.int32)
        inside = np.arange(1, len(ids)) >= len(before)
        if gap is not None:
            inside[len(before) - 1 + gap.start : len(before) - 1 + gap.stop] = False
        datum = Datum(tokens=ids[:-1], targets=ids[1:].astype(np.int64))
        if advantage is None:
            return replace(datum, columns={"weights": inside.astype(np.float32)})
        columns = {"advantages": inside * np.float32(advantage), "logprobs": np.zeros(len(inside), np.float32)}
        (out,) = run_whole(
            self.trained, [replace(datum, columns=columns)], ClientLoss("importance_sampling", {}), backward=False
        ).outputs
        return replace(datum, columns=columns | {"logprobs": inside * np.minimum(out["logprobs"] - 0.5, -0.1)})

    def forward_backward(self, data, loss):
        client_loss = ClientLoss(*loss)
        result = run_whole(self.trained, data, client_loss, backward=True)
        self.record.pending.add(data, client_loss, result)
        return result

    def step(self, number):
        self.record.step(number, self.trained.step(ADAM) | {"lr": ADAM.learning_rate})

    def lines(self):
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_pending_step_does_not_grow_with_the_statistics_of_its_losses(base, tmp_path):
    client = Client(base, tmp_path / "run")
    corrected = "ppo", {"surrogate": "ppo_clip", "correction": "importance"}  # with quantiles of the weights

    def numbers():
        of_loss = client.record.pending.of_loss.values()
        return sum(part.numel() for metric in of_loss for part in vars(metric).values() if torch.is_tensor(part))

    data = [client.datum(*ROWS[:2], advantage=1.0)]
    client.forward_backward(data, corrected)
    first = numbers()
    for _ in range(3):
        client.forward_backward(data, corrected)
    assert numbers() == first > 0
    metrics = client.record.pending.metrics()
    assert metrics["loss"] < 0 and all(np.isfinite(value) for value in metrics.values())
    client.start()  # what waited is forgotten, and is no loss of 0
    assert "loss" not in client.record.pending.metrics()


def test_a_loss_by_a_surrogate_down_to_its_tokens(base, tmp_path):
    client = Client(base, tmp_path / "models" / "one")
    data = [client.datum("What", row, a) for row, a in zip(ROWS[:2], (1.0, -2.0), strict=True)]
    first = client.forward_backward(data, CPPO)
    second = client.forward_backward([client.datum("Why", ROWS[2], 1.0)], CPPO)
    client.step(1)
    get = client.pages()
    (run,) = get("runs")
    assert (run["problem"], run["steps"], run["algorithm"]) == (None, 1, "cppo, LoRA of rank 4,")
    assert run["model"] == base.name
    trend = get("0/trend")
    assert trend["specs"]["surrogate"] | {"kind": "cppo", "delta": 0.15} == trend["specs"]["surrogate"]
    (line,) = client.lines()
    loss = first.loss + second.loss
    assert line["loss"] == pytest.approx(loss) and line["lr"] == 1e-3 and line["grad_norm"] > 0
    tokens = [len(row) + 1 for row in ROWS]  # one a byte, and the stop
    assert line["examples"] == 3 and line["length/mean"] == pytest.approx(sum(tokens) / 3)
    assert line["ratio_mean"] == pytest.approx(np.exp(0.5), rel=1e-4) and "not_recorded" not in line
    assert line["mismatch/k3_kl"] == pytest.approx(np.exp(0.5) - 1.5, rel=1e-4)

    step = get("0/step/1")
    assert [(group["question"], group["size"]) for group in step["groups"]] == [("What", 2), ("Why", 1)]
    assert step["completions"]["length"] == tokens and step["completions"]["advantage"] == [1, -2, 1]
    assert step["completions"]["reward"] == [None] * 3
    uid = step["groups"][0]["uid"]
    page = get(f"0/step/1/completion/{uid}.1.0")
    assert "".join(page["tokens"]["text"]) == "is it, no<|im_end|>" and "".join(page["prompt"]["text"]) == "What"
    assert (page["text"], page["finish_reason"], page["band"]["kind"]) == ("is it, no", "stop", "cppo")
    output = first.outputs[1]
    for at, position in enumerate(range(len("What") - 1, len(data[1].tokens))):
        token = get(f"0/step/1/completion/{uid}.1.0/token/{at}")
        assert token["log_probs"]["current"] == pytest.approx(float(output["logprobs"][position]), rel=1e-6)
        behavior = float(data[1].columns["logprobs"][position])
        assert token["log_probs"]["behavior"] == pytest.approx(behavior, rel=1e-6)
        kept = bool(output["keep"][position])
        assert token["kept"] == kept and token["reason"].startswith("kept: " if kept else "masked: ")


@pytest.mark.parametrize(
    "loss, reasons",
    [
        (("ppo", {}), {"kept", "masked"}),
        (("cispo", {"clip_high_threshold": 1.3}), {"clipped"}),
        (("importance_sampling", {}), {"kept"}),
        (("dro", {"beta": 0.1}), {"kept"}),
        (("gspo", {}), {"kept", "masked"}),
    ],
)
def test_a_loss_of_the_sdk_is_explained_as_it_was_computed(base, tmp_path, loss, reasons):
    client = Client(base, tmp_path)
    client.forward_backward([client.datum("Q", "abc", a) for a in (1.0, -1.0)], loss)  # π/μ is exp(.5), above a clip
    client.step(1)
    client.start()
    client.forward_backward([client.datum("Q", "abc", a) for a in (1.0, -1.0)], loss)
    client.step(2)
    get = client.pages()
    for step in (1, 2):
        pages = [get(f"0/step/{step}/completion/{step * 100_000}.{sample}.0/token/1") for sample in (0, 1)]
        assert {page["reason"].partition(":")[0] for page in pages} == reasons
        assert [page["kept"] for page in pages] == [page["reason"].startswith("kept") for page in pages]
    assert "several" not in get("runs")[0]["algorithm"]


def test_cross_entropy_has_no_behavior_policy_and_gives_no_reasons(base, tmp_path):
    client = Client(base, tmp_path, rank=0)
    client.forward_backward([client.datum("Q", "abc"), client.datum("nothing is learnt", "", gap=slice(0, 1))], SFT)
    client.step(1)
    get = client.pages()
    token = get("0/step/1/completion/100000.0.0/token/0")
    assert token["kept"] and token["log_probs"]["behavior"] is None and token["advantage"] == 1
    assert token["reason"].startswith("kept, as the trainer recorded; the run has no surrogate")
    assert get("0/step/1")["completions"]["outcome"] == ["trained", "skipped_zero_advantage"]
    assert not get("0/step/1/completion/100001.0.0/token/0")["kept"]
    client.forward_backward([client.datum("Q", "abc", 1.0)], ("ppo", {}))
    client.step(2)
    get = client.pages()
    assert get("runs")[0]["algorithm"] == "several losses, all weights,"
    token = get("0/step/2/completion/200000.0.0/token/0")
    assert token["reason"].startswith("masked, as the trainer recorded; a loss that varies")


def test_targets_between_that_are_not_in_the_loss(base, tmp_path):
    client = Client(base, tmp_path)
    client.forward_backward([client.datum("Q", "call answer end", 1.0, gap=slice(5, 12))], CPPO)
    client.step(1)
    get = client.pages()
    page = get("0/step/1/completion/100000.0.0")
    spans = [(span["text"], span["sampled"], span["turn"]) for span in page["episode"]["spans"]]
    assert spans == [("call ", True, 0), ("answer ", False, 0), ("end", True, 1)]
    assert get("0/step/1/completion/100000.0.0/token/6")["reason"] == "not sampled here: it is context, in no loss"
    assert get("0/step/1")["completions"]["length"] == [len("call end") + 1]


def test_a_step_that_runs_again_is_replaced_and_has_one_line(base, tmp_path):
    client = Client(base, tmp_path)
    for number in (1, 2):
        client.forward_backward([client.datum("Q", "before", 1.0)], CPPO)
        client.step(number)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')  # as a crash leaves it
    client.start()
    for number in (2, 3):
        client.forward_backward([client.datum("Q", "after", 1.0)], CPPO)
        client.step(number)
    lines = client.lines()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert sorted(line["time"] for line in lines) == [line["time"] for line in lines]
    get = client.pages()
    texts = [get(f"0/step/{n}/group/{n * 100_000}")["completions"][0]["text"] for n in (1, 2, 3)]
    assert texts == ["before", "after", "after"]


def test_bounds_and_gradients_that_were_dropped(base, tmp_path, monkeypatch):
    client = Client(base, tmp_path)
    client.forward_backward([client.datum("Q", "dropped", 1.0)], CPPO)
    client.record.forget()
    data = [client.datum("Q", "abc", 1.0) for _ in range(5)]
    monkeypatch.setattr(record_module, "MOST_EXAMPLES", 4)
    monkeypatch.setattr(record_module, "MOST_TOKENS", 3 * len(data[0].tokens))
    client.forward_backward(data, CPPO)
    client.step(1)
    (line,) = client.lines()
    assert (line["examples"], line["not_recorded"], line["tokens/trained"]) == (5, 2, 5 * len(data[0].tokens))
    assert client.pages()("0/step/1")["groups"][0]["size"] == 3


def test_several_targets_a_position_are_recorded_by_the_first(base, tmp_path):
    client = Client(base, tmp_path)
    one = client.datum("Q", "abc")
    several = np.stack([one.targets, one.targets + 1], 1)
    weights = np.stack([one.columns["weights"], one.columns["weights"] / 2], 1)
    client.forward_backward([replace(one, targets=several, columns={"weights": weights})], SFT)
    client.step(1)
    assert "".join(client.pages()("0/step/1/completion/100000.0.0")["tokens"]["text"]) == "abc<|im_end|>"
