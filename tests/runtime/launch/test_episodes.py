"""What no episode can be played with is one line and exit code 2, before weights are looked for."""

import json
import shutil
from pathlib import Path

import pytest

from proxima.cli.main import main
from tests.runtime.tiny_run import recipe

pytestmark = pytest.mark.usefixtures("lent_servers")
WORLD = "tests.environment.network_world"
TEMPLATE = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
TEMPLATE += "{{ m.content }}{% endfor %}{% if tools %}T{% endif %}"
SAYS = {
    f"task.environment={WORLD}:Made": "can't be made: ConnectionRefusedError: [Errno 111] Connection refused; is the "
    "network or the server there that it needs?",
    f"task.environment={WORLD}:Imported": "can't be imported: ConnectionRefusedError: [Errno 111] Connection refused; "
    "is the network or the server there that it needs?",
    f"task.environment={WORLD}:Reset": "can't begin an episode: ConnectionRefusedError: [Errno 111] Connection refused "
    "(network_world.py:",
    f"task.environment={WORLD}:Long": "tokens, and the context 2048 (model.max_length)",
    f"task.environment={WORLD}:Chance": "`reset` gives the completions of a prompt different messages: everything "
    "random must come from the row and the seed",
    "task.environment=tests.environment.bad_worlds:NoTypes": "Argument way is missing a type hint in function turn",
    f"task.environment={WORLD}:Turn task.tools=[tests.environment.network_world:Turn.turn]": "has no 'Turn.turn'",
    "task.environment=calculator task.tools=[proxima.environment.builtin:calculate]": "has a method 'calculate', "
    "and tools has a function of this name; rename one of them",
    "task.environment=tests.rollout.drawing_environment:Drawing": "no image can be shown: set episode.images=true",
    "task.environment=calculator episode.seconds=5": "must be >= call_seconds=30, or no call could take as long",
    "task.environment=calculator episode.tokens=5": "is less than one turn may have, sampling.max_tokens=6",
    "task.environment=calculator model.path={top}/toolless": "in a form that isn't known here; set episode.tool_format",
    "task.environment=calculator model.path={top}/toolless episode.tool_format=hermes": "can't be played with this",
}


@pytest.fixture(scope="module")
def weightless(tiny_model, tmp_path_factory):
    """A folder with a recipe, whose model and that without tools have no weights."""
    top = tmp_path_factory.mktemp("weightless")
    folder = Path(shutil.copytree(tiny_model("llama"), top / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    shutil.copytree(folder, top / "toolless")
    (top / "toolless" / "chat_template.jinja").write_text(TEMPLATE)
    (top / "recipe.yaml").write_text(json.dumps(recipe(folder)))
    return top


@pytest.mark.slow
@pytest.mark.parametrize("words", SAYS)
def test_one_line_before_weights_load(words, weightless, capsys):
    """In the folder of all tests: in another, no server would be lent."""
    given = words.format(top=weightless).split()
    assert main(["train", f"{weightless}/recipe.yaml", f"folder={weightless}/run", *given]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert SAYS[words] in line and not (weightless / "run").exists()
