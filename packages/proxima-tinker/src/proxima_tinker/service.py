"""Sessions, models, samplers and checkpoints, and the requests of each model in their order.

A client numbers the requests of a model. Each is accepted once, into the journal, runs when all earlier ones have, and
its answer stays for a client that asks again. After a restart, models go on from their last state on disk: requests
since then run again.
"""

import asyncio
import json
import secrets
import shutil
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from starlette.exceptions import HTTPException
from tinker import types
from torch import Tensor

from proxima.data import UserError, renamed, require
from proxima.engine.local.local_engine import Local
from proxima.model.files import base_in_memory
from proxima.model.load import load, save_trained
from proxima.model.positions import fix_positions, require_length
from proxima.model.precision import DECIDED, dtype_choice
from proxima.model.pretrained import DTYPES, LoadedModel, load_config
from proxima.runtime.state.folder import FolderLock
from proxima.runtime.watch.disk import Disk
from proxima.system.atomic_files import atomic_folder, write_atomic
from proxima.system.damage import Checksum
from proxima.system.full_disk import as_disk_full, is_disk_full
from proxima_tinker.folder_checksums import damage_beside_checksums, write_checksums
from proxima_tinker.losses import ClientLoss
from proxima_tinker.request_log import MOST_WAITING, Answer, RequestLog, recorded_model
from proxima_tinker.samplers import SampleOrder, Samplers
from proxima_tinker.served_record import ServedRecord
from proxima_tinker.served_settings import Settings
from proxima_tinker.steady_time import date
from proxima_tinker.trained_model import SLOTS, TrainedModel, check_adam
from proxima_tinker.wire import forward_backward_answer, read_forward_backward
from proxima_tinker.workers import ComputeLane, Workers

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
MOST_BYTES = 1 << 30  # of the requests of one model that wait
SNAPSHOTS = 8  # unnamed weights for samplers that are kept for each model
SAMPLES_KEPT = 600.0  # seconds; the SDK asks at once, and samples again what is gone
MOST_SAMPLES = 16_384  # that are kept
GAP_SECONDS = 60.0  # a request waits so long for an earlier one that has not come
LEFT_SECONDS = 900.0  # without a heartbeat, after which a client has left; the SDK sends one every ten seconds
JOURNAL = "journal.sqlite"
STATE_EVERY = 20  # a state is written when the work since the last one took so many times as long as writing it
OTHERS = "load or sample other weights"
LOAD = "load saved weights into the model, or make a new one from them"
RUNS_AGAIN = "Ctrl-C ends the server, which writes the weights when it is started again"
STATE = "optimizer.safetensors"  # of a checkpoint, with its weights and moments; of a sampler its weights alone
# by request: the part of the path, and what `STATE` has of each parameter; in its place, external weights have a folder
# that peft, or `AutoModelForCausalLM` for all weights, loads
SAVES: dict[str, tuple[str, Sequence[str]]] = {
    "save_weights": ("weights", SLOTS[:-1]),
    "save_weights_for_sampler": ("sampler_weights", SLOTS[:1]),
    "save_weights_external": ("external_weights", ()),
}


class Model:
    """A model of a client.

    Args:
        record: as in the journal.
        lane: where it computes.

    Attributes: `trained`, None until it is needed; `waiting`, bytes of the requests that wait by their number;
    `answered`, the last request that an earlier process has answered; `seen`, what the viewer reads, begun with the
    first request that changes the model; `lost`, why its weights can't be known any more: a request that has to run
    again is damaged; seconds of work since the last state, and of writing that.
    """

    def __init__(self, id: str, record: dict[str, Any], lane: ComputeLane) -> None:
        self.id = id
        self.record = record
        self.lane = lane
        self.next_seq = record["state_seq"] + 1
        self.answered = -1
        self.trained: TrainedModel | None = None
        self.seen: ServedRecord | None = None
        self.lost: UserError | None = None
        self.waiting: dict[int, int] = {}
        self.arrived = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.used = 0.0
        self.work_seconds = 0.0
        self.state_seconds = 1.0


def load_base(settings: Settings) -> LoadedModel:
    """The model of a server, with the factors of its positions fixed."""
    longest = settings.max_length
    with renamed("model.max_length", "--max-length"):
        require_length(load_config(settings.path), longest)
    loaded = load(settings.path, dtype=torch.float32, device=settings.device, max_length=longest)
    fixed = fix_positions(loaded.model, longest, loaded.max_length, "--max-length")
    bound = "has no effect: the position factors of this model do not depend on it"
    require(longest is None or fixed is not None, "--max-length", longest, bound, remedy="leave it out")
    return loaded


def with_dtype(settings: Settings, log: Callable[[str], None]) -> Settings:
    """The settings with a dtype in place of `auto`: that of the folder, so that its models go on as they began, also on
    another kind of processor; in a new folder, the faster one on this machine, which is logged."""
    if settings.dtype != "auto":
        return settings
    kept = recorded_model(settings.folder / JOURNAL)
    for dtype in DECIDED:
        decided = replace(settings, dtype=dtype)
        if kept == _named(decided):
            return decided
    choice = dtype_choice(settings.device)
    log(f"auto  --dtype {choice.dtype}: {choice.reason}")
    return replace(settings, dtype=choice.dtype)


def _named(settings: Settings) -> str:
    """The model by which a folder knows that it is its own."""
    return f"{settings.path} in {settings.dtype}"


class Service:
    """A server's state, used from one event loop; tensors are touched in the threads of `Workers`.

    Args:
        threads: of torch, of each worker.

    Raises:
        UserError: the model can't be loaded, or the folder is of another one.
    """

    def __init__(self, settings: Settings, threads: int, log: Callable[[str], None]) -> None:
        self.name = settings.name or settings.path
        self.log = log
        settings.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(settings.folder / "lock", remedy="stop that server, or choose another --folder")
        self.settings = settings = with_dtype(settings, log)
        self.journal = RequestLog(settings.folder / JOURNAL, _named(settings))
        loaded = load_base(settings)
        loaded.model.requires_grad_(False)
        self.vocabulary = int(loaded.model.config.get_text_config().vocab_size)
        self.base: LoadedModel = replace(loaded, base=base_in_memory(settings.path, None, torch.float32))
        self.workers = Workers(settings.workers, threads)
        spec = Local(slots=settings.slots, dtype=settings.dtype, interrupt="finish")
        self.samplers = Samplers(spec, self.workers, settings.engines)
        # that are awaited, or not in the journal; of samples the tasks that make them, which `cancel` and `close` stop
        self.answers: dict[str, asyncio.Future[Answer]] = {}
        self._sampled: deque[tuple[float, str]] = deque()  # samples by the time when they were ready
        self._waiting = Counter[str]()  # samples by their sampler
        self.models: dict[str, Model] = {}
        self._seen: dict[str, float] = {}  # sessions, and when they were last heard of

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Go on with the models of an earlier process, whose requests since their last states run again."""
        for part in self.settings.folder.glob("models/*/*weights/.*"):  # what a kill left of checkpoints
            shutil.rmtree(part, ignore_errors=True)
        for id, record in self.journal.all("model"):
            self._add_model(id, record)
            self._seen[record["session"]] = time.monotonic()

    def create_session(self, facts: Mapping[str, Any]) -> str:
        id = secrets.token_hex(8)
        self.journal.put("session", id, dict(facts))
        self.heartbeat(id)
        return id

    def known(self, kind: str, id: str) -> dict[str, Any]:
        """The record of a session or a sampler."""
        record: dict[str, Any] | None = self.journal.get(kind, id)
        if record is None:
            raise HTTPException(404, f"no {kind} {id!r:.80}")
        return record

    def heartbeat(self, session: str) -> None:
        self.known("session", session)
        self._seen[session] = time.monotonic()

    async def finish_session(self, session: str) -> None:
        """Write the state of a session's models, and free their memory; a later request loads them again."""
        for model in [m for m in self.models.values() if m.record["session"] == session]:
            self.samplers.drop(model.id)
            await model.lane.run(self._tried, f"{model.id} rests", self._rest, model)

    async def tidy(self) -> None:
        """Every minute, forever: delete what has expired, free the memory of clients that have left."""
        while True:
            await asyncio.sleep(60)
            try:
                for path, record in self.journal.all("checkpoint"):
                    if record["expires_at"] is not None and record["expires_at"] < date():
                        await self.delete_checkpoint(path)
                for session, seen in list(self._seen.items()):
                    if time.monotonic() - seen > LEFT_SECONDS:
                        del self._seen[session]
                        await self.finish_session(session)
            except Exception as error:
                self._log_error("tidying", error)

    def _rest(self, model: Model) -> None:
        if model.trained is not None and not model.waiting:
            self._write_state(model, model.next_seq - 1)
            model.trained = None

    async def _make_room(self) -> None:
        """Let the models rest that were not used for longest, if there are too many in memory."""
        loaded = sorted((m for m in self.models.values() if m.trained is not None), key=lambda model: model.used)
        idle = [model for model in loaded if not model.waiting]
        for model in idle[: max(0, len(loaded) - self.settings.models)]:
            await model.lane.run(self._tried, f"{model.id} rests", self._rest, model)

    def _tried(self, what: str, call: Callable[..., object], *arguments: Any) -> bool:
        """Call; True if nothing failed, as on a full disk. What failed is in the log."""
        try:
            call(*arguments)
        except Exception as error:
            self._log_error(what, error)
            return False
        return True

    def _log_error(self, what: str, error: Exception) -> None:
        if is_disk_full(error):
            self.log(f"{what}: {error.filename or self.settings.folder}: {error.strerror}")
            return
        self.log(f"{what}: {''.join(traceback.format_exception(error))}")

    # ---- requests of a model -----------------------------------------------------------------------------------------

    def create_model(self, session: str, number: int, spec: types.LoraConfig, metadata: Any) -> str:
        """A new model, whose request 0 builds it; returns its id."""
        self.heartbeat(session)
        id = f"{session}:train:{number}"
        if id not in self.models:
            facts = {"session": session, "spec": spec.model_dump(), "user_metadata": metadata, "created": date()}
            record = facts | {"state_seq": -1, "steps": 0}
            self.journal.put("model", id, record)
            self._add_model(id, record)
        return id

    def _add_model(self, id: str, record: dict[str, Any]) -> None:
        model = self.models[id] = Model(id, record, ComputeLane(self.workers))
        model.waiting = self.journal.pending(id, record["state_seq"])
        model.answered = self.journal.last_answered(id)
        model.task = asyncio.ensure_future(self._serve(model))

    def model(self, id: str) -> Model:
        if id not in self.models:
            raise HTTPException(404, f"no model {id!r:.80}")
        return self.models[id]

    async def submit(self, model_id: str, seq: int, kind: str, body: bytes) -> str:
        """Accept a request of a model and return its id; one that was accepted before is not run again."""
        model = self.model(model_id)
        request_id = f"{model_id}:{seq}"
        self.heartbeat(model.record["session"])
        if seq in model.waiting or seq < max(model.next_seq, model.answered + 1):  # `answer` tells if it is new
            return request_id
        full = len(model.waiting) >= MOST_WAITING or sum(model.waiting.values()) + len(body) > MOST_BYTES
        if full and seq > model.next_seq:  # for the next one all others wait
            raise HTTPException(429, f"{len(model.waiting)} requests of this model wait")
        if await asyncio.to_thread(self.journal.accept, model_id, seq, kind, body) and seq >= model.next_seq:
            model.waiting[seq] = len(body)
            model.arrived.set()
        return request_id

    async def _serve(self, model: Model) -> None:
        """Run the requests of a model in their order, forever. While the disk has no room for its weights, it waits."""
        disk = Disk(self.settings.folder, self.log, model.id, RUNS_AGAIN)
        while True:
            while model.next_seq not in model.waiting:
                if model.next_seq <= model.answered:  # it changed nothing
                    model.next_seq += 1
                    continue
                model.arrived.clear()
                try:
                    longest = GAP_SECONDS if model.waiting else None
                    async with asyncio.timeout(longest):
                        await model.arrived.wait()
                except TimeoutError:
                    await self._fail_gap(model)
            seq = model.next_seq
            model.used = time.monotonic()

            async def attempt(seq: int = seq) -> tuple[Answer, bool]:
                return await model.lane.run_parts(self._perform(model, seq))

            answer, stored = await disk.retry_when_full(attempt)
            model.next_seq = seq + 1  # before it is taken out: a state that is written now has its effect
            del model.waiting[seq]
            self._tell(f"{model.id}:{seq}", answer, stored)
            await self._make_room()

    def _tell(self, request_id: str, answer: Answer, stored: bool) -> None:
        """Give an answer to those who wait for it; later it is read from the journal."""
        future = self.answers.setdefault(request_id, asyncio.get_running_loop().create_future())
        future.set_result(answer)
        if stored:
            del self.answers[request_id]

    async def _fail_gap(self, model: Model) -> None:
        """Fail the requests that wait for one that does not come; a restart runs none of them."""
        missing = model.next_seq
        last = max(model.waiting)
        try:
            await model.lane.run(self._write_state, model, last)
        except UserError:
            pass  # there is no state, which a restart finds, too
        except Exception as error:
            self._log_error(f"{model.id}: no state", error)
            if is_disk_full(error):
                return  # and try again
        failure = _json(error=f"request {missing} of this model has not come for {GAP_SECONDS:.0f} s", category="user")
        model.next_seq = last + 1
        for seq in sorted(seq for seq in model.waiting if seq <= last):
            name = f"{model.id}:{seq}"
            finish = partial(self.journal.finish, changed=False)
            stored = await asyncio.to_thread(self._tried, name, finish, model.id, seq, failure)
            del model.waiting[seq]
            self._tell(name, failure, stored)

    def _perform(self, model: Model, seq: int) -> Generator[None, None, tuple[Answer, bool]]:
        """Run a request, in the model's lane. Returns its answer, and whether it is in the journal.

        Raises:
            OSError: the disk is full, and the request has changed nothing.
        """
        name = f"{model.id}:{seq}"
        try:
            known = self.journal.request(model.id, seq)
            assert known is not None and known.body is not None
        except UserError as error:  # damaged: perhaps a gradient that others after it need
            model.lost = error
            model.trained = None
            return self._failed(name, error), False
        except Exception as error:
            return self._failed(name, error), False
        changes = known.kind in CHANGES
        done = known.answer is not None
        if known.answer is not None and not (changes and _had_effect(known.kind, *known.answer)):
            return known.answer, True
        began = time.monotonic()
        try:
            if known.kind in ("forward", "forward_backward"):
                answer = yield from self._do_pass(model, known.body, backward=known.kind == "forward_backward")
            else:
                read, do = REQUESTS[known.kind]
                answer = do(self, model, seq, read.model_validate_json(known.body))
        except UserError as error:
            answer = self._failed(f"{name} {known.kind}", error)
        except Exception as error:
            full = as_disk_full(error, self.settings.folder / "models") if known.kind in SAVES else None
            if full:
                raise full from error
            answer = self._failed(f"{name} {known.kind}", error)
        if done and not _had_effect(known.kind, *answer):  # by another version of the SDK, say
            self.log(f"{name}: it had succeeded before the restart, and failed when it ran again")
        model.work_seconds += time.monotonic() - began
        due = known.kind in ("create_model", "load_weights") or model.work_seconds > STATE_EVERY * model.state_seconds
        if due and changes and model.trained is not None:
            # with its answer: what was loaded may be gone after a restart
            unwritten = None if done else answer
            done |= self._tried(f"{name}: no state", self._write_state, model, seq, unwritten)
        finish = partial(self.journal.finish, changed=changes and _had_effect(known.kind, *answer))
        return answer, done or self._tried(name, finish, model.id, seq, answer)

    def _failed(self, what: str, error: Exception) -> Answer:
        """The answer to a request that failed; an error that is not the client's is in the log."""
        if isinstance(error, UserError):
            return _json(error=" ".join(str(error).split()), category="user")
        self._log_error(what, error)
        return _json(error=f"{type(error).__name__}: {error}", category="server")

    def _trained(self, model: Model) -> TrainedModel:
        """The model, in memory; after a restart, or a rest, from its state on disk.

        Raises:
            UserError: it is damaged.
        """
        if model.lost is not None:
            raise UserError(model.lost.reason, remedy=LOAD)
        if model.trained is None:
            trained = self._new_model(model.record["spec"])
            if model.record["state_seq"] >= 0:
                file = self._state_file(model, model.record["state_seq"])
                what = f"the state of {model.id}, {file.name},"
                written = Checksum(*model.record["state"])
                trained.load(_read(what, file, written))
            model.trained = trained
        return model.trained

    def _new_model(self, spec: dict[str, Any]) -> TrainedModel:
        dtype = DTYPES[self.settings.dtype]
        budget = self.settings.tokens
        return TrainedModel(self.base, types.LoraConfig(**spec), compute_dtype=dtype, budget=budget)

    def _state_file(self, model: Model, seq: int) -> Path:
        return self._place(model.id) / f"state-{seq:09d}.safetensors"

    def _place(self, id: str) -> Path:
        """The folder of a model, or by its path that of a checkpoint."""
        return self.settings.folder / "models" / id.removeprefix("tinker://").replace(":", "-")

    def _write_state(self, model: Model, seq: int, answer: Answer | None = None) -> None:
        """Write the state after a request, and its answer; its requests need not run again."""
        began = time.monotonic()
        if seq == model.record["state_seq"]:
            return
        file = self._state_file(model, seq)
        file.parent.mkdir(parents=True, exist_ok=True)
        content = save(self._trained(model).state())
        write_atomic(file, content)
        record = model.record | {"state_seq": seq, "state": astuple(Checksum.of_bytes(content))}
        self.journal.finish(model.id, seq, answer, record)
        model.record = record
        for other in set(file.parent.glob("state-*")) - {file}:
            other.unlink(missing_ok=True)
        model.work_seconds = 0.0
        model.state_seconds = max(0.05, time.monotonic() - began)

    # ---- what requests do, in the model's lane -----------------------------------------------------------------------

    def _do_create(self, model: Model, seq: int, asked: Any) -> Answer:
        self._trained(model)
        return _json(type="create_model", model_id=model.id)

    def _do_pass(self, model: Model, body: bytes, *, backward: bool) -> Generator[None, None, Answer]:
        name, config, data = read_forward_backward(body)
        for number, datum in enumerate(data):
            datum.check(f"example {number}", data[0], self.base.max_length, self.vocabulary)
        loss = ClientLoss(name, config)
        result = yield from self._trained(model).run(data, loss, backward=backward)
        if backward:
            self._note(model, lambda record: record.pending.add(data, loss, result))
        metrics = {f"{name.replace(':', '_')}:mean": metric.value for name, metric in result.metrics.items()}
        return forward_backward_answer(result.outputs, {"loss:sum": result.loss} | metrics), PROTOBUF

    def _do_optim_step(self, model: Model, seq: int, asked: Any) -> Answer:
        settings = asked.optim_params
        check_adam(settings)
        try:
            metrics = self._trained(model).step(settings)
        except UserError:
            self._note(model, ServedRecord.forget)  # the gradient of its examples is gone, or there was none
            raise
        model.record["steps"] += 1
        self._note(model, lambda record: record.step(model.record["steps"], metrics | {"lr": settings.learning_rate}))
        return _json(metrics=metrics)

    def _do_load(self, model: Model, seq: int, asked: Any) -> Answer:
        state = _read(asked.path, self.checkpoint_folder(asked.path, "training") / STATE)
        # nothing remains of the model that it was, whose own state may be damaged
        trained = model.trained or self._new_model(model.record["spec"])
        trained.load(state, optimizer=asked.optimizer)
        model.trained = trained
        model.lost = None
        self._note(model, ServedRecord.forget)
        return _json(type=asked.type, path=asked.path, model_id=model.id)

    def _do_save(self, model: Model, seq: int, asked: Any) -> Answer:
        """Write training weights, those of a sampler, or a folder to download, by the type of the request."""
        values = asked.model_dump()
        segment, _ = SAVES[asked.type]
        require(values.get("kind") != "inflight", "kind", "inflight", "is not served; save snapshots")
        if values.get("age_encryption_recipients"):
            raise UserError("age_encryption_recipients: files are not encrypted here; leave it out")
        unnamed = f"unnamed-{seq:09d}" if segment == "sampler_weights" else f"{seq:06d}"
        name = asked.path or unnamed
        plain = all(c.isascii() and (c.isalnum() or c in "._-+=") for c in name)
        allowed = plain and not name.startswith(".") and len(name) <= 120
        require(allowed, "path", name, "must be a name of at most 120 of a-z A-Z 0-9 ._-+=, no dot first")
        path = f"tinker://{model.id}/{segment}/{name}"
        known = self.journal.get("checkpoint", path)
        if known is not None and known["seq"] != seq and not values.get("overwrite"):
            raise UserError(f"{path} exists; choose another name, or set overwrite")
        if known is None or known["seq"] != seq:
            self._write_checkpoint(model, seq, path, values)
        number = values.get("sampling_session_seq_id")
        if number is None:
            return _json(type=asked.type, path=path)
        id = self.create_sampler(model.record["session"], number, path)
        return _json(type=asked.type, sampling_session_id=id)

    def _write_checkpoint(self, model: Model, seq: int, path: str, asked: Mapping[str, Any]) -> None:
        """Write its folder, then its record: the SDK's `Checkpoint` and whose it is."""
        trained = self._trained(model)
        folder = self._place(path)
        _, slots = SAVES[asked["type"]]
        with atomic_folder(folder) as beside:
            if slots:
                save_file(trained.state(slots), beside / STATE)
            else:
                save_trained(trained.loaded, beside)
            write_checksums(beside)
        lasts = asked["ttl_seconds"]
        record = {
            **types.ParsedCheckpointTinkerPath.from_tinker_path(path).model_dump(),
            "time": date(),
            "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
            "user_metadata": asked.get("user_metadata"),
            "expires_at": None if lasts is None else date(lasts),
        }
        whose = {"model": model.id, "seq": seq, "spec": model.record["spec"]}
        self.journal.put("checkpoint", path, record | whose)
        if record["checkpoint_type"] == "sampler":
            for last in sorted(folder.parent.glob("unnamed-*"))[:-SNAPSHOTS]:
                self._delete(f"tinker://{model.id}/sampler_weights/{last.name}")

    def _note(self, model: Model, note: Callable[[ServedRecord], None]) -> None:
        """Write what the viewer reads. The model has changed already: a failure must not fail the request."""

        def write() -> None:
            model.seen = model.seen or ServedRecord(self._place(model.id), self.base, model.record["spec"])
            note(model.seen)

        self._tried(f"{model.id}: no record for the viewer", write)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint(self, path: str) -> dict[str, Any]:
        """The record of a checkpoint.

        Raises:
            UserError: there is none.
        """
        record: dict[str, Any] | None = self.journal.get("checkpoint", path)
        if record is None:
            raise UserError(f"no weights {path!r:.200}; unnamed ones are kept only for the last samplers of a model")
        return record

    def checkpoint_folder(self, path: str, *kinds: str) -> Path:
        """The folder of a checkpoint, of one of these kinds.

        Raises:
            UserError: there is none.
        """
        record = self.checkpoint(path)
        if kinds and record["checkpoint_type"] not in kinds:
            wanted = " or ".join(kinds)
            raise UserError(f"{path} has {record['checkpoint_type']} weights, where {wanted} weights are needed")
        return self._place(path)

    async def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint, in the lane of its model, where others are written."""
        await self.model(self.checkpoint(path)["model"]).lane.run(self._delete, path)

    def _delete(self, path: str) -> None:
        self.journal.delete("checkpoint", path)  # first: a kill leaves none that is there in part
        shutil.rmtree(self._place(path), ignore_errors=True)

    # ---- samplers ----------------------------------------------------------------------------------------------------

    def create_sampler(self, session: str, number: int, path: str | None) -> str:
        """A sampler of saved weights, or without a path of the base."""
        self.heartbeat(session)
        id = f"{session}:sample:{number}"
        if path is not None:
            self.checkpoint_folder(path, "training", "sampler")
        self.journal.put("sampler", id, {"sampler_id": id, "model_path": path, "session": session})
        return id

    def submit_sample(self, sampler: str, seq: int, order: SampleOrder) -> str:
        """Accept a request for samples; one that is running or done is not run again."""
        request_id = f"{sampler}:{seq}"
        record = self.known("sampler", sampler)
        now = time.monotonic()
        while self._sampled and (now - self._sampled[0][0] > SAMPLES_KEPT or len(self._sampled) > MOST_SAMPLES):
            del self.answers[self._sampled.popleft()[1]]
        if request_id not in self.answers:
            if self._waiting[sampler] >= MOST_WAITING:
                raise HTTPException(429, f"{self._waiting[sampler]} requests of this sampler wait")
            self._waiting[sampler] += 1
            task = self.answers[request_id] = asyncio.create_task(self._sample(record, request_id, order))
            task.add_done_callback(lambda _: self._sample_ended(sampler, request_id))
        return request_id

    def _sample_ended(self, sampler: str, request_id: str) -> None:
        self._waiting -= Counter([sampler])  # which keeps what is above 0
        self._sampled.append((time.monotonic(), request_id))

    async def _sample(self, record: Mapping[str, Any], request_id: str, order: SampleOrder) -> Answer:
        try:
            path = record["model_path"]
            if path is None:
                model = weights = "base"
                source = self._base
            else:
                checkpoint = self.checkpoint(path)
                model = checkpoint["model"]
                weights = f"{path} of {checkpoint['time']}"  # a name may be used again
                source = partial(self._weights, path, checkpoint)
            return await self.samplers.sample(model, weights, record["session"], source, order), PROTOBUF
        except asyncio.CancelledError as error:
            if not error.args:
                raise
            return _json(error=error.args[0], category="server")  # with a reason by `Samplers`
        except Exception as error:
            return self._failed(request_id, error)

    def _base(self) -> LoadedModel:
        return self.base

    def _weights(self, path: str, checkpoint: Mapping[str, Any]) -> LoadedModel:
        """The base with the weights of a checkpoint, in a lane."""
        model = self._new_model(checkpoint["spec"])
        weights = _read(path, self.checkpoint_folder(path) / STATE)
        finite = all(bool(values.isfinite().all()) for values in weights.values())
        require(finite, "path", path, "holds NaN or infinity", remedy="use another checkpoint")
        model.load(weights, optimizer=False)
        return model.loaded

    async def answer(self, request_id: str, seconds: float) -> Answer | None:
        """The answer to a request, if it comes within this time.

        Raises:
            HTTPException: there is no such request.
            UserError: its answer is damaged, and it does not run again.
        """
        if request_id not in self.answers:
            model, _, number = request_id.rpartition(":")
            numbered = number.isdecimal() and len(number) < 20 and int(number) < 2**63
            seq = int(number) if numbered else -1
            try:
                stored = self.journal.answer(model, seq)
                if stored is not None:
                    return stored
            except KeyError:  # the SDK sends samples again when it hears 410
                gone = f"no request {request_id!r:.100}: it is over, or samples of an earlier server"
                raise HTTPException(410, gone) from None
            except UserError:
                if seq not in self.model(model).waiting:  # where it runs again
                    raise
            asked = self.model(model)
            if seq < asked.next_seq and seq not in asked.waiting:
                return _json(error="this request was given up: one before it had not come", category="user")
            self.answers[request_id] = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait({self.answers[request_id]}, timeout=seconds)
        if not done:
            return None
        answer = done.pop()
        if answer.cancelled():
            return CANCELLED
        return answer.result()

    def cancel(self, request_id: str) -> None:
        """Stop a sample that its client does not want any more."""
        task = self.answers.get(request_id)
        if isinstance(task, asyncio.Task):
            task.cancel()

    async def close(self) -> None:
        """Write the states of all models."""
        tasks = (*self.answers.values(), *(model.task for model in self.models.values()))
        stopped = {task for task in tasks if isinstance(task, asyncio.Task)}
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)
        for model in self.models.values():
            await model.lane.run(self._tried, f"{model.id}: no state", self._rest, model)
        await asyncio.to_thread(self.workers.shutdown, cancel_futures=True)
        self.journal.close()
        self._lock.release()


# requests of a model besides passes, which are protocol buffers
REQUESTS: dict[str, tuple[type[BaseModel], Callable[[Service, Model, int, Any], Answer]]] = {
    "create_model": (types.CreateModelRequest, Service._do_create),
    "load_weights": (types.LoadWeightsRequest, Service._do_load),
    "optim_step": (types.OptimStepRequest, Service._do_optim_step),
    "save_weights": (types.SaveWeightsRequest, Service._do_save),
    "save_weights_for_sampler": (types.SaveWeightsForSamplerRequest, Service._do_save),
    "save_weights_external": (types.SaveWeightsExternalRequest, Service._do_save),
}
# those whose effect is in the state; others, such as "forward", are not run again after a restart
CHANGES = ("create_model", "load_weights", "forward_backward", "optim_step")


def _had_effect(kind: str, content: bytes, media: str) -> bool:
    """False of a request that failed, which must not succeed after a restart; a step that fails drops gradients."""
    return kind == "optim_step" or media != JSON or "category" not in json.loads(content)


def checked(what: str, file: Path, written: Checksum | None = None) -> Path:
    """A file that may be damaged, or deleted at this moment.

    Args:
        written: its checksum; None: it is in the file's folder.

    Raises:
        UserError: it is.
    """

    def damage() -> str:
        if written is None:
            return damage_beside_checksums(file)
        return written.difference(file)

    why = damage() and damage()  # twice: a folder may have been replaced during the first look
    if why:
        remedy = OTHERS if written is None else LOAD
        raise UserError(f"{what} {why}", remedy=remedy)
    return file


def _read(what: str, file: Path, written: Checksum | None = None) -> dict[str, Tensor]:
    """The tensors of a file that is `checked`."""
    try:
        return load_file(checked(what, file, written))
    except (OSError, SafetensorError) as error:  # deleted at this moment
        raise UserError(f"{what} can't be read: {type(error).__name__}", remedy=OTHERS) from error


def _json(**values: Any) -> Answer:
    return json.dumps(values).encode(), JSON


CANCELLED = _json(error="cancelled by its client", category="user")
