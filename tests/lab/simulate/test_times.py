"""What takes how long: distributions, files, the command line, and fits to a run."""

import json
from pathlib import Path

import numpy as np
import pytest

from proxima.config.problems import ConfigError
from proxima.data import Completion, FieldError, Group, Prompt, Score, UserError
from proxima.lab.simulate.distributions import Constant, Empirical, LogNormal
from proxima.lab.simulate.fit import decode_steps, fit_times, nonnegative_fit
from proxima.lab.simulate.times import Times, read_times
from proxima.runtime.state.rollouts import write_rollouts
from proxima.train.completion_record import CompletionRecord


def test_lognormal_has_the_mean_that_it_says():
    drawn = [LogNormal(mean=50.0, sigma=0.7).draw(1, uid, sample) for uid in range(2000) for sample in range(10)]
    assert np.mean(drawn) == pytest.approx(50.0, rel=0.02)
    assert np.std(np.log(drawn)) == pytest.approx(0.7, rel=0.02)


def test_empirical_gives_every_block_once_a_pass():
    lengths = Empirical((1.0, 2.0, 10.0, 20.0, 100.0, 200.0), together=2)
    passes = [[tuple(lengths.draw(1, uid, s) for s in (0, 1)) for uid in range(3 * i, 3 * i + 3)] for i in range(6)]
    assert all(sorted(entry) == [(1.0, 2.0), (10.0, 20.0), (100.0, 200.0)] for entry in passes)
    assert len({tuple(entry) for entry in passes}) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1.0), "value=-1.0 must be >= 0"),
        (lambda: LogNormal(0.0), "mean=0.0 must be > 0"),
        (lambda: LogNormal(5.0, sigma=-1.0), "sigma=-1.0 must be in"),
        (lambda: Empirical(()), "values=.* at least one"),
        (lambda: Empirical((1.0, 2.0, 3.0), together=2), "together=2 must divide the 3 values"),
        (lambda: Times(step=-0.1), "step=-0.1 must be in"),
        (lambda: Times(step=0.0, sequence=0.0), "step=0.0 must be > 0"),
        (lambda: Times(update=1e9), "update=1000000000.0 must be in .0, 100,000"),
        (lambda: Times(environment=Constant(1.0)), "environment=.* has no meaning without times.turns"),
        (lambda: Times(accepted=0.0), "accepted=0.0 must be a share"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(FieldError, match=message):
        make()


def test_a_file_overrides_a_fit_and_the_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "times.yaml"
    file.write_text("length: {kind: lognormal, mean: 30}\nupdate: 2\n")
    times, entries = read_times(file, ["times.update=3", "times.score.value=0.5"], {"publish": 4.0, "update": 1.0}, "x")
    assert times == Times(length=LogNormal(30.0), update=3.0, score=Constant(0.5), publish=4.0)
    sources = {entry.path: entry.source for entry in entries}
    assert sources["times.publish"] == "fitted from x"
    assert sources["times.update"].startswith("command line, over 2 of")
    assert sources["times.step"] == "default"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("times.updat=3", "times.updat=3 .command line.: 'times' has no field 'updat'; did you mean 'update'"),
        ("times.publish=-1", "times.publish=-1 .command line.: must be in .0, 100,000."),
        ("times.length={kind: lognormal}", "times.length.mean: is missing"),
        ("times.length.kind=normal", "times.length.kind=normal .command line.: .*lognormal"),
        ("times.step=soon", "times.step=soon .command line.: must be a number"),
    ],
)
def test_a_bad_override_is_one_line(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_times(None, [override])
    assert len(str(caught.value).splitlines()) == 1


def test_decode_steps_of_completions_that_share_slots():
    assert decode_steps([5, 3, 4], slots=8) == 5
    assert decode_steps([5, 3, 4], slots=2) == 7
    assert decode_steps([], slots=2) == 0


def test_a_fit_is_never_negative():
    assert nonnegative_fit([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [3.0, 5.0, 7.0]) == pytest.approx((1.0, 2.0))
    assert nonnegative_fit([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [0.0, 2.0, 4.0])[0] == 0.0
    assert nonnegative_fit([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0])[1] == 0.0


LENGTHS = {0: (10, 20), 1: (30, 10), 2: (20, 40), 3: (10, 10), 4: (50, 20), 5: (10, 30)}  # two prompts a step
STEP, SEQUENCE, PREFILL = 0.1, 0.02, 0.002


def write_run(folder: Path, **settings: object) -> Path:
    """Three synchronous steps in 8 slots: a decode step of n takes .1 + .02 n, a prefill .002 a token of the prompt, an
    update 1 + .05 a token of the completions, and .006 a token of all that it feeds."""
    (folder / "rollouts").mkdir(parents=True)
    config = {"engine": {"kind": "local", "slots": 8}, "runtime": {"max_lag": 0}, **settings}
    (folder / "config.yaml").write_text(json.dumps(config))
    now = 5.0
    lines = []
    for step in (1, 2, 3):
        groups = [_group(uid, LENGTHS[uid]) for uid in (2 * step - 2, 2 * step - 1)]
        lengths = [len(c.tokens) for group in groups for c in group.completions]
        records = {c.key: CompletionRecord(outcome="trained") for group in groups for c in group.completions}
        write_rollouts(folder / f"rollouts/{step:06d}.parquet", step, groups, records)
        prompts = sum(len(group.prompt.tokens) for group in groups)
        generate = STEP * max(lengths) + SEQUENCE * sum(lengths) + PREFILL * prompts
        train = 1.0 + 0.05 * sum(lengths)
        whole = generate + 0.25 + train + 0.125 + 0.03
        now += whole + 0.07
        stages = {"time/generate": generate, "time/score": 0.25, "time/train": train, "time/publish": 0.125}
        stages["tokens/trained"] = train / (3 * PREFILL)
        lines.append({"kind": "train", "step": step, "time": now, "time/step": whole, **stages})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.sqlite").touch()
    return folder


def _group(uid: int, lengths: tuple[int, ...]) -> Group:
    def completion(sample: int, length: int) -> Completion:
        return Completion(
            prompt_uid=uid,
            sample=sample,
            tokens=[0] * length,
            text="",
            sampled_log_prob=0.0,
            untruncated_log_prob=0.0,
            policy_version=0,
            finish_reason="stop",
            temperature=1.0,
        )

    completions = tuple(completion(sample, length) for sample, length in enumerate(lengths))
    scores = (Score(value=0.0),) * len(lengths)
    return Group(prompt=Prompt(uid=uid, messages=(), tokens=[0] * (10 + uid)), completions=completions, scores=scores)


def test_a_synchronous_run_gives_its_times_back(tmp_path):
    fit = fit_times(write_run(tmp_path / "run"), {"engine.kind": "local_process", "engine.slots": 8})
    values = fit.values
    assert values["length"] == {
        "kind": "empirical",
        "values": [float(length) for uid in range(6) for length in LENGTHS[uid]],
        "together": 2,
    }
    assert values["prompt_length"] == 12.5
    assert (values["step"], values["sequence"]) == pytest.approx((STEP, SEQUENCE))
    assert values["prefill_token"] == pytest.approx(PREFILL)
    assert (values["update"], values["update_token"]) == pytest.approx((1.0, 0.05))
    assert values["score"] == {"kind": "constant", "value": pytest.approx(0.25)}
    assert (values["pause"], values["publish"]) == pytest.approx((0.0, 0.125))
    assert values["other"] == pytest.approx(0.03 + 0.07)
    assert "engine.kind=local: its times are those of that" in fit.notes[-1]
    assert any("concurrently" in note for note in fit.notes)


def test_an_overlapping_run_is_fitted_to_its_timeline(tmp_path):
    """Two prompts at a time, each alone in its step: their spans say how long so many tokens took."""
    runtime = {"max_lag": 1, "max_concurrent_rollouts": 2}
    folder = write_run(tmp_path / "run", runtime=runtime)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    idle = [json.dumps(record | {"idle/engine": 0.025 / record["time/step"]}) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(idle) + "\n")
    events = []
    for uid, lengths in LENGTHS.items():
        begin, other = 100.0 * uid, min(lengths)
        seconds = STEP * max(lengths) + SEQUENCE * (other + max(lengths))  # two run until the shorter one ends
        span = {"ph": "X", "pid": 2, "tid": 1, "args": {"prompt": uid}}
        events.append({"name": "generating", "ts": begin * 1e6, "dur": (seconds + 3.0) * 1e6, **span})
        events.append({"name": "scoring", "ts": (begin + 50) * 1e6, "dur": 0.5e6, **span})
        events.append({"name": "publish", "ph": "X", "ts": (begin + 0.5) * 1e6, "dur": 3e6, "pid": 1, "tid": 1})
    (folder / "timeline.json").write_text("[\n" + ",\n".join(map(json.dumps, events)) + ',\n{"name": "torn')
    values = fit_times(folder, {}).values
    assert (values["pause"], values["publish"]) == pytest.approx((0.1, 0.025))
    assert (values["step"], values["sequence"]) == pytest.approx((STEP, SEQUENCE), rel=0.1)
    assert values["prefill_token"] == 0
    assert values["score"] == {"kind": "empirical", "values": [pytest.approx(0.5)] * 6}


def test_what_can_not_be_fitted_is_said(tmp_path):
    runtime = {"max_lag": 1, "max_concurrent_rollouts": 2}
    fit = fit_times(write_run(tmp_path / "run", runtime=runtime), {})
    assert "step" not in fit.values
    assert "score" not in fit.values
    assert [note.partition(":")[0] for note in fit.notes[:2]] == ["step, sequence", "score"]


def test_a_folder_without_two_steps_is_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    for step in (2, 3):
        (folder / f"rollouts/{step:06d}.parquet").unlink()
    with pytest.raises(UserError, match="has 1 finished steps with rollouts; two are needed"):
        fit_times(folder, {})
    with pytest.raises(UserError, match="is not a run"):
        fit_times(tmp_path, {})
