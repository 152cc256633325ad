"""`monitor` from the peers' options: what a file turns on, under the names that it gives."""

from dataclasses import fields

import pytest

from proxima.config import resolve
from proxima.view.trackers import TRACKERS, Mlflow, TensorBoard, Trackio, Wandb
from proxima_peers.convert import trackers
from proxima_peers.convert.conversion import convert

from .conftest import why

VERL = {"algorithm.adv_estimator": "grpo"}
UNIRL = {"algorithm._target_": "unirl.algorithms.grpo.GRPO"}
AREAL = {"gconfig.n_samples": 8, "actor.path": "m"}
PEERS = {"verl": VERL, "trl": {"num_generations": 8}, "unirl": UNIRL, "areal": AREAL}


@pytest.fixture
def tracked(converted):
    """The resolved trackers of a peer's options, and the conversion."""

    def run(peer, options):
        done = converted(peer, PEERS[peer] | options)
        return resolve(done.recipe).config.monitor, done

    return run


@pytest.mark.parametrize("peer", PEERS)
def test_a_file_that_says_nothing_gets_no_tracker(tracked, peer):
    monitors, done = tracked(peer, {})
    assert monitors == () and "monitor" not in done.recipe


def test_trl_report_to(tracked):
    assert tracked("trl", {"report_to": "tensorboard"})[0] == (TensorBoard(),)
    options = {
        "report_to": ["wandb", "trackio", "mlflow", "tensorboard", "wandb"],
        "run_name": "first",
        "project": "arithmetic",
        "trackio_space_id": "lab/runs",
        "logging_dir": "logs",
        "wandb_project": "open-r1",
        "wandb_entity": "lab",
        "wandb_run_group": "grpo",
    }
    monitors, done = tracked("trl", options)
    assert monitors == (
        Wandb(project="open-r1", entity="lab", name="first", group="grpo"),
        Trackio(project="arithmetic", name="first", space_id="lab/runs"),
        Mlflow(name="first"),
        TensorBoard(folder="logs"),
    )
    assert not set(options) & {*why(done.ignored), *why(done.unsupported), *why(done.read)}
    assert "project: arithmetic  # from project" in done.text


@pytest.mark.parametrize("written", ["none", ["none"], []])
def test_trl_reports_to_none(tracked, written):
    monitors, done = tracked("trl", {"report_to": written, "run_name": "first"})
    assert monitors == ()
    assert "no result depends on it" in why(done.ignored)["run_name"]
    assert not written or "no tracker" in why(done.ignored)["report_to"]


def test_all_trackers_of_a_machine_are_to_fill_in_and_unknown_ones_are_named(tracked):
    monitors, done = tracked("trl", {"report_to": "all"})
    assert monitors == () and "report_to: all" in why(done.missing)["monitor"]
    monitors, done = tracked("trl", {"report_to": ["comet_ml", "wandb"]})
    assert monitors == (Wandb(),) and "comet_ml: no such tracker" in why(done.unsupported)["report_to"]


def test_a_trl_script_and_its_command_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        'config = GRPOConfig(num_generations=8, report_to=["wandb"], run_name="a")\nGRPOTrainer(args=config)\n'
    )
    assert convert(script, "trl").recipe["monitor"] == [{"kind": "wandb", "name": "a"}]
    shell = tmp_path / "train.sh"
    shell.write_text("trl grpo --num_generations 8 --report_to wandb tensorboard --run_name a\n")
    assert convert(shell, "trl").recipe["monitor"] == [{"kind": "wandb", "name": "a"}, {"kind": "tensorboard"}]
    script.write_text("GRPOTrainer(args=GRPOConfig(num_generations=8, report_to=args.report_to))\n")
    done = convert(script, "trl")
    assert "monitor" not in done.recipe and "report_to" in why(done.missing)


def test_verl_logger(tmp_path):
    shell = tmp_path / "run.sh"
    shell.write_text("""
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\
    trainer.logger='["console","wandb","tensorboard","mlflow","swanlab"]' \\
    trainer.project_name='verl_grpo' trainer.experiment_name=run_$(date +%s)
""")
    done = convert(shell, "verl")
    assert resolve(done.recipe).config.monitor == (
        Wandb(project="verl_grpo"),
        TensorBoard(),
        Mlflow(project="verl_grpo"),
    )
    assert why(done.unsupported)["trainer.logger"].startswith("swanlab: no such tracker")
    assert "console: no tracker" in why(done.ignored)["trainer.logger"]
    assert "our default is used" in why(done.ignored)["trainer.experiment_name"]  # the script's clock names the run
    assert not any("experiment_name" in option.name for option in done.missing)


@pytest.mark.parametrize("logger", ["console", ["console"], ["console", "file"], None])
def test_verl_without_a_tracker(tracked, logger):
    monitors, done = tracked("verl", {"trainer.logger": logger, "trainer.project_name": "p"})
    assert monitors == () and "no result depends on it" in why(done.ignored)["trainer.project_name"]
    assert done.unsupported == done.unknown == []


def test_verls_first_name_of_wandb(tracked):
    assert tracked("verl", {"trainer.logger": ["console", "tracking", "wandb"]})[0] == (Wandb(),)


def test_unirl_logging(tracked):
    names = {"project_name": "p", "run_name": "r", "entity": "lab", "tags": ["a", "b"], "wandb_mode": "offline"}
    options = {f"logging.{name}": value for name, value in names.items()}
    monitors, done = tracked("unirl", options | {"logging.report_to_wandb": True})
    assert monitors == (Wandb(project="p", name="r", entity="lab", tags=("a", "b"), mode="offline"),)
    assert not set(options) & set(why(done.ignored))
    assert tracked("unirl", options | {"logging.report_to_wandb": False})[0] == ()
    monitors, done = tracked("unirl", options | {"logging.report_to_wandb": True, "logging.wandb_mode": "disabled"})
    assert monitors == () and "disabled" in why(done.ignored)["logging.report_to_wandb"]
    odd, done = tracked("unirl", options | {"logging.report_to_wandb": True, "logging.wandb_mode": "shared"})
    assert odd[0].mode is None and "shared" in why(done.missing)["monitor.0.mode"]
    assert "logging.report_to_swanlab" in why(tracked("unirl", {"logging.report_to_swanlab": True})[1].unsupported)


def test_areal_stats_logger(tracked):
    logger = "stats_logger."
    off = {logger + "wandb.mode": "disabled", logger + "trackio.mode": "disabled", "experiment_name": "gsm8k"}
    monitors, done = tracked("areal", off | {logger + "wandb.project": "p"})
    assert monitors == () and done.unsupported == tracked("areal", {})[1].unsupported
    on = {
        logger + "experiment_name": "gsm8k",
        "trial_name": "trial0",
        logger + "wandb.mode": "online",
        logger + "wandb.tags": ["a"],
        logger + "wandb.notes": "n",
        logger + "wandb.wandb_api_key": "k",
        logger + "trackio.mode": "local",
        logger + "trackio.project": "p",
        logger + "tensorboard.path": "logs",
        logger + "swanlab.mode": "online",
    }
    monitors, done = tracked("areal", on)
    assert monitors == (
        Wandb(project="gsm8k", name="trial0", tags=("a",), mode="online"),  # AReaL's names for what is not set
        Trackio(project="p", name="trial0"),
        TensorBoard(folder="logs"),
    )
    assert "no field" in why(done.ignored)[logger + "wandb.notes"]
    assert (
        "no key" in why(done.ignored)[logger + "wandb.wandb_api_key"] and "k" not in str(done.recipe["monitor"]).split()
    )
    assert "no such tracker" in why(done.unsupported)[logger + "swanlab.mode"]


def test_fields_that_options_fill_are_fields_of_the_trackers():
    tables = [trackers.TRL, trackers.VERL, {"wandb": trackers.UNIRL}, trackers.AREAL]
    for table in tables:
        for kind, names in table.items():
            assert set(names) <= {field.name for field in fields(TRACKERS[kind])}


def test_a_tracker_that_this_machine_lacks_is_no_problem_of_the_recipe(tracked, monkeypatch):
    monkeypatch.setattr(Wandb, "problem", lambda tracker: "is not installed")
    assert tracked("verl", {"trainer.logger": ["wandb"]})[1].problems == tracked("verl", {})[1].problems
