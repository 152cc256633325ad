"""Files: YAML with OmegaConf's references, JSON, launch scripts, Python."""

from pathlib import Path

import pytest

from proxima.config.problems import ConfigError
from proxima_peers.convert.conversion import convert
from proxima_peers.convert.read import interpolated, read
from proxima_peers.convert.read_python import UNREADABLE, from_python
from proxima_peers.convert.read_script import Doubtful, from_script, variables_of_command

SCRIPTS = Path(__file__).parent / "scripts"


def script(name):
    return (SCRIPTS / f"{name}.sh").read_text()


def test_references():
    flat = {
        "a.b": 3,
        "a.c": "${a.b}",
        "a.d": "${.b}",
        "a.e.f": "${..b}",
        "x": "${oc.select:a.b,512}",
        "y": "${oc.select:no.such,512}",
        "z": "${oc.select:no.such,${oc.select:neither,null}}",
        "name": "run-${a.c}",
        "env": "${oc.env:HOME,/somewhere}",
        "open": "${oc.env:HOME}",
        "circle": "${circle}",
        "to": "${nowhere}",
    }
    result = interpolated(flat)
    assert {key: result[key] for key in ("a.c", "a.d", "a.e.f", "x", "y", "z", "name", "env")} == {
        "a.c": 3,
        "a.d": 3,
        "a.e.f": 3,
        "x": 3,
        "y": 512,
        "z": None,
        "name": "run-3",
        "env": "/somewhere",
    }
    assert (result["open"], result["to"]) == ("${oc.env:HOME}", "${nowhere}")


def test_a_launch_script():
    assert from_script(script("plain")) == {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "data.max_response_length": 20480,
        "actor_rollout_ref.rollout.n": 16,
        "data.train_files": ["a.parquet", "b.parquet"],
        "trainer.logger": ["console", "wandb"],
        "trainer.default_local_dir": Doubtful("the script has ${CKPTS}"),
        "actor_rollout_ref.actor.optim.lr": 1e-6,
    }


def test_what_a_script_decides_by_a_branch_is_in_doubt_and_nothing_else():
    assert from_script(script("branches")) == {
        "algorithm.adv_estimator": "grpo",
        "actor.lr": Doubtful("the script has ${LR}: LR is 1e-6 or 5e-7"),
        "rollout.n": 8,  # the same in every branch
        "actor.kl": Doubtful("the script has ${KL}: KL is 0.1 or 0.0"),
        "data.x": None,
        "trainer.nnodes": Doubtful("the script has 2, by a branch or command"),
        "a.dict.b": 1,
        "a.dict.c.d": "x",
        "a.gone": 1,
    }


def test_commands_of_a_script():
    two = "python -m verl.trainer.main_ppo a.b=1 a.c=2\npython -m verl.trainer.main_ppo a.b=3 a.c=2\n"
    assert from_script(two) == {"a.b": Doubtful("the script has 1 or 3, by a branch or command"), "a.c": 2}
    other = from_script("python -m recipe.dapo.main_dapo a.b=1")
    assert other["a.b"] == 1 and "recipe.dapo.main_dapo may have its own defaults" in other["launch"].why
    flags = "accelerate launch --num_processes 3 x.py --learning-rate 1e-6 --filling --reward_funcs a b --beta=0.0"
    assert from_script(flags) == {
        "num_processes": 3,
        "learning_rate": 1e-6,
        "filling": True,
        "reward_funcs": ["a", "b"],
        "beta": 0.0,
    }


def test_a_file_that_it_builds_on_is_read_or_told(tmp_path):
    (tmp_path / "run.sh").write_text("python x.py --config base.yaml actor.lr=2")
    assert "the options of base.yaml come first" in read(tmp_path / "run.sh")["config"].why
    (tmp_path / "base.yaml").write_text("actor: {lr: 1, path: x}")
    assert read(tmp_path / "run.sh") == {"actor.lr": 2, "actor.path": "x"}
    (tmp_path / "top.yaml").write_text("defaults: [base, ppo_trainer, _self_]\nactor: {lr: 3}")
    result = read(tmp_path / "top.yaml")
    assert (result["actor.lr"], result["actor.path"]) == (3, "x") and "the options of ppo_trainer" in result[
        "defaults"
    ].why


def test_a_program_reads_its_own_config_beside_the_script(tmp_path):
    folder = tmp_path / "recipe" / "cppo"
    (folder / "src" / "config").mkdir(parents=True)
    (folder / "run.sh").write_text("python3 -m recipe.cppo.src.main_cppo cppo.pruning_rate=0.5")
    assert "may have its own defaults" in read(folder / "run.sh")["launch"].why
    (folder / "src" / "config" / "cppo_trainer.yaml").write_text("cppo: {pruning_rate: 0, metric: smallest}")
    assert read(folder / "run.sh") == {"cppo.pruning_rate": 0.5, "cppo.metric": "smallest"}


def test_hydras_defaults_are_composed_from_the_folders_beside_the_file():
    """Groups with packages, relative ones, `${engine}` in a name, `override`; references are resolved at the end."""
    result = read(SCRIPTS / "hydra" / "trainer.yaml")
    assert "the options of elsewhere come first" in result.pop("defaults").why
    assert result == {
        "engine": "dp",
        "job.actor.optim.beta": 0.9,
        "job.actor.lr": 1,
        "job.actor.kind": "dp",
        "job.actor.size": 64,
        "data.length": 64,
        "job.rollout.length": 64,  # not the 512 of the file alone
    }
    big = read(SCRIPTS / "hydra" / "big.yaml")
    assert (big["job.actor.kind"], big["job.actor.lr"], big["engine"]) == ("mega", 5, "mega")
    assert "job.actor.optim.beta" not in big
    circle = read(SCRIPTS / "hydra" / "round.yaml")  # it ends
    assert (circle["a"], circle["b"]) == (1, 2)


def test_a_script_is_split_into_words_as_bash_splits_it():
    shell = script("words")
    result = from_script(shell)
    assert result == from_script(shell.replace("\n", "\r\n")) == from_script(shell.rstrip())
    assert result == {
        "data.length": 2048,
        "data.total": Doubtful("the script has $((UNKNOWN + 1024 * 2))"),
        "data.tag": "a (b); c & d | e",
        "data.files": ["a b.parquet"],
        "data.single": "one two",
        "actor.lr": Doubtful("the script has ${lr}: lr is 1e-6 or 5e-7"),
        "data.more": Doubtful("the script has 1 or 2, by a branch or command"),
        "data.sure": 4,
        "algo.name": "grpo",
        "data.dir": Doubtful('the script has $(cd "$(dirname "$0")/.." && pwd)'),
        "data.size": Doubtful("the script has $1"),
        "engine": "mega",
    }


def test_commands_of_branches_servers_and_launchers():
    branch = "if a; then python x.py --beta 1 --seed 2; else python x.py --beta 3 --seed 2 --lr 4; fi"
    assert from_script(branch) == {
        "beta": Doubtful("the script has 1 or 3, by a branch or command"),
        "seed": 2,  # every command has it
        "lr": Doubtful("the script has 4, by a branch or command"),
    }
    server = "trl vllm-serve --model x --host 0.0.0.0 &\nA=1 accelerate launch --num_processes 2 x.py --beta 1\n"
    assert from_script(server) == {"num_processes": 2, "beta": 1}
    ray = "ray job submit --working-dir . -- python3 -m verl.trainer.main_ppo --config-name=big a.b=1"
    assert from_script(ray) == {"config_name": "big", "a.b": 1}


def test_a_key_that_is_written_twice_loses_nothing(tmp_path):
    text = "a: {x: 1, y: 2}\nb: 1\nb: 2\nc: 3\nc: 3\na: {y: 4, z: 5}\n"
    twice = {"b": Doubtful("the file has both 1 and 2"), "a.y": Doubtful("the file has both 2 and 4")}
    expected = {"a.x": 1, "a.z": 5, "c": 3} | twice
    (tmp_path / "x.yaml").write_text(text)
    assert read(tmp_path / "x.yaml") == expected
    (tmp_path / "x.json").write_text('{"a": {"x": 1, "y": 2}, "b": 1, "b": 2, "c": 3, "c": 3, "a": {"y": 4, "z": 5}}')
    assert read(tmp_path / "x.json") == expected


PARSED = '''
"""
accelerate launch --num_processes 4 train.py --learning_rate 1e-6 --num_generations 8
"""
parser = TrlParser((GRPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
training_args.beta = 0.1
dataset = load_dataset("my-lab/problems")
def length(completions, **kwargs): ...
trainer = GRPOTrainer(model="base", args=training_args, reward_funcs=[length], train_dataset=dataset, peft_config=f())
'''


def test_a_python_file_that_parses_its_options(tmp_path):
    """They are in the command that its docstring shows; what it sets itself is read too."""
    (tmp_path / "train.py").write_text(PARSED)
    assert read(tmp_path / "train.py") == {
        "num_processes": 4,
        "learning_rate": 1e-6,
        "num_generations": 8,
        "beta": 0.1,
        "model_name_or_path": "base",
        "reward_funcs": ["__main__.length"],
        "peft_config": UNREADABLE,
        "dataset_name": "my-lab/problems",
    }


def test_accelerates_own_file_tells_the_number_of_processes(tmp_path):
    (tmp_path / "run.sh").write_text("accelerate launch --config_file zero.yaml x.py --num_generations 8")
    missing = {option.name for option in convert(tmp_path / "run.sh", "trl").missing}
    assert {"config_file", "train.prompts_per_step"} <= missing
    (tmp_path / "zero.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: bf16\n")
    assert read(tmp_path / "run.sh") == {"num_processes": 4, "mixed_precision": "bf16", "num_generations": 8}
    done = convert(tmp_path / "run.sh", "trl")
    assert done.recipe["train"]["prompts_per_step"] == 4  # 8 * 4 / 8
    assert not {"config_file", "train.prompts_per_step"} & {option.name for option in done.missing}


ROWS = """
from trl import GRPOConfig, GRPOTrainer
train_dataset, eval_dataset = load_dataset("my-lab/x", "main", split=["train[:5%]", "test"])
train_dataset = train_dataset.map(make_conversation)
scores = list(map(float, values))
kwargs = {"a": {"b": 1}}
args = GRPOConfig(beta=0.1, chat_template_kwargs={"level": LEVEL}, generation_kwargs=kwargs)
"""


def test_rows_that_a_python_file_makes_are_reported(tmp_path):
    """A system prompt in `make_conversation`, say, would be lost with the data set's name alone."""
    (tmp_path / "x.py").write_text(ROWS)
    result = read(tmp_path / "x.py")
    assert result == {
        "beta": 0.1,
        "chat_template_kwargs": UNREADABLE,  # LEVEL is not known
        "generation_kwargs.a.b": 1,
        "dataset_name": "my-lab/x",
        "dataset_config": "main",
        "dataset_train_split": "train[:5%]",
        "dataset_test_split": "test",
        "train_dataset": "train_dataset.map(make_conversation)",
    }
    missing = {option.name: option.why for option in convert(tmp_path / "x.py", "trl").missing}
    assert "make_conversation" in missing["train_dataset"]
    (tmp_path / "y.py").write_text('load_dataset("json", data_files="rows.jsonl")\nGRPOConfig()')
    assert read(tmp_path / "y.py") == {"dataset_name": "rows.jsonl"}


def test_python_is_read_not_run():
    head = "import trl\nLR = 1e-6\nN = 4\nN += 1\nx = f()\n"
    result = from_python(
        head + "c = trl.GRPOConfig(learning_rate=LR * 2, beta=-(-0.5), epsilon=x, num_generations=N, **more)"
    )
    assert (result["learning_rate"], result["beta"]) == (2e-6, 0.5)
    assert result["epsilon"] is result["num_generations"] is UNREADABLE  # N is assigned twice
    assert "**more" in result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.py", "x = 1", "has no GRPOConfig(…) call"),
        ("a.py", "GRPOConfig()\nGRPOConfig()", "has 2 GRPOConfig(…) calls, in lines 1, 2; keep one"),
        ("a.py", "def (", "not Python"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.yaml", "a: &x [*x]", ""),
        ("a.yaml", "- 1", "holds no options"),
        ("a.yaml", "a: !!python/object/apply:os.system ['true']", "not YAML"),
        ("a.json", "{", "not JSON"),
        ("a.toml", "max_steps = = 3", "not TOML"),
        ("a.sh", "echo hi", "has no words like"),
        ("a.yaml", "[" * 1000, "an anchor contains itself"),
        ("a.json", "[" * 200000, "not JSON: more than 100 levels"),
        ("a.py", "(" * 5000, "not Python"),
        ("a.yaml", "a: " + "x" * 10**6, "is larger than 1 MB"),
    ],
)
def test_files_that_hold_no_options(tmp_path, name, text, line):
    (tmp_path / name).write_text(text)
    if not line:
        read(tmp_path / name)  # a list is kept as it is, whatever it holds
        return
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / name)
    assert line in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
def test_what_grows_without_end_is_refused_or_in_doubt(tmp_path):
    twice = "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40))
    (tmp_path / "x.yaml").write_text("a0: &a0 {x: 1}\n" + twice)
    with pytest.raises(ConfigError, match="holds too many options"):
        read(tmp_path / "x.yaml")
    result = from_script("A=xy\n" + 'A="$A$A"\n' * 35 + "python -m verl.trainer.main_ppo a.b=$A a.c=1")
    assert isinstance(result["a.b"], Doubtful) and result["a.c"] == 1


def test_a_missing_file_and_one_that_is_no_text(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        read(tmp_path / "none.yaml")
    (tmp_path / "x.yaml").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")  # a mark of Windows editors
    assert read(tmp_path / "x.yaml") == {"a": 1, "b": 2}
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read(tmp_path / "x.yaml")


def test_options_in_a_variable_are_options_of_the_command():
    variables = script("variables")
    result = from_script("lr=1e-6\n" + variables)
    assert result == {
        "launch": Doubtful("$EXTRA may hold options, which are not in this file"),
        "a.b": 1,
        "actor.lr": 1e-6,
        "actor.clip": 0.2,
        "actor.tp": Doubtful("the script has 2 or 4, by a branch or command"),
        "actor.sp": Doubtful("the script has 1, by a branch or command"),
        "critic.lr": Doubtful("the script has 1, by a branch or command"),
    }
    # a later word of the command settles what a branch may have set, or not
    assert from_script(variables + "python -m verl.trainer.main_ppo a.b=1 actor.tp=8")["actor.tp"] == Doubtful(
        "the script has 8 or 2 or 4, by a branch or command"
    )


def test_a_variable_that_is_a_program_or_a_value_holds_no_options():
    script = "cd $REPO\naccelerate launch $FLAGS train.py --output_dir $OUT --beta 1\npython $MAIN a.b=1"
    assert "launch" not in from_script(script)


# ---- the environment of a command ------------------------------------------------------------------------------------

CONFIG = """
algorithm: {_target_: unirl.algorithms.cppo.CPPO}
num_rollouts: 5
eval_interval: 1
bundle: {config: {pretrained_model_ckpt_path: "${oc.env:QWEN3_PATH,org/default}"}}
logging: {report_to_wandb: "${oc.decode:${oc.env:REPORT,false}}"}
data_source:
  args: {run: {data_path: "${oc.env:DATA_PATH}", eval_data_path: "${oc.env:EVAL_DATA_PATH,${oc.env:DATA_PATH}}"}}
"""
RUN = "python -m unirl.train_ar --config-name=ar/small num_devices=8"
PATHS = {"data": "t.jsonl", "eval": "v.jsonl", "model": "org/mine"}


@pytest.fixture
def ran(tmp_path):
    """Of a script beside `examples`: the data, the held-out data and the model, or why they are not known."""

    def run(text):
        folder = tmp_path / "examples" / "ar"
        folder.mkdir(parents=True)
        (folder / "small.yaml").write_text(CONFIG)
        (tmp_path / "run.sh").write_text(text)
        flat = read(tmp_path / "run.sh")
        names = {"data": "data_source.args.run.data_path", "eval": "data_source.args.run.eval_data_path"}
        names["model"] = "bundle.config.pretrained_model_ckpt_path"
        return {name: getattr(flat[option], "why", flat[option]) for name, option in names.items()}

    return run


@pytest.mark.parametrize(
    "text",
    [
        f"DATA_PATH=t.jsonl EVAL_DATA_PATH=v.jsonl QWEN3_PATH=org/mine {RUN}",
        f"export DATA_PATH=t.jsonl\nexport EVAL_DATA_PATH='v.jsonl' QWEN3_PATH=org/mine\n{RUN}",
        f"DATA_PATH=t.jsonl\nEVAL_DATA_PATH=v.jsonl\nexport DATA_PATH EVAL_DATA_PATH\nQWEN3_PATH=org/mine {RUN}",
        f"D=t\nexport DATA_PATH=$D.jsonl\nEVAL_DATA_PATH=v.jsonl QWEN3_PATH=${{MINE:-org/mine}} \\\n  {RUN}",
        f"env DATA_PATH=t.jsonl EVAL_DATA_PATH=v.jsonl QWEN3_PATH=org/mine {RUN}",
        f'export QWEN3_PATH=org/mine\nDATA_PATH=t.jsonl EVAL_DATA_PATH=v.jsonl bash -c "{RUN}"',
        "DATA_PATH=t.jsonl EVAL_DATA_PATH=v.jsonl QWEN3_PATH=org/mine ENTRY=train_ar "
        "bash examples/run_experiment_single_node.sh ar/small",
        f"DATA_PATH=raw.jsonl python prepare.py\nDATA_PATH=t.jsonl EVAL_DATA_PATH=v.jsonl QWEN3_PATH=org/mine {RUN}",
        "ARGS=(--config-name=ar/small data_source.args.run.seed=3)\n"
        'DATA_PATH=t.jsonl EVAL_DATA_PATH=v.jsonl QWEN3_PATH=org/mine python -m unirl.train_ar "${ARGS[@]}"',
    ],
)
def test_variables_that_a_script_gives_its_command(ran, text):
    assert ran(text) == PATHS


def test_variables_that_a_command_does_not_get(ran):
    """Bash gives a command only what is exported."""
    assert ran(f"QWEN3_PATH=org/mine\nDATA_PATH=t.jsonl {RUN}") == {
        "data": "t.jsonl",
        "eval": "t.jsonl",
        "model": "org/default",
    }


def test_variables_that_depend_on_a_branch_or_a_machine(ran):
    script = "if [ $1 = a ]; then export DATA_PATH=a.jsonl; else export DATA_PATH=b.jsonl; fi\n"
    found = ran(f"{script}QWEN3_PATH=$SCRATCH/m EVAL_DATA_PATH=v.jsonl {RUN}")
    assert "a.jsonl or b.jsonl" in found["data"] and "sets QWEN3_PATH to $SCRATCH/m" in found["model"]


def test_a_variable_is_given_to_the_commands_after_its_export():
    assert variables_of_command("export A=1\necho hello") == {"A": "1"}
    assert variables_of_command("echo hello\nexport A=1") == variables_of_command("A=1 B=2") == {}


def test_a_loop_over_nothing_gives_its_variable_no_value():
    assert variables_of_command("export A\nfor A in ; do\npython -m m a.b=1\ndone") == {}


def test_a_data_set_without_splits_is_read():
    text = "load_dataset('rows', split=[])\nGRPOConfig(beta=0.1)"
    assert from_python(text) == {"beta": 0.1, "dataset_name": "rows"}


def test_variables_of_this_process_are_not_read(ran, monkeypatch):
    monkeypatch.setenv("QWEN3_PATH", "org/other")
    monkeypatch.setenv("DATA_PATH", "other.jsonl")
    assert ran(RUN) | {"eval": ""} == {"data": "${oc.env:DATA_PATH}", "eval": "", "model": "org/default"}
