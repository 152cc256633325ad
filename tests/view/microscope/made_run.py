"""A run as the page sees it: answers of the shapes that the server gives, of random numbers, and a server of them."""

import json
from collections import defaultdict
from contextlib import suppress
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from proxima.view.microscope.app import HEADERS, TYPES
from proxima.view.microscope.completion_page import base64_column, first_difference
from proxima.view.microscope.metric_meanings import VITAL, metric_meanings
from proxima.view.microscope.single_file import PAGE

WORDS = ["The", " sum", " of", " two", " numbers", " is", " therefore", " 1", "2", ",", " so", " we", " add", ".\n"]
HOSTILE = (
    '</script><script>window.ran=1</script><img src=x onerror="window.ran=2"><svg onload=window.ran=3> {{7*7}} \u2028'
)


class MadeRun:
    """`answer(path, query)`: what the server would answer, None where it has nothing.

    Args:
        groups, size, tokens: of a step; the longest completion has all `tokens`.
        hostile: every text that a run brings is an attack on the page.
    """

    def __init__(self, *, groups=8, size=8, tokens=200, steps=12, hostile=False, seed=1):
        self.groups, self.size, self.tokens, self.hostile = groups, size, tokens, hostile
        self.steps = list(range(1, steps + 1))
        self.notes = defaultdict(dict)
        self.running = False
        self.random = np.random.default_rng(seed)

    def text(self, words):
        return f"{HOSTILE} {words}" if self.hostile else words

    @property
    def runs(self):
        single = {"kind": "rl", "algorithm": "cppo", "model": "Qwen3-0.6B", "steps": len(self.steps), "problem": None}
        names = [self.text("quickstart"), "quickstart-2"]
        runs = [
            {**single, "run": i, "name": name, "folder": f"runs/{name}", "finished": True}
            for i, name in enumerate(names)
        ]
        broken = {"run": 2, "name": "old", "problem": self.text("metrics.jsonl is of format 1; this reads 3")}
        return [*runs, {**single, "folder": "runs/old", "finished": False, **broken}]

    @cached_property
    def trend(self):
        n, walk = len(self.steps), self.random.normal(size=(6, len(self.steps))).cumsum(1) / 10
        rising = 0.3 + 0.5 * np.linspace(0, 1, n)
        metrics = {"reward/mean": rising + walk[0] / 8, "accuracy": rising, "entropy/mean": 0.9 - walk[1] / 9}
        metrics |= {"kl/mean": abs(walk[2]), "masked_fraction": abs(walk[3]) / 9, "lr": np.full(n, 1e-6)}
        metrics |= {f"time/{name}": 2 + abs(walk[4]) for name in ("step", "generate", "score", "train", "publish")}
        metrics |= {"length/mean": 180 + 20 * walk[5], "reward/part/format": rising}
        lists = {name: [float(value) for value in values] for name, values in metrics.items()}
        lists["kl/mean"][: n // 3] = [None] * (n // 3)
        return {
            "steps": self.steps,
            "metrics": lists,
            "about": metric_meanings(lists),
            "evals": [
                {"step": step, "label": label, "metrics": {"accuracy": value, "reward/mean": value - 0.01}}
                for step, label, value in ((0, "before", 0.25), (n, "after", 0.75))
            ],
            "rollout_steps": self.steps,
            "specs": {"surrogate": {"kind": "cppo", "delta": 0.18}, "advantage": "grpo", "correction": None},
            "headline": "accuracy",
        }

    @cached_property
    def completions(self):
        n, r = self.groups * self.size, self.random
        reward = r.choice([0.0, 0.1, 1.0], n, p=[0.5, 0.1, 0.4])
        reward[: self.size] = 1.0
        outcome = np.where(r.random(n) < 0.1, "dropped_truncated", "trained").astype(object)
        outcome[: self.size] = "skipped_zero_advantage"
        rows = {
            "uid": np.repeat(np.arange(self.groups) + 100, self.size).tolist(),
            "sample": np.tile(np.arange(self.size), self.groups).tolist(),
            "turn": [0] * n,
            "reward": reward.tolist(),
            "advantage": (reward - reward.mean()).tolist(),
            "length": r.integers(self.tokens // 4, self.tokens + 1, n).tolist(),
            "outcome": outcome.tolist(),
            "finish_reason": r.choice(["stop", "length"], n).tolist(),
            "version_min": [3] * n,
            "version_max": r.choice([3, 4], n).tolist(),
            "correct": [bool(value == 1) for value in reward],
            "valid": [True] * n,
        }
        rows["length"][1] = self.tokens
        rows["reward"][-1], rows["valid"][-1], rows["correct"][-1] = None, False, None
        rows["outcome"][-1] = "invalid"
        return rows

    def step(self, step):
        rows, groups = self.completions, []
        for g in range(self.groups):
            own = slice(g * self.size, (g + 1) * self.size)
            known_names = [value for value in rows["reward"][own] if value is not None]
            names = rows["outcome"][own]
            groups.append(
                {
                    "uid": 100 + g,
                    "question": self.text(f"What is {g} + {g + 4}?"),
                    "answer": str(2 * g + 4),
                    "size": self.size,
                    "mean": float(np.mean(known_names)),
                    "std": float(np.std(known_names)),
                    "min": min(known_names),
                    "max": max(known_names),
                    "length_mean": float(np.mean(rows["length"][own])),
                    "outcomes": {name: names.count(name) for name in set(names)},
                }
            )
        about, values = self.trend["about"], self.trend["metrics"]
        metrics = {name: values[name][step - 1] for name, (group, _) in about.items() if group == VITAL}
        return {"step": step, "metrics": metrics, "groups": groups, "completions": rows}

    def search(self, query):
        if query.get("regex") == "1" and "(" in query["q"]:
            return {"error": "q='(': no regular expression: missing )"}
        return {"rows": [i for i in range(self.groups * self.size) if i % 3 == 0 and query["q"] != "nothing"]}

    def words_of(self, uid, sample, length):
        chosen = np.random.default_rng(uid * 64 + sample).integers(0, len(WORDS), length)
        shared = np.random.default_rng(uid).integers(0, len(WORDS), min(length, 12))
        chosen[: len(shared)] = shared
        texts = [WORDS[i] for i in chosen]
        return [self.text(texts[0]), *texts[1:]]

    def group(self, uid):
        first, rows, completions = (uid - 100) * self.size, self.completions, []
        for i in range(first, first + self.size):
            facts = {
                name: rows[name][i]
                for name in ("sample", "turn", "reward", "advantage", "length", "outcome", "finish_reason", "correct")
            }
            text = "".join(self.words_of(uid, rows["sample"][i], rows["length"][i]))
            parts = {"math": rows["reward"][i], "format": 0.1}
            completions.append({**facts, "text": text, "parts": parts, "error": self.text("") or None})
            if uid == 104:
                completions[-1]["episode"] = self.episode(rows["length"][i])
        question = self.text(f"What is {uid - 100} + {uid - 96}?")
        messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": question}]
        return {"uid": uid, "question": question, "messages": messages, "answer": "4", "completions": completions}

    def completion(self, name, step=1):
        uid, sample, turn = map(int, name.split("."))
        row = (uid - 100) * self.size + sample
        n, r = self.completions["length"][row], np.random.default_rng(row)
        texts = self.words_of(uid, sample, n)
        if step > 1 and n > 20:
            texts[17] = " otherwise"
        log_prob = -r.exponential(0.6, n)
        behavior = log_prob + r.normal(size=n) * 0.08
        divergence = abs(np.exp(log_prob) - np.exp(behavior))
        spent = np.minimum(np.cumsum(divergence) / 40, 0.2)
        threshold = 0.18 - spent / 2
        weighted = divergence * 4
        keep = (weighted < threshold) | (r.random(n) < 0.5)
        columns = {
            "log_prob": log_prob,
            "behavior_log_prob": behavior,
            "proximal_log_prob": behavior + 0.001,
            "sampled_log_prob": behavior,
            "next_log_prob": np.full(n, np.nan),
            "entropy": r.exponential(0.5, n),
            "advantage": np.full(n, self.completions["advantage"][row]),
            "log_ratio": log_prob - behavior,
            "mismatch": r.normal(size=n) * 0.002,
            "divergence": divergence,
            "policy_version": np.where(np.arange(n) < n // 2, 3, self.completions["version_max"][row]).astype("i4"),
            "keep": keep,
            "loss_weight": np.where(keep, np.exp(log_prob - behavior), 0.0),
            "sampled": np.ones(n, bool),
            "weighted_divergence": weighted,
            "threshold": threshold,
            "prefix_spent": spent,
            "prefix_budget": np.full(n, 0.2),
        }
        episode = self.episode(n) if sample == 2 else None
        if episode:
            columns["sampled"] = np.repeat(
                [s["sampled"] for s in episode["spans"]], [s["tokens"] for s in episode["spans"]]
            )
        return {
            "uid": uid,
            "sample": sample,
            "turn": turn,
            "text": "".join(texts),
            "temperature": 1.0,
            "prompt": {"ids": [1, 2, 3], "text": ["What", " is", self.text(" it?")]},
            "tokens": {"ids": list(range(n)), "text": texts},
            "parts": {"math": 1.0, "format": 0.1},
            **{key: self.completions[key][row] for key in ("reward", "advantage", "outcome", "finish_reason")},
            "columns": {key: base64_column(value) for key, value in columns.items()} | {"reference_log_prob": None},
            "reasons_available": True,
            "band": {
                "kind": "cppo",
                "title": "CPPO: weighted divergence and its threshold",
                "names": ["weighted_divergence", "threshold", "prefix_spent", "prefix_budget"],
                "note": "a token is masked where Z > c",
            },
            "columns_doc": {"entropy": {"unit": "nats", "doc": "of the policy at the position"}},
            "episode": episode,
            "versions": [3, 4],
            "problem": None,
        }

    def episode(self, n):
        sizes = [n // 4, n // 8, n // 4, n // 8]
        sizes.append(n - sum(sizes))
        call = {"name": "search", "arguments": {"query": self.text("sum of 1 and 2")}}
        plain = {
            "text": self.text("it says"),
            "error": False,
            "state": None,
            "unreadable": [],
            "calls": [],
            "reward": 0.0,
        }
        spans = [
            {
                **plain,
                "role": "tool" if i % 2 else "assistant",
                "tokens": size,
                "sampled": i % 2 == 0,
                "turn": i // 2,
                **({"calls": [call], "reward": 0.25} if i in (0, 2) else {}),
                **({"unreadable": [self.text("no closing brace")]} if i == 2 else {}),
            }
            for i, size in enumerate(sizes)
        ]
        other = [{**span, "sampled": i == 2} for i, span in enumerate(spans[:3])]
        paths = [{"turn": 1, "shared_tokens": sizes[0] + 3, "reward": 0.5, "spans": other}]
        return {"spans": spans, "reward": 1.0, "cut": "turns", "failure": "", "attempts": 2, "forks": 1, "paths": paths}

    def token(self, name, index):
        made = self.completion(name)
        texts = [made["tokens"]["text"][index], self.text(" other"), " third"]
        return {
            "token": index,
            "text": texts[0],
            "id": index,
            "log_probs": {"current": -0.25, "behavior": -0.5, "proximal": -0.5, "reference": None},
            "missing": {"reference": self.text("not stored; --recompute computes it")},
            "band": {"threshold": 0.18},
            "ratio": 1.284,
            "gradient_weight": 0.0,
            "kept": False,
            "reason": self.text("masked: 0.21 > 0.18 because the prefix had spent 0.07"),
            "top_k": [{"id": index + k, "text": texts[k], "log_prob": -0.5 - k} for k in range(3)],
            "version": 3,
        }

    @property
    def timeline(self):
        names = (("trainer", "train"), ("engine 0", "generate"), ("engine 1", "generate"), ("rewards", "score"))
        return [
            {
                "name": name,
                "process": self.text(lane),
                "thread": "",
                "start": 5.0 * k + i,
                "end": 5.0 * k + i + 3,
                "facts": {},
            }
            for k in range(4)
            for i, (lane, name) in enumerate(names)
        ]

    def answer(self, path, query):
        parts = [unquote(part) for part in path.split("/")]
        match parts:
            case ["runs"]:
                return self.runs
            case [_, "trend"]:
                return self.trend
            case [_, "timeline"]:
                return self.timeline
            case [run, "notes"]:
                return self.notes[run]
            case [_, "state"]:
                return {"step": self.steps[-1], "running": self.running, "steps": self.steps}
            case [_, "step", n]:
                return self.step(int(n)) if int(n) in self.steps else None
            case [_, "step", _, "search"]:
                return self.search(query)
            case [_, "step", _, "group", uid]:
                return self.group(int(uid))
            case [_, "step", n, "completion", name]:
                return self.completion(name, int(n))
            case [_, "step", _, "completion", name, "token", index]:
                return self.token(name, int(index))
            case [_, "step", n, "completion", name, "compare"]:
                other = int(query["step"])
                result = self.completion(name, other)
                texts = [np.array(made["tokens"]["text"]) for made in (self.completion(name, int(n)), result)]
                return {"run": int(query["run"]), "step": other, "completion": result, **first_difference(*texts)}
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.server.asked.append(self.path)
        if not address.path.startswith("/api/"):
            file = PAGE / (address.path.strip("/") or "index.html")
            return self.reply(file.read_bytes(), TYPES[file.suffix]) if file.is_file() else self.reply(b"", status=404)
        answer = self.server.run.answer(address.path.removeprefix("/api/"), query)
        return self.answer({"error": f"{address.path}: nothing here"} if answer is None else answer)

    def do_POST(self):
        note = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        run = self.path.split("/")[2]
        self.server.run.notes[run][note["key"]] = note["text"]
        self.answer(self.server.run.notes[run])

    def answer(self, answer):
        failed = isinstance(answer, dict) and "error" in answer and len(answer) == 1
        self.reply(json.dumps(answer).encode(), "application/json", 400 if failed else 200)

    def reply(self, body, kind="text/plain", status=200):
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(body), **HEADERS}
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        with suppress(ConnectionError):  # the page went elsewhere
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def serve(run):
    """A server of `run` on a free port of this machine; `.address`, `.asked` (paths), `.shutdown()`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.run, server.asked = run, []
    server.address = f"http://127.0.0.1:{server.server_port}/"
    Thread(target=server.serve_forever, daemon=True).start()
    return server
