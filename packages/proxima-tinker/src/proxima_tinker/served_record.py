"""What `proxima view` reads of a served model: its folder is a run folder with the curves of its optimizer steps and,
for each step, the examples whose gradient it applied.

A client sends tokens and numbers, no prompts and rewards. So this is what the columns of a run mean here:

    prompt, completion   an example up to its first target in the loss, and from it to its last target in the loss
    group                the examples of a step that have the same prompt
    advantage            `advantages`, and of cross_entropy `weights`: both are the factor of the gradient of log p
    behavior_log_prob    `logprobs`; null where the loss reads none
    sampled              False for a target between others that is not in the loss, as for an answer of a tool
    reward               unknown: the score is invalid, without an error
    policy_version       -1: which weights sampled a token is not told
"""

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from proxima.core.metrics import Metrics, Quantile, QuantileSketch, merge_metrics
from proxima.data.episode import Episode, Span
from proxima.experiments.run_reader import read_config
from proxima.model.chat.written_text import written_text
from proxima.model.pretrained import LoadedModel
from proxima.runtime.state.completion_columns import write_rows
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import ROLLOUT_SCHEMA
from proxima.system.atomic_files import atomic_writer, make_folder
from proxima.system.jsonl import lines_from, utf8
from proxima_tinker.datum import Array, Datum
from proxima_tinker.losses import CLIP, ClientLoss
from proxima_tinker.trained_model import ALPHA, PassResult

MOST_EXAMPLES = 512  # of a step that are recorded
MOST_TOKENS = 200_000  # of these
MOST_GROUPS = 100_000  # distance of the prompts' numbers between steps
# the columns that all examples have alike: there is no answer and no reward
OF_ALL = {"turn": 0, "temperature": 1.0, "used": True, "answer": "null", "valid": False, "parts": "{}"}


def _columns(datum: Datum, loss: ClientLoss, output: dict[str, Array]) -> dict[str, Any]:
    """Columns of the row of an example, after its forward pass: its prompt [P], and [T] each, of several targets a
    position the first, from the first target in the loss to the last; without any, the last target.

    `in_loss`: its gradient depends on the target. `factor`: of the gradient of log p. `keep`: in the loss, and no clip
    or mask of the loss took its gradient away.
    """
    length = len(datum.tokens)
    columns = {name: _first(values) for name, values in datum.columns.items()}
    zero = np.zeros(length, np.float32)
    behavior = None
    if loss.name == "cross_entropy":
        factor = columns.get("weights", zero)
        in_loss = factor != 0
        if "mask" in columns:
            in_loss &= columns["mask"] > 0
    else:
        behavior = columns.get("logprobs", zero)
        factor = columns.get("advantages", zero)
        in_loss = (factor != 0) | (behavior != 0)
        if "mask" in columns:
            in_loss = columns["mask"] > 0
    keep = in_loss
    if "keep" in output:
        keep = in_loss & (_first(output["keep"]) > 0)
    where = np.flatnonzero(in_loss)
    part = slice(length - 1, length)
    if len(where):
        part = slice(int(where[0]), int(where[-1]) + 1)
    example: dict[str, Any] = {
        "tokens": _first(datum.targets)[part],
        "log_prob": _first(output["logprobs"])[part],
        "in_loss": in_loss[part],
        "factor": factor[part],
        "keep": keep[part],
        "behavior_log_prob": None,
        "proximal_log_prob": None,
        "prompt_tokens": datum.tokens[: part.start + 1],
    }
    if behavior is not None:
        example["behavior_log_prob"] = behavior[part]
    if loss.whole and "proximal_logprobs" in columns:
        example["proximal_log_prob"] = columns["proximal_logprobs"][part]
    return example


def _first(values: Array) -> Array:
    if values.ndim == 1:
        return values
    return np.ascontiguousarray(values[:, 0])


def _bounded(metrics: Metrics) -> Metrics:
    """Quantiles as histograms: exact ones keep all values, and a client may never step."""
    exact = {name: metric for name, metric in metrics.items() if isinstance(metric, Quantile)}
    sketches = {name: QuantileSketch(QuantileSketch.histogram(q.values.log()), q.q) for name, q in exact.items()}
    return {**metrics, **sketches}


# ---- what waits for a step -----------------------------------------------------------------------------------------


@dataclass
class StepExamples:
    """The requests since the last step.

    examples: columns of those that are recorded. totals: sums over all examples, `k3` in nats; `measured` are the
    targets in the loss that have a behavior log-prob. of_loss: the statistics of the losses.
    """

    examples: list[dict[str, Any]] = field(default_factory=list)
    algorithms: list[dict[str, Any]] = field(default_factory=list)
    of_loss: Metrics = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, data: Sequence[Datum], loss: ClientLoss, result: PassResult) -> None:
        """A request whose gradient was accumulated."""
        algorithm = {"preset": loss.name, **loss.algorithm}
        if any(name in CLIP for datum in data for name in datum.columns):
            algorithm["surrogate"] = {"kind": f"{loss.name} with bounds of each example"}
        if algorithm not in self.algorithms:
            self.algorithms.append(algorithm)
        totals = self.totals
        totals["loss"] += result.loss
        self.of_loss = merge_metrics([self.of_loss, _bounded(result.metrics)])
        for datum, output in zip(data, result.outputs, strict=True):
            length = len(datum.tokens)
            example = _columns(datum, loss, output)
            inside = example["in_loss"]
            behavior = example["behavior_log_prob"]
            totals["examples"] += 1
            totals["tokens"] += length
            totals["targets"] += inside.sum()
            if behavior is not None:
                log_ratio = (example["log_prob"] - behavior)[inside].astype(np.float64)
                totals["measured"] += inside.sum()
                totals["masked"] += (inside & ~example["keep"]).sum()
                totals["k3"] += (np.exp(np.minimum(log_ratio, 20)) - 1 - log_ratio).sum()
            if len(self.examples) < MOST_EXAMPLES and totals["recorded"] + length <= MOST_TOKENS:
                self.examples.append(example)
                totals["recorded"] += length

    def metrics(self) -> dict[str, float]:
        """Those of a step, by the names that the viewer explains."""
        totals = self.totals
        number = int(totals["examples"])
        targets = totals["targets"]
        measured = totals["measured"]
        out: dict[str, float] = {"examples": number, "tokens/trained": int(totals["tokens"])}
        if number:  # a step after a restart knows no loss
            out["loss"] = totals["loss"]
        out |= {name: metric.value for name, metric in self.of_loss.items()}
        if targets:
            out |= {"length/mean": targets / number, "loss_per_token": totals["loss"] / targets}
        if measured:
            out |= {"masked_fraction": totals["masked"] / measured, "mismatch/k3_kl": totals["k3"] / measured}
        if number > len(self.examples):
            out["not_recorded"] = number - len(self.examples)
        return out


# ---- the folder ----------------------------------------------------------------------------------------------------


class ServedRecord:
    """Writes the record of one model. Calls come from one thread at a time.

    Args:
        folder: of the model; the run's files stand beside others. Nothing is written before the first step.
        base: its tokenizer makes texts of tokens; the viewer finds it by the path.
        spec: what is trained, a `LoraConfig` of the SDK.

    Attributes: `pending`, what waits for the next step.

    Raises:
        UserError: metrics.jsonl or config.yaml is damaged.
    """

    def __init__(self, folder: Path, base: LoadedModel, spec: dict[str, Any]) -> None:
        self.files = RunFolder(folder)
        self.spec = spec
        self.tokenizer = base.tokenizer
        self.stops = base.stop_tokens
        if Path(base.path).exists():
            self.path = str(Path(base.path).resolve())
        else:
            self.path = base.path
        if self.files.metrics.exists():  # a crash may have left a part of a line
            os.truncate(self.files.metrics, max((end for _, end in lines_from(self.files.metrics)), default=0))
        self.last = max((int(line["step"]) for line in self.files.read_metrics()), default=0)
        self.before = time.monotonic()
        self.began = self.before - self.files.elapsed()  # its clock goes on
        self.config = read_config(self.files.config)
        self.pending = StepExamples()

    def forget(self) -> None:
        """The gradients since the last step were dropped, and no step will apply them."""
        self.pending = StepExamples()

    def step(self, number: int, metrics: dict[str, Any]) -> None:
        """The optimizer step `number`, from 1, with what it measured. One that was written before is replaced, all but
        its line of metrics.

        Raises:
            OSError: the disk is full or read-only.
        """
        pending = self.pending
        now = time.monotonic()
        self.pending = StepExamples()
        make_folder(self.files.rollouts)
        self._write_config(pending.algorithms)
        if pending.examples:
            with atomic_writer(self.files.rollout_file(number)) as file:
                write_rows(file, ROLLOUT_SCHEMA, self._rows(number, pending.examples))
        if number > self.last:
            times = {"time": now - self.began, "time/step": now - self.before}
            self.files.append_metrics({"kind": "train", "step": number} | times | pending.metrics() | metrics)
            self.last = number
        self.before = now

    def _write_config(self, algorithms: Sequence[dict[str, Any]]) -> None:
        """Write config.yaml if the loss is not the one that it tells."""
        rank = self.spec["rank"]
        trained = f"LoRA of rank {rank}" if rank else "all weights"
        told = [{"proximal": "behavior"} | one | {"preset": f"{one['preset']}, {trained},"} for one in algorithms]
        before = self.config.get("algorithm")
        if before is not None and before not in told:
            told.append(before)
        algorithm = told[0] if told else None
        if len(told) > 1:  # the viewer explains all steps by one loss
            algorithm = {"preset": f"several losses, {trained},", "surrogate": {"kind": "a loss that varies"}}
        if self.config and algorithm == before:
            return
        lora = {"rank": rank, "alpha": ALPHA} if rank else None
        self.config = {
            "model": {"path": self.path, "lora": lora},
            "lora_config": self.spec,
            "algorithm": algorithm,
            "train": {"updates_per_step": 1, "epochs_per_step": 1},
        }
        self.files.write_config(yaml.safe_dump(self.config, sort_keys=False))

    def _rows(self, step: int, examples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The examples with equal prompts together, in the order in which they came."""
        groups: dict[bytes, list[dict[str, Any]]] = {}
        for example in examples:
            groups.setdefault(example["prompt_tokens"].tobytes(), []).append(example)
        questions = self._texts([together[0]["prompt_tokens"] for together in groups.values()])
        rows = []
        for index, (question, together) in enumerate(zip(questions, groups.values(), strict=True)):
            uid = step * MOST_GROUPS + index
            for sample, example in enumerate(together):
                place = {"step": step, "prompt_uid": uid, "sample": sample, "question": question}
                rows.append(place | self._row(example))
        return rows

    def _row(self, example: dict[str, Any]) -> dict[str, Any]:
        """The columns of an example besides its place and the text of its prompt."""
        tokens = example["tokens"]
        in_loss = example["in_loss"]
        factor = example["factor"]
        behavior = example["behavior_log_prob"]
        spans = self._spans(tokens, in_loss)
        row = OF_ALL | example
        row |= {
            "text": spans[-1].text,
            "sampled_log_prob": np.full(len(tokens), np.nan) if behavior is None else behavior,
            "policy_version": np.full(len(tokens), -1),
            "finish_reason": "length",
            "sampled": None,
            "episode": None,
            "outcome": "trained",
            "advantage": 0.0,
            "token_advantage": factor,
        }
        if int(tokens[-1]) in self.stops:
            row["finish_reason"] = "stop"
        if len(spans) > 1:
            row["sampled"] = in_loss
            row["episode"] = Episode(spans=tuple(spans)).to_json()
        if in_loss.any():
            row["advantage"] = float(factor[in_loss].mean())
        else:  # the server runs an example outside the loss, but nothing follows from it
            row["outcome"] = "skipped_zero_advantage"
        if (factor == factor[0]).all():
            row["token_advantage"] = None
        return row

    def _spans(self, tokens: Array, in_loss: Array) -> list[Span]:
        """The pieces of an example in and out of the loss: the first is in it, and every other one."""
        pieces = np.split(tokens, np.flatnonzero(np.diff(in_loss)) + 1)
        texts = self._texts(pieces)
        texts[::2] = [utf8(written_text(self.tokenizer, ids, ends=self.stops).text) for ids in pieces[::2]]
        spans = []
        for i, (ids, text) in enumerate(zip(pieces, texts, strict=True)):
            sampled = i % 2 == 0
            role = "assistant" if sampled else "context"
            spans.append(Span(role=role, tokens=len(ids), text=text, sampled=sampled, turn=i // 2))
        return spans

    def _texts(self, ids: Sequence[Array]) -> list[str]:
        texts = self.tokenizer.batch_decode([part.tolist() for part in ids], skip_special_tokens=True)
        return [utf8(text) for text in texts]
