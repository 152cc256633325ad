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
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from proxima.data import Completion, Group, Prompt, Score, Trajectory
from proxima.data.episode import Episode, Span
from proxima.data.flow import Key
from proxima.experiments.run_reader import read_config
from proxima.model import LoadedModel
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import write_rollouts
from proxima.system.atomic_files import make_folder
from proxima.system.jsonl import complete_length
from proxima.train.completion_record import CompletionRecord
from proxima.train.objectives import TokenStatistics
from proxima_tinker.datum import Array, Datum
from proxima_tinker.losses import CLIP, by_surrogate, chosen_kinds, loss_spec
from proxima_tinker.trained_model import ALPHA, ModelSpec, PassResult
from proxima_tinker.wire import ForwardBackward

MOST_EXAMPLES, MOST_TOKENS = 512, 200_000  # of a step that are recorded
MOST_GROUPS = 100_000  # distance of the prompts' numbers between steps
UNKNOWN_VERSION = -1
CLIPPED = {"ppo": "ppo_clip", "cispo": "cispo"}  # losses of the SDK that bound the ratio, and their surrogates
VARYING = {"kind": "a loss that varies"}  # the viewer explains all steps by one loss, and says so of this one


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example of a request after its forward pass, [T] each, of several targets a position the first.

    in_loss: its gradient depends on the target; keep: and no clip or mask of the loss took that away.
    behavior, proximal: nats, None if the loss does not read them.
    """

    tokens: Array
    targets: Array
    log_prob: Array
    in_loss: Array
    keep: Array
    factor: Array
    behavior: Array | None
    proximal: Array | None

    @classmethod
    def of(cls, asked: ForwardBackward, datum: Datum, output: dict[str, Array]) -> "Example":
        columns = {name: _first(values) for name, values in datum.columns.items()}
        log_prob = _first(output["logprobs"])
        zero = np.zeros(len(log_prob), np.float32)
        behavior = None if asked.loss == "cross_entropy" else columns.get("logprobs", zero)
        factor = columns.get("weights" if behavior is None else "advantages", zero)
        in_loss = factor != 0 if behavior is None else (factor != 0) | (behavior != 0)
        if "mask" in columns:
            in_loss = (columns["mask"] > 0) & (in_loss if behavior is None else True)
        if "keep" in output:
            keep = output["keep"] > 0
        else:
            keep = np.ones_like(in_loss) if behavior is None else _unclipped(asked, columns, log_prob - behavior)
        return cls(
            tokens=datum.tokens,
            targets=_first(datum.targets),
            log_prob=log_prob,
            in_loss=in_loss,
            keep=keep & in_loss,
            factor=factor,
            behavior=behavior,
            proximal=columns.get("proximal_logprobs") if by_surrogate(asked.loss, asked.config) else None,
        )

    @property
    def response(self) -> slice:
        """The positions from the first target in the loss to the last; without any, the last position."""
        where = np.flatnonzero(self.in_loss)
        return slice(int(where[0]), int(where[-1]) + 1) if len(where) else slice(len(self.tokens) - 1, len(self.tokens))

    @property
    def prompt(self) -> Array:
        """Token ids that the response is conditioned on."""
        return np.asarray(self.tokens[: self.response.start + 1], np.int32)


def _first(values: Array) -> Array:
    return values if values.ndim == 1 else np.ascontiguousarray(values[:, 0])


def _bounds(asked: ForwardBackward) -> tuple[float, float]:
    """The range of the ratio that a clipped loss of the SDK has by its config."""
    low, high = (float(asked.config.get(name, default)) for name, default in CLIP.items())
    return low, high


def _unclipped(asked: ForwardBackward, columns: dict[str, Array], log_ratio: Array) -> Array:
    """[T] bool, as `keep` of `ppo_clip` and `cispo`; all True for a loss that clips nothing."""
    if asked.loss not in CLIPPED:
        return np.ones(len(log_ratio), np.bool_)
    low, high = (columns.get(name, np.float32(bound)) for name, bound in zip(CLIP, _bounds(asked), strict=True))
    ratio = np.exp(np.clip(log_ratio, -20, 20))
    below, above, advantage = ratio < low, ratio > high, columns.get("advantages", np.zeros_like(ratio))
    if asked.loss == "ppo":
        below, above = below & (advantage < 0), above & (advantage > 0)
    return np.asarray(~(below | above))


# ---- the loss, as the recipe of a run tells it ---------------------------------------------------------------------


def algorithm_of(asked: ForwardBackward) -> dict[str, Any]:
    """The `algorithm` of a config.yaml by which the viewer explains the tokens of a request."""
    if by_surrogate(asked.loss, asked.config):
        kinds = chosen_kinds(asked.loss, asked.config)
        told = {slot: {"kind": kind, **asdict(loss_spec(slot, kind, asked.config))} for slot, kind in kinds.items()}
        correction = [told["correction"]] if "correction" in told else []
        return {"name": kinds["surrogate"], **told, "correction": correction}
    return {"name": asked.loss, "surrogate": _named(asked), "aggregate": {"kind": "token_sum"}}


def _named(asked: ForwardBackward) -> dict[str, Any] | None:
    """The surrogate that a loss of the SDK is, with the same gradient; None for one that has none."""
    low, high = _bounds(asked)
    if asked.loss in CLIPPED:
        if any(name.startswith("clip_") for datum in asked.data for name in datum.columns):
            return {"kind": f"{asked.loss} with bounds of each example"}
        # the difference of two decimals is not the decimal that was meant
        return {"kind": CLIPPED[asked.loss], "epsilon_low": round(1 - low, 9), "epsilon_high": round(high - 1, 9)}
    if asked.loss == "importance_sampling":  # -A r: the clip range is everything
        return {"kind": "ppo_clip", "epsilon_low": 1.0, "epsilon_high": float("inf")}
    return {"kind": "dro", "beta": asked.config.get("beta")} if asked.loss == "dro" else None


# ---- what waits for a step -----------------------------------------------------------------------------------------


@dataclass
class StepExamples:
    """The requests since the last step.

    examples: those that are recorded. weighted: metrics of requests by name, each value with the number of its targets
    in the loss. totals: of all examples, `k3` in nats; `measured` are the targets in the loss that have a behavior
    log-prob.
    """

    examples: list[Example] = field(default_factory=list)
    algorithms: list[dict[str, Any]] = field(default_factory=list)
    weighted: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, asked: ForwardBackward, result: PassResult) -> None:
        if (algorithm := algorithm_of(asked)) not in self.algorithms:
            self.algorithms.append(algorithm)
        before = self.totals["targets"]
        for datum, output in zip(asked.data, result.outputs, strict=True):
            self._add(Example.of(asked, datum, output))
        for name, value in result.metrics.items():
            short, _, kind = name.rpartition(":")
            if kind == "sum":
                self.totals[f"sum {short}"] += value
            else:
                self.weighted.setdefault(short or name, []).append((value, self.totals["targets"] - before))

    def _add(self, example: Example) -> None:
        length, totals, inside = len(example.tokens), self.totals, example.in_loss
        totals["examples"] += 1
        totals["tokens"] += length
        totals["targets"] += inside.sum()
        if example.behavior is not None:
            log_ratio = (example.log_prob - example.behavior)[inside].astype(np.float64)
            totals["measured"] += inside.sum()
            totals["masked"] += (inside & ~example.keep).sum()
            totals["k3"] += (np.exp(np.minimum(log_ratio, 20)) - 1 - log_ratio).sum()
        if len(self.examples) < MOST_EXAMPLES and totals["recorded"] + length <= MOST_TOKENS:
            self.examples.append(example)
            totals["recorded"] += length

    def metrics(self) -> dict[str, float]:
        """Those of a step, by the names that the viewer explains."""
        totals = self.totals
        number, targets, measured = int(totals["examples"]), totals["targets"], totals["measured"]
        out: dict[str, float] = {"examples": number, "tokens/trained": int(totals["tokens"])}
        out |= {name[4:]: value for name, value in totals.items() if name.startswith("sum ")}
        if targets:
            out |= {"length/mean": targets / number, "loss_per_token": totals["sum loss"] / targets}
        if measured:
            out |= {"masked_fraction": totals["masked"] / measured, "mismatch/k3_kl": totals["k3"] / measured}
        if number > len(self.examples):
            out["not_recorded"] = number - len(self.examples)
        return out | {name: _combined(name, values) for name, values in self.weighted.items()}


def _combined(name: str, values: Sequence[tuple[float, float]]) -> float:
    """A metric of several requests: the extreme of extremes, else the mean over targets in the loss."""
    if name.endswith(("_max", "_min")):
        return (max if name.endswith("_max") else min)(value for value, _ in values)
    weights = [weight for _, weight in values]
    return float(np.average([value for value, _ in values], weights=weights if any(weights) else None))


# ---- the folder ----------------------------------------------------------------------------------------------------


class ServedRecord:
    """Writes the record of one model. Calls come from one thread at a time.

    Args:
        folder: of the model; the run's files stand beside others. Nothing is written before the first step.
        base: its tokenizer makes texts of tokens.
        spec: what is trained.
        path: of the base, where the viewer finds the tokenizer.

    Raises:
        UserError: metrics.jsonl or config.yaml is damaged.
    """

    def __init__(self, folder: Path, base: LoadedModel, spec: ModelSpec, path: str) -> None:
        self.files = RunFolder(folder)
        self.spec, self.tokenizer, self.stops = spec, base.tokenizer, base.stop_tokens
        self.path = str(Path(path).resolve()) if Path(path).exists() else path
        if self.files.metrics.exists():  # a crash may have left a part of a line
            os.truncate(self.files.metrics, complete_length(self.files.metrics))
        written = self.files.read_metrics()
        self.last = max((int(line["step"]) for line in written), default=0)
        self.before = time.monotonic()
        self.began = self.before - max((float(line["time"]) for line in written), default=0.0)  # its clock goes on
        self.config = read_config(self.files.config)
        self.pending = StepExamples()

    def add(self, asked: ForwardBackward, result: PassResult) -> None:
        """A request whose gradient was accumulated."""
        self.pending.add(asked, result)

    def forget(self) -> None:
        """The gradients since the last step were dropped, and no step will apply them."""
        self.pending = StepExamples()

    def step(self, number: int, metrics: dict[str, Any]) -> None:
        """The optimizer step `number`, from 1, with what it measured. One that was written before is replaced, all but
        its line of metrics.

        Raises:
            OSError: the disk is full or read-only.
        """
        pending, now = self.pending, time.monotonic()
        self.pending = StepExamples()
        make_folder(self.files.path)
        self._write_config(pending.algorithms)
        if pending.examples:
            groups, records = self._groups(number, pending.examples)
            write_rollouts(self.files.rollout_file(number), number, groups, records)
        if number > self.last:
            named = {"lr" if name == "learning_rate" else name: value for name, value in metrics.items()}
            times = {"time": now - self.began, "time/step": now - self.before}
            self.files.append_metrics({"kind": "train", "step": number} | times | pending.metrics() | named)
            self.last = number
        self.before = now

    def _write_config(self, algorithms: Sequence[dict[str, Any]]) -> None:
        """Write config.yaml if the loss is not the one that it tells."""
        before = self.config.get("algorithm")
        told = [self._labelled(algorithm) for algorithm in algorithms]
        if before is not None and before not in told:
            told.append(before)
        if len(told) > 1:
            told = [self._labelled({"name": "several losses", "surrogate": VARYING})]
        algorithm = told[0] if told else None
        if self.config and algorithm == before:
            return
        lora = {"rank": self.spec.rank, "alpha": ALPHA} if self.spec.rank else None
        self.config = {
            "model": {"path": self.path, "lora": lora},
            "lora_config": self.spec.to_json(),
            "algorithm": algorithm,
            "train": {"updates_per_step": 1, "epochs_per_step": 1},
        }
        self.files.write_config(yaml.safe_dump(self.config, sort_keys=False))

    def _labelled(self, algorithm: dict[str, Any]) -> dict[str, Any]:
        """With the title of the run's page in the place of its name."""
        trained = f"LoRA of rank {self.spec.rank}" if self.spec.rank else "all weights"
        fields = {name: value for name, value in algorithm.items() if name != "name"}
        return {"preset": f"{algorithm['name']}, {trained},", "proximal": "behavior", **fields}

    def _groups(self, step: int, examples: Sequence[Example]) -> tuple[list[Group], dict[Key, CompletionRecord]]:
        """The examples with equal prompts together, in the order in which they came."""
        members: dict[bytes, list[Example]] = {}
        for example in examples:
            members.setdefault(example.prompt.tobytes(), []).append(example)
        groups, records = [], {}
        questions = self._texts([together[0].prompt for together in members.values()])
        for index, (question, together) in enumerate(zip(questions, members.values(), strict=True)):
            uid = step * MOST_GROUPS + index
            messages = ({"role": "user", "content": question},)
            prompt = Prompt(uid=uid, messages=messages, tokens=together[0].prompt)
            completions = tuple(self._completion(uid, sample, example) for sample, example in enumerate(together))
            for completion, example in zip(completions, together, strict=True):
                records[completion.key] = _recorded(prompt, completion, example)
            unknown = Score(value=float("nan"), valid=False)
            groups.append(Group(prompt=prompt, completions=completions, scores=(unknown,) * len(together)))
        return groups, records

    def _completion(self, uid: int, sample: int, example: Example) -> Completion:
        part = example.response
        tokens, in_loss = np.asarray(example.targets[part], np.int32), example.in_loss[part]
        behavior = np.full(len(tokens), np.nan, np.float32) if example.behavior is None else example.behavior[part]
        edges = [0, *(np.flatnonzero(np.diff(in_loss)) + 1).tolist(), len(tokens)]
        pieces = list(pairwise(edges))
        texts = self._texts([tokens[start:end] for start, end in pieces])
        spans = [  # the first is in the loss, and every other one
            Span(
                role="context" if i % 2 else "assistant", tokens=end - start, text=text, sampled=not i % 2, turn=i // 2
            )
            for i, ((start, end), text) in enumerate(zip(pieces, texts, strict=True))
        ]
        several = len(spans) > 1
        return Completion(
            prompt_uid=uid,
            sample=sample,
            tokens=tokens,
            text=texts[-1],
            sampled_log_prob=behavior,
            untruncated_log_prob=behavior,
            policy_version=np.full(len(tokens), UNKNOWN_VERSION, np.int32),
            finish_reason="stop" if int(tokens[-1]) in self.stops else "length",
            temperature=1.0,
            sampled=in_loss if several else None,
            episode=Episode(spans=tuple(spans)) if several else None,
        )

    def _texts(self, ids: Sequence[Array]) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode([part.tolist() for part in ids], skip_special_tokens=True)
        return texts


def _recorded(prompt: Prompt, completion: Completion, example: Example) -> CompletionRecord:
    part, in_loss = example.response, example.in_loss[example.response]
    trajectory = Trajectory(
        uid=prompt.uid,
        sample=completion.sample,
        group=prompt.uid,
        prompt_tokens=prompt.tokens,
        tokens=completion.tokens,
        behavior_log_prob=None if example.behavior is None else example.behavior[part],
        policy_version=completion.policy_version,
        advantage=example.factor[part],
        loss_mask=in_loss,
        sampled=completion.sampled,
    )
    statistics = TokenStatistics(
        log_prob=example.log_prob[part],
        keep=example.keep[part],
        proximal_log_prob=None if example.proximal is None else example.proximal[part],
    )
    outcome, advantage = "skipped_zero_advantage", 0.0  # the server runs it, but nothing follows from it
    if in_loss.any():
        outcome, advantage = "trained", float(example.factor[part][in_loss].mean())
    return CompletionRecord(outcome=outcome, advantage=advantage, trajectory=trajectory, statistics=statistics)
