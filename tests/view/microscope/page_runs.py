"""The runs that the page is tested with, as folders that the server reads: steps of 65 completions with all that a view
can show, episodes and hostile texts included."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from proxima.core import SURROGATES
from proxima.data.columns import filled_by
from proxima.data.episode import Episode, Span, ToolCall
from proxima.data.flow import Completion, Score
from proxima.runtime.watch.timeline import TRAINER, Timeline
from proxima.training.batch_builder import CompletionRecord
from proxima.view.microscope.app import write_note
from tests.view.microscope.stored_run import HOSTILE, make_step, recipe, step_content, write_step
from tests.view.microscope.test_stages import written
from tests.view.synthetic import evaluation, record

NAMES = ["quickstart", "quickstart-2", "hostile <img src=x onerror=window.ran=6>", "broken", "live", "new", "long"]
QUICKSTART, COPY, EVIL, BROKEN, LIVE, NEW, LONG = range(len(NAMES))
WORDS = ["The", " sum", " of", " two", " numbers", " is", " therefore", " 1", "2", ",", " so", " we", " add", ".\n"]
OTHER = 17  # the first token of 3.1 that is another one in step 3
LONGEST_NAME = "mismatch/probability_0.001_0.01/log_prob_absdiff"


def make_runs(place):
    """Folders named `NAMES`; "quickstart" and its copy have three steps, the hostile one too."""
    folders = [place / name for name in NAMES]
    make_run(folders[QUICKSTART], str)
    shutil.copytree(folders[QUICKSTART], folders[COPY])
    make_run(folders[EVIL], lambda words: f"{HOSTILE} {words}", kind=f"my:{HOSTILE}")
    write_note(folders[EVIL], '"><img src=x onerror=window.ran=4>', "<script>window.ran=5</script>")
    make_step(folders[BROKEN], SURROGATES["cppo"](), prompts=1, samples=1)
    file = folders[BROKEN] / "rollouts" / "000001.parquet"
    foreign = pq.read_table(file).drop_columns(["keep"]).replace_schema_metadata({"proxima": HOSTILE})
    pq.write_table(foreign, file)
    make_step(folders[LIVE], SURROGATES["cppo"](), prompts=1, samples=1)
    folders[NEW].mkdir()
    shutil.copy(folders[LIVE] / "config.yaml", folders[NEW])
    make_step(folders[LONG], SURROGATES["cppo"](), prompts=125, samples=8, lengths=[3, 32_000, *[3] * 998])
    return folders


def make_run(folder, said, kind="cppo"):
    """A finished run; `said` changes every text in it."""
    model = folder.parent / f"{kind[:4]}-models" / "Qwen3-0.6B"
    model.mkdir(parents=True)
    vocabulary = {said(word): i for i, word in enumerate(WORDS)}
    Tokenizer(WordLevel(vocabulary, unk_token=said(WORDS[0]))).save(str(model / "tokenizer.json"))
    chosen = recipe(SURROGATES["cppo"](), (), str(model))
    chosen["algorithm"]["surrogate"]["kind"] = kind
    lengths = np.random.default_rng(1).integers(50, 200, 64).tolist()
    lengths[1] = 60  # a few lines
    for step in (1, 3):
        groups, records, _ = step_content(
            SURROGATES["cppo"](), prompts=8, samples=8, lengths=lengths, text=None if said is str else said("3 + 4")
        )
        groups = [varied(group, records, step, said) for group in groups]
        write_step(folder, step, groups, records, chosen)
    shutil.copy(folder / "rollouts" / "000001.parquet", folder / "rollouts" / "000002.parquet")
    charted = {LONGEST_NAME: 1e9, said("my/own"): 1.0}
    lines = [
        record(step, 3, **charted | ({LONGEST_NAME: -0.000123, "approx_kl": None} if step == 1 else {}))
        for step in (1, 2, 3)
    ]
    lines += [evaluation(step, said(label), correct) for step, label, correct in ((0, "before", 50), (3, "after", 150))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"status": "done", "algorithm": said("cppo")}))
    timeline = Timeline(written(folder / "timeline.json", steps=3, closed=False), print)
    timeline.span(said("train"), 16.0, 17.0, TRAINER)
    timeline.close()


def varied(group, records, step, said):
    """The group with what random tokens lack, and what became of its completions. The first has advantage 0, the fifth
    is of episodes, and so is a completion of the fourth, the seventh was dropped; the last completion is an episode
    that failed."""
    uid, draw, completions, scores = group.prompt.uid, np.random.default_rng(group.prompt.uid), [], []
    for completion in group.completions:
        sample, n = completion.sample, len(completion.tokens)
        ids = completion.tokens % len(WORDS)
        if step == 3 and (uid, sample) == (3, 1):
            ids[OTHER] = (ids[OTHER] + 1) % len(WORDS)
        likely = np.stack([ids, (ids + 1) % len(WORDS), (ids + 2) % len(WORDS)], 1)
        completion = replace(
            completion,
            tokens=ids,
            text=said("".join(WORDS[i] for i in ids)),
            policy_version=np.repeat([3, 3 if uid == 0 else 4], [n // 2, n - n // 2]),
            finish_reason="length" if sample % 2 else "stop",
            top_k=likely,
            top_k_log_prob=np.full((n, 3), -0.5),
        )
        value = 1.0 if uid == 0 else float(draw.choice([0.0, 0.1, 1.0]))
        parts = {"math": value, said("format"): 0.1}
        scores.append(Score(value=value, parts=parts, correct=value == 1))
        if uid == 0:
            if sample == 3:
                completion = Completion.of_text(uid, sample, "", finish_reason="abort")
            records[completion.key] = CompletionRecord(outcome="skipped_zero_advantage", advantage=0.0)
        if uid == 6:
            records[completion.key] = CompletionRecord(outcome="dropped_truncated", used=False)
        if uid == 4:
            completion = played(completion, said)
        if (uid, sample) == (3, 2):
            record = records.pop(completion.key)
            completion = forked(played(completion, said))
            (other,) = completion.earlier
            records |= {completion.key: record, other.key: CompletionRecord(outcome="trained", advantage=0.5)}
        completions.append(completion)
    if uid == 7:
        failed = Completion.of_text(uid, sample, "", finish_reason="abort")
        completions[-1] = replace(failed, sampled=np.zeros(0, bool), episode=Episode(failure=said("it broke")))
        scores[-1] = Score.failed(said("timed out"))
        records[completions[-1].key] = CompletionRecord(outcome="invalid")
    prompt = replace(group.prompt, answer=said(str(uid + 1)))
    return replace(group, prompt=prompt, completions=tuple(completions), scores=tuple(scores))


def played(completion, said):
    """The tokens of a completion as an episode: the model, a tool, the model, a tool, the model."""
    n = len(completion.tokens)
    sizes = [n // 4, n // 8, n // 4, n // 8, n - n // 4 - n // 8 - n // 4 - n // 8]
    call = ToolCall(name="search", arguments={"query": said("sum of 1 and 2")})
    spans = tuple(
        Span(
            role="tool" if i % 2 else "assistant",
            tokens=size,
            text=said("it says"),
            sampled=i % 2 == 0,
            turn=i // 2,
            calls=(call,) if i in (0, 2) else (),
            reward=0.25 if i in (0, 2) else 0.0,
            unreadable=(said("no closing brace"),) if i == 2 else (),
            error=i == 3,
        )
        for i, size in enumerate(sizes)
    )
    return replace(
        completion,
        sampled=np.repeat([span.sampled for span in spans], sizes),
        episode=Episode(
            spans=spans, reward=1.0, cut="turns", attempts=2, seconds={"queued": 12.5, "own": 3.25, "policy": 60.0}
        ),
    )


def forked(completion):
    """The same with another path, which leaves it with the fourth token of the second message."""
    spans, ids = completion.episode.spans[:3], completion.tokens.copy()
    n, same = sum(span.tokens for span in spans), spans[0].tokens + 3
    ids[same:] = (ids[same:] + 1) % len(WORDS)
    names = [column.name for column in filled_by("engine") if column.plain and column.name != "tokens"]
    columns = {name: getattr(completion, name) for name in names}
    other = replace(
        completion,
        tokens=ids[:n],
        sampled=np.repeat([False, False, True], [span.tokens for span in spans]),
        episode=Episode(spans=(*(replace(span, sampled=False) for span in spans[:2]), spans[2])),
        **{name: None if values is None else values[:n] for name, values in columns.items()},
    )
    return replace(completion, turn=1, earlier=(other,))
