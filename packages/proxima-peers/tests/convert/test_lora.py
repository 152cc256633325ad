"""`model.lora` from the peers' options for peft."""

import pytest

from proxima.config import resolve
from proxima.model.lora import Lora
from proxima_peers.convert.conversion import convert

from .conftest import names

VERL, PEFT = "actor_rollout_ref.model.", ("q_proj", "v_proj")


def adapter(rank, alpha, targets="all-linear", **more):
    return Lora(rank=rank, alpha=alpha, targets=targets, **more)


BASE = {
    "verl": {"algorithm.adv_estimator": "grpo"},
    "trl": {"num_generations": 8},
    "areal": {"actor.path": "x", "actor.kl_ctl": 0.0, "actor.eps_clip": 0.2},
    "unirl": {"algorithm._target_": "x.CPPO"},
}
ON = [
    ("verl", {VERL + "lora_rank": 32}, adapter(32, 16.0)),
    (
        "verl",
        {VERL + "lora_rank": 8, VERL + "lora_alpha": 64, VERL + "target_modules": ["k_proj"]},
        adapter(8, 64.0, ("k_proj",)),
    ),
    ("trl", {"use_peft": True}, adapter(16, 32.0, PEFT)),
    (
        "trl",
        {
            "use_peft": True,
            "lora_r": 4,
            "lora_alpha": 6,
            "lora_target_modules": "all-linear",
            "use_rslora": True,
            "use_dora": True,
        },
        adapter(4, 6.0, rslora=True, dora=True),
    ),
    ("areal", {"actor.use_lora": True}, adapter(32, 16.0)),
    ("areal", {"actor.use_lora": True, "actor.lora_rank": 8, "actor.target_modules": ["all-linear"]}, adapter(8, 16.0)),
    (
        "unirl",
        {"backend.lora_cfg.rank": 16, "backend.lora_cfg.alpha": 32},
        adapter(16, 32.0, ("q_proj", "k_proj", "v_proj", "o_proj")),
    ),
]


@pytest.mark.parametrize(("peer", "options", "expected"), ON)
def test_an_adapter_with_the_peers_defaults(converted, peer, options, expected):
    done = converted(peer, BASE[peer] | options)
    assert done.problems == () and resolve(done.recipe).config.model.lora == expected
    assert not set(options) & (names(done.unsupported) | names(done.unknown))


@pytest.mark.parametrize(
    ("peer", "options"),
    [
        ("verl", {VERL + "lora_rank": 0, VERL + "lora_alpha": 64}),
        ("trl", {"use_peft": False, "lora_r": 4}),
        ("areal", {"actor.use_lora": False, "actor.lora_rank": 4}),
    ],
)
def test_an_adapter_that_is_off(converted, peer, options):
    done = converted(peer, BASE[peer] | options)
    assert "lora" not in done.recipe.get("model", {}) and {name for name in options if "use_" not in name} <= names(
        done.ignored
    )


def test_dropout_is_reported_also_where_it_is_a_default(converted):
    default = converted("trl", BASE["trl"] | {"use_peft": True})
    assert "0.05, TRL's default" in next(option.why for option in default.unsupported if option.name == "lora_dropout")
    none = converted("trl", BASE["trl"] | {"use_peft": True, "lora_dropout": 0})
    assert "lora_dropout" in names(none.ignored) and "lora_dropout" not in names(none.unsupported)


def test_what_an_adapter_here_does_not_do(converted):
    pattern = {
        VERL + "lora_rank": 8,
        VERL + "target_modules": r"model\.layers\.\d+\.q_proj",
        VERL + "exclude_modules": "x",
    }
    assert set(pattern) - {VERL + "lora_rank"} <= names(converted("verl", BASE["verl"] | pattern).unsupported)
    fused = {VERL + "lora.rank": 8, VERL + "lora.alpha": 4}
    assert set(fused) <= names(converted("verl", BASE["verl"] | fused).unsupported)
    start = converted("verl", BASE["verl"] | {VERL + "lora_rank": 8, VERL + "lora_adapter_path": "an/adapter"})
    assert start.recipe["model"]["lora"]["path"] == "an/adapter" and "model.lora" in names(start.missing)


@pytest.mark.parametrize("actor, critic, message", [(8, 8, False), (8, 0, True), (0, 8, True), (0, 0, False)])
def test_verls_critic_and_policy_have_the_same_adapter_here(converted, actor, critic, message):
    options = {"algorithm.adv_estimator": "gae", VERL + "lora_rank": actor, "critic.model.lora_rank": critic}
    assert ("critic.model.lora_rank" in names(converted("verl", options).unsupported)) is message


SCRIPT = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
adapter = LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj"], task_type="CAUSAL_LM", bias={bias!r})
trainer = GRPOTrainer(model="m", args=GRPOConfig(num_generations=4), reward_funcs="x", peft_config=adapter)
"""


@pytest.mark.parametrize("bias", ["none", "all"])
def test_the_adapter_of_a_script(tmp_path, bias):
    (tmp_path / "train.py").write_text(SCRIPT.format(bias=bias))
    done = convert(tmp_path / "train.py", "trl")
    assert resolve(done.recipe).config.model.lora == adapter(16, 64.0, ("q_proj",))
    assert ("peft_config.bias" in names(done.unsupported)) is (bias == "all")
    assert "peft_config.task_type" in names(done.ignored)


def test_an_adapter_that_cannot_be_read_is_reported(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(bias="none").replace("adapter = LoraConfig", "adapter = make"))
    done = convert(tmp_path / "train.py", "trl")
    assert "peft_config" in names(done.missing)
