"""The stages that query teacher and reference."""

from dataclasses import replace
from pathlib import Path

from proxima.config.describe import kind_of
from proxima.config.sections.algorithm_section import DistillationConfig
from proxima.data import FieldError, renamed, require, within
from proxima.engine.choice import EngineChoice
from proxima.engine.protocol import close_engine
from proxima.model.compute_thread import ComputeThread
from proxima.model.model_source import ModelSource
from proxima.model.parallel.refusals import sharding_beside
from proxima.model.pretrained import LoadedModel, UnloadedModel
from proxima.model.second_model import read_beside
from proxima.runtime.launch.engine_needs import TEACHER
from proxima.training.forward_stage import EngineStage, ForwardStage, TeacherStage

PATH = "algorithm.distillation.path"


def unloaded_teacher(distillation: DistillationConfig, student: UnloadedModel) -> UnloadedModel:
    """The teacher before its weights are loaded; its context is that of the student.

    Raises:
        FieldError: its tokens differ from the student's, or it reads fewer tokens than prompt and completion may
            have together.
    """
    path, remedy = distillation.path, "use a teacher of the student's family: they are compared token by token"
    with within("algorithm.distillation"):
        teacher = read_beside(student, path, None, "path", remedy)
        families = student.config.model_type, teacher.config.model_type
        alike = student.images is None or families[0] == families[1]
        require(alike, "path", path, f"is a {families[1]}, and a {families[0]} is shown images", remedy=remedy)
        for name in ("bos_token_id", "eos_token_id"):
            ours, theirs = getattr(student.tokenizer, name, None), getattr(teacher.tokenizer, name, None)
            require(ours == theirs, "path", path, f"has {name}={theirs}, and model.path has {ours}", remedy=remedy)
        bound = f"reads at most {teacher.context} tokens, and prompt and completion may have {student.context}"
        remedy = f"set model.max_length={teacher.context}"
        require(teacher.context >= student.context, "path", path, bound, remedy=remedy)
        top_k, size = distillation.divergence.top_k, min(student.vocabulary, teacher.vocabulary)
        require(top_k <= size, "divergence.top_k", top_k, f"must be at most the vocabulary, {size}")
    return replace(teacher, context=student.context)


def make_teacher_stage(
    source: ModelSource, distillation: DistillationConfig, student: LoadedModel, compute: ComputeThread
) -> ForwardStage:
    """Load the weights of a teacher beside those of the student, which come from `source`, and build its stage. Token
    ids that one of the models lacks are padding of the other's output layer.

    Raises:
        FieldError: the weights can't be loaded.
    """
    divergence, path = distillation.divergence, distillation.path
    spread = sharding_beside(source.sharding, path)
    teacher_source = replace(source, path=path, revision=None, lora=None, sharding=spread, attention="auto")
    with renamed("model.path", PATH):
        teacher = compute.call(teacher_source.load)
    teacher.model.requires_grad_(False)
    policy = replace(teacher_source, gradient_checkpointing=False).policy(teacher)
    vocabulary = min(int(each.model.config.get_text_config().vocab_size) for each in (student, teacher))
    return TeacherStage(policy=policy, top_k=divergence.top_k, top_k_of=divergence.top_k_of, vocabulary=vocabulary)


def make_engine_stage(
    source: ModelSource, choice: EngineChoice, compute: ComputeThread, log: Path | None
) -> ForwardStage:
    """Build the engine of the reference or the teacher, and the stage that queries it. Its weights are loaded as those
    of the policy, which come from `source`, without an adapter. `log` is a file for the output of processes that the
    engine starts.

    Raises:
        FieldError: the engine does not score, or its weights can't be loaded.
    """
    model, path = choice.needs.model, choice.path
    model_source = replace(source, path=model.path, revision=model.revision, lora=None, sharding=None)
    with renamed("model.path", PATH if path == TEACHER else "model.path"):
        engine, _ = choice.build(model_source.load, compute=compute, log=log, seed=source.seed)
    if not engine.capabilities.score:
        close_engine(engine)
        remedy = f"set {path}=null, or use one that does"
        raise FieldError(path, kind_of(choice.spec), "does not score tokens", remedy=remedy)
    return EngineStage(column="teacher_log_prob" if path == TEACHER else "reference_log_prob", engine=engine)
