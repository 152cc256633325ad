"""What each tool has stored: the metrics as name → [(step, value)], config and summary as text."""

import json
import struct
from collections import defaultdict


def from_tensorboard(spec, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "trackers" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    metrics = {tag: [(e.step, round(e.value, 6)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {tag: events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0] for tag in ("config", "summary")}
    return {"metrics": metrics, **{tag: text.decode() for tag, text in texts.items()}}


def from_mlflow(spec, folder):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=spec.uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "proxima"]
    (run,) = client.search_runs([experiment.experiment_id])
    names = run.data.metrics
    metrics = {n: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, n)] for n in names}
    assert run.info.status == "FINISHED" and run.info.run_name == "mine"
    return {"metrics": metrics, "config": str(run.data.params), "summary": run.data.tags["summary.status"]}


def from_trackio(spec, folder):
    from trackio.sqlite_storage import SQLiteStorage

    metrics = defaultdict(list)
    rows = SQLiteStorage.get_logs("proxima", "mine")
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float):
                metrics[name].append((row["step"], value))
    summary = [row["summary/status"] for row in rows if "summary/status" in row][-1]
    return {"metrics": metrics, "config": str(SQLiteStorage.get_run_config("proxima", "mine")), "summary": summary}


def from_wandb(spec, folder):
    """The offline files, one of each session: records in the format of LevelDB's log."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its own process has written everything

    metrics, config, summary, ids = defaultdict(list), "", "", set()
    for file in sorted((folder / "trackers" / "wandb").glob("offline-run-*/*.wandb")):
        for data in leveldb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config += str([(item.key, item.value_json) for item in record.run.config.update])
            if record.HasField("history"):
                row = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                at = record.history.step.num if record.history.HasField("step") else json.loads(row["_step"])
                for name, value in row.items():
                    metrics[name].append((at, json.loads(value)))
            if record.HasField("summary"):
                summary += str([(item.key, item.value_json) for item in record.summary.update])
    assert len(ids) == 1  # wandb sync joins them
    return {"metrics": metrics, "config": config, "summary": summary}


def leveldb_records(data, block=32768):
    at, part = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            return
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


READERS = {"mlflow": from_mlflow, "tensorboard": from_tensorboard, "trackio": from_trackio, "wandb": from_wandb}
