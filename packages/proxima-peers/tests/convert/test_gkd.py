"""TRL's GKDTrainer becomes a recipe of `proxima train` in which a teacher alone trains."""

from proxima.config import resolve
from proxima.core.distillation import JensenShannon
from proxima_peers.convert.conversion import convert


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
