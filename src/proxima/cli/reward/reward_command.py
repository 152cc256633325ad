"""Score texts with rewards, without a model: try a reward before training with it. Serve a reward model over HTTP.

proxima reward score answers.jsonl --reward ./my_reward.py:near  # a function of yours
proxima reward score answers.jsonl --reward math --reward '{kind: repetition, weight: 0.1}'
proxima reward score answers.jsonl --reward quickstart           # the rewards of a recipe, a file or by name
proxima reward score runs/mine/rollouts/000012.parquet --reward runs/mine  # the recorded rollouts of a run

A row has a prompt, a completion or a list of them (a group), and any other columns, which are passed to the rewards as
in a run. Exit code 1: a completion has no score; 2: the file, a reward or a column is wrong.

proxima reward serve models/reward --port 8000
proxima train quickstart reward='{kind: http, url: "http://localhost:8000/score"}'

export SCORER_TOKEN=…
proxima reward serve models/reward --host 0.0.0.0 --token-env SCORER_TOKEN --allow-host scorer.lan
proxima train quickstart reward='{kind: http, url: "http://scorer.lan:8000/score", token_env: SCORER_TOKEN}'
"""

from proxima.cli.reward.score_action import score_file
from proxima.cli.reward.serving_action import serve_reward

COMMAND = {"score": score_file, "serve": serve_reward}
