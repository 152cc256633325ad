"""TRL's GKDTrainer becomes a recipe of `proxima train` in which a teacher alone trains."""

import pytest

from proxima.config import resolve
from proxima.core.aggregate import TokenMean
from proxima.core.distillation import ForwardKl, JensenShannon, ReverseKl
from proxima_peers.convert.conversion import convert

from .conftest import names

BASE = {"model_name_or_path": "org/student", "teacher_model_name_or_path": "org/teacher", "dataset_name": "org/chats"}
BASE |= {"num_processes": 2, "lmbda": 1.0, "temperature": 1.0, "max_steps": 40}


@pytest.mark.parametrize(
    ("beta", "divergence"), [(0.0, ForwardKl()), (1.0, ReverseKl()), (0.3, JensenShannon(beta=0.3))]
)
def test_the_divergence_and_the_batch(converted, beta, divergence):
    more = {"beta": beta, "max_new_tokens": 70, "gradient_accumulation_steps": 3, "packing": True, "seq_kd": False}
    done = converted("trl", BASE | more)
    config = resolve(done.recipe, root=None).config
    teacher = config.algorithm.distillation
    assert (teacher.path, teacher.divergence, teacher.aggregate) == ("org/teacher", divergence, TokenMean())
    assert config.algorithm.surrogate is None and config.train.optimizer.lr == 2e-5
    train = config.train
    assert (train.prompts_per_step, train.completions_per_prompt, train.updates_per_step, train.steps) == (48, 1, 1, 40)
    assert (config.sampling.max_tokens, config.sampling.temperature, config.model.max_length) == (70, 1.0, 1024)
    assert not done.unsupported and not done.unknown and done.problems == ()
    assert {"task", "reward.0", "algorithm.distillation.divergence.top_k"} == names(done.missing)
    assert {"packing", "seq_kd"} <= names(done.ignored)


def test_what_has_no_equal(converted):
    messages = {
        option.name: option.why for option in converted("trl", {"seq_kd": True, "model_name_or_path": "m"}).unsupported
    }
    assert set(messages) == {"lmbda", "seq_kd", "temperature"} and "TRL's default" in messages["lmbda"]
    more = {"eval_strategy": "steps", "eval_steps": 5, "teacher_model_init_kwargs": {"a": 1}}
    done = converted("trl", BASE | more)
    assert names(done.unsupported) == {"teacher_model_init_kwargs.a"} and "eval.task" in names(done.missing)
    without = converted("trl", {"lmbda": 1.0, "temperature": 1.0})
    assert {"algorithm.distillation.path", "model.path", "train.steps"} <= names(without.missing)


def test_a_script_is_known_by_its_class(tmp_path):
    file = tmp_path / "distil.py"
    file.write_text(
        "from trl.experimental.gkd import GKDConfig, GKDTrainer\n"
        "args = GKDConfig(beta=0.5, lmbda=1.0, temperature=1.0, max_new_tokens=64, learning_rate=3e-6)\n"
        "GKDTrainer(model='org/student', teacher_model='org/teacher', args=args).train()\n"
    )
    config = resolve(convert(file, "trl").recipe, root=None).config
    assert config.algorithm.distillation.divergence == JensenShannon(beta=0.5)
    assert config.algorithm.distillation.path == "org/teacher" and config.model.path == "org/student"
    assert config.sampling.max_tokens == 64 and config.train.optimizer.lr == 3e-6
