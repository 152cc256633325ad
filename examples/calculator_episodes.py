"""Write episodes that use a calculator correctly, for a warm start of recipes/cpu/tools.yaml by supervised fine-tuning;
the recipe's held-out questions are not among them.

    python examples/calculator_episodes.py 100 runs/calculator_episodes.jsonl
"""

import json
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

from proxima.config.resolution import resolve
from proxima.environment.builtin import calculate
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentSpec
from proxima.environment.tool_calls import describe_tools
from proxima.rollout.episodes.played import with_instructions
from proxima.system.user_files import find_recipe
from proxima.task.prompts import with_system


def main(count: int, path: Path) -> None:
    """Write `count` chats, one per line and at most one per question: system message with the tool, question, call,
    result, answer."""
    config = resolve(find_recipe("cpu/tools")).config
    with closing(Hosts(EnvironmentSpec(kind="calculator"), workers=1)) as hosts:
        tools = describe_tools(hosts.interface.schemas, config.episode.tool_format)
    rows = config.task.rows(config.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in islice(rows, count):
            first, second = row.metadata["operands"]
            expression = f"{first} {row.metadata['operator']} {second}"
            chat = [
                *with_instructions(with_system(row.messages, config.data.system), tools),
                {"role": "assistant", "content": f"```calculate\n{expression}\n```"},
                {"role": "user", "content": calculate(expression)},  # as shown to a template without tools
                {"role": "assistant", "content": row.answer},
            ]
            file.write(json.dumps({"messages": chat}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
