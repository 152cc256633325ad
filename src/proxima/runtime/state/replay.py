"""A replay: another run's stored groups in place of generated ones, step by step, for another loss on the same tokens.

Reads metrics.jsonl, rollouts/ and the lock of that run, and writes nothing there.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from proxima.data import FieldError
from proxima.engine.http.answer_values import RouteShape
from proxima.model.chat.written_text import sampled_text
from proxima.model.pretrained import UnloadedModel
from proxima.rollout.collector import CollectedBatch, Collector, History
from proxima.rollout.generator import GroupGenerator, RolloutListener
from proxima.runtime.state.completion_columns import EXPERT_IDS, ROUTES
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import copied_journal
from proxima.runtime.state.rollouts import ROLLOUT_SCHEMA, read_table
from proxima.runtime.state.stored_completions import numpy_columns, stored_groups, stored_routes
from proxima.system.jsonl import utf8
from proxima.task.protocol import Row

CHECKED = 32  # completions of the first step that are decoded again


class StoredRollouts:
    """The groups of a run's steps, in its order. `inputs` are the hashes of what the run was trained with, by name.

    A group that the run used is judged again by the replay's own selection; one that it dropped before its advantages
    (dynamic sampling, too old) stays dropped.

    Args:
        path: the folder of the run; it is locked against writers until `close`.
        steps: how many of its steps are needed.

    Raises:
        FieldError: it is no run, is being trained, has fewer finished steps, lacks files, or is of another format.
    """

    replays: ClassVar[bool] = True
    rows: Sequence[Row] = ()  # prompts come with the groups

    def __init__(self, path: Path, steps: int) -> None:
        self.folder = RunFolder(path)
        self.steps = steps
        if not self.folder.metrics.is_file():
            raise self._refused("has no metrics.jsonl, so no finished step", "give the folder of a run")
        self.folder.lock_for_reading()
        try:
            self._versions = self._checked()
        except BaseException:
            self.close()
            raise
        self._step = 0

    def close(self) -> None:
        """Unlock the folder."""
        self.folder.release()

    def _checked(self) -> list[int]:
        """The policy version at the beginning of each step, after checking that all files are present and complete."""
        versions = [0]
        for record in self.folder.read_metrics():
            if record["kind"] == "train":
                versions.append(record["policy_version"])
        finished = len(versions) - 1
        if finished < self.steps:
            reason = f"is more than the {finished} finished steps of {self.folder.path}"
            raise FieldError("train.steps", self.steps, reason, remedy=f"set train.steps={finished} or fewer")
        with copied_journal(self.folder.journal) as journal:
            recorded = journal.checksums.read()
            self.inputs = journal.get("inputs") or {}
        for step in range(1, self.steps + 1):
            file = self.folder.rollout_file(step)
            name = f"rollouts/{file.name}"
            wrong = recorded[name].difference(file) if name in recorded else "is not in run.sqlite"
            if wrong:
                remedy = f"restore it, or replay fewer steps, train.steps={step - 1}"
                raise self._refused(f"needs {name}, which {wrong}", remedy)
            stored = _format_of(pq.read_schema(file))
            readable = _format_of(ROLLOUT_SCHEMA)
            if stored != readable:
                reason = f"stores its rollouts in the format {stored!r}; this version reads {readable!r}"
                raise self._refused(reason, "train that run again with this version")
        return versions

    def _refused(self, reason: str, remedy: str) -> FieldError:
        return FieldError("rollouts", str(self.folder.path), reason, remedy=remedy)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file that is read, by what it is called in a message."""
        out = {}
        for step in range(1, self.steps + 1):
            file = self.folder.rollout_file(step)
            with file.open("rb") as stream:
                out[f"rollouts: {file.name}"] = file_digest(stream, "sha256").hexdigest()
        return out

    def check_vocabulary(self, tokenizer: Any, vocabulary: int) -> None:
        """Refuse to train a model that reads the stored tokens as other text than the model that wrote them;
        `vocabulary` is the rows of its embedding.

        Raises:
            FieldError: a token id outside the vocabulary, or a text that differs.
        """
        file = self.folder.rollout_file(1)
        columns = ["tokens", "prompt_tokens", "text"]
        of_episodes = "sampled" in pq.read_schema(file).names
        if of_episodes:
            columns.append("sampled")
        table = read_table(file, columns)
        tokens = numpy_columns(table["tokens"])
        ids = np.concatenate([*tokens, *numpy_columns(table["prompt_tokens"])])
        remedy = "use a model with the vocabulary of the run that wrote the rollouts"
        if ids.size and ids.max() >= vocabulary:
            reason = f"has token {ids.max()}, and the vocabulary of model.path has {vocabulary}"
            raise self._refused(reason, remedy)
        texts = table["text"].to_pylist()
        sampled = numpy_columns(table["sampled"]) if of_episodes else [None] * len(texts)
        for row, text, mask in zip(tokens[:CHECKED], texts, sampled, strict=False):
            own = _of_last_turn(row, mask)
            if not self._reads_as(tokenizer, own, text):
                shown = utf8(sampled_text(tokenizer, own))
                reason = f"has a completion {text!r:.40}, which the tokenizer of model.path reads as {shown!r:.40}"
                raise self._refused(reason, remedy)

    @staticmethod
    def _reads_as(tokenizer: Any, ids: Any, text: str) -> bool:
        """True if a stored text holds its tokens, all but the last, of which a stop string may have used a part; or, in
        rollouts of earlier versions, without control tokens and without the stop string."""
        certain = utf8(sampled_text(tokenizer, ids[:-1])).rstrip("\ufffd")
        return certain in text or utf8(tokenizer.decode(ids, skip_special_tokens=True)).startswith(text)

    def check_routes(self, text_config: Any) -> None:
        """Refuse to train a mixture to which the stored experts do not apply; without any, nothing is replayed.

        Raises:
            FieldError: other layers, experts, or experts of each token.
        """
        shape = RouteShape.of(text_config)
        file = self.folder.rollout_file(1)
        if not set(ROUTES) <= set(pq.read_schema(file).names):
            return
        shapes = set[tuple[int, int, int]]()  # layers, experts of each token, the last expert
        for row in read_table(file, ["tokens", *ROUTES]).to_pylist():
            if row[EXPERT_IDS[0]]:
                for routes in stored_routes(row).values():
                    _, layers, each = routes.shape
                    shapes.add((layers, each, int(routes.max(initial=-1))))
        for layers, each, last in shapes:
            if (layers, each) != (len(shape.mixtures), shape.per_token) or last >= shape.experts:
                reason = f"has {each} experts per token in each of {layers} layers, numbered up to {last}"
                model = f"has {shape.per_token} in each of {len(shape.mixtures)}, of {shape.experts}"
                raise self._refused(f"{reason}, and model.path {model}", "set algorithm.routing_replay=off")

    def next(self) -> CollectedBatch:
        """The groups of the next step. Ages are those of the run that generated them, whose version the batch names."""
        self._step += 1
        used, dropped = stored_groups(self.folder.rollout_file(self._step))
        return CollectedBatch(
            groups=used,
            dropped=dropped,
            generated=used + tuple(group for group, _ in dropped),
            gen_batches=0,
            version=self._versions[self._step - 1],
            accepted=len(used),
            measured={"replayed": 1},
        )

    def state(self) -> dict[str, Any]:
        """JSON values that `load` restores."""
        return {"replayed": self._step}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._step = int(state["replayed"])


def _format_of(schema: pa.Schema) -> str:
    """The name and the number of the format of a file, as it says."""
    metadata = schema.metadata or {}
    return str(metadata.get(b"proxima", b"?").decode())


def _of_last_turn(tokens: NDArray[Any] | None, sampled: NDArray[Any] | None) -> NDArray[Any] | tuple[()]:
    """The tokens of the last turn, whose text the file has; `sampled` is None where there is one turn."""
    if tokens is None:
        return ()
    if sampled is None or sampled.all():
        return tokens
    given = np.flatnonzero(~sampled)  # tokens of others, between the turns
    return tokens[int(given[-1]) + 1 :]


class ReplayCollector(Collector):
    """The collector of a replay, in place of `BatchCollector`.

    Args:
        stored: the groups.
        generator: of the held-out questions alone; None where there are none.
        listener: notified of each state of a prompt.
    """

    stage = "read"

    def __init__(self, stored: StoredRollouts, generator: GroupGenerator | None, listener: RolloutListener) -> None:
        self.stored = stored
        self.generator = generator
        self.listener = listener

    def state(self) -> dict[str, Any]:
        return self.stored.state()

    async def collect(self, version: int, history: History = tuple) -> CollectedBatch:
        """The groups of the next step; `version` and `history`, of the replay, are unused."""
        batch = self.stored.next()
        self.listener.enqueued([group.prompt for group in batch.generated])
        for number, group in enumerate(batch.generated, 1):
            self.listener.scored(group)
            self.listener.rewarded(number, len(batch.generated))
        self.listener.taken(batch.uids)
        return batch


def rollouts_sha(hashes: Mapping[str, str]) -> str | None:
    """SHA-256 over the names and hashes of the rollout files among a run's `inputs`; None if there are none."""
    lines = [f"{name} {value}\n" for name, value in hashes.items() if name.startswith("rollouts: ")]
    if lines:
        return sha256("".join(lines).encode()).hexdigest()
    return None


def stored_rollouts(replayed: Path, steps: int, model: UnloadedModel, *, routes: bool) -> StoredRollouts:
    """The rollouts of `steps` steps of the run in the folder `replayed`; `routes`: those of the experts are replayed.

    Raises:
        FieldError: they lack a step, or are not of the model's tokens, or not of its experts where these are replayed.
    """
    source = StoredRollouts(replayed, steps)
    source.check_vocabulary(model.tokenizer, model.vocabulary)
    if routes:
        source.check_routes(model.config.get_text_config())
    return source
