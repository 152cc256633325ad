"""Prompts that show images: tokens, log-probs, gradients and completions against transformers, one sequence at a
time."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from proxima.data import FieldError, UserError
from proxima.data.flow import Prompt
from proxima.data.image_tokens import image_and_patch
from proxima.data.trajectory import Trajectory
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.protocol import Request, Sampling, ScoreRequest, WeightUpdate
from proxima.model.adapters.lora import Lora, target_layers
from proxima.model.architecture import vision_parameters
from proxima.model.chat.encode import SafeMessage, prompt_tokens
from proxima.model.images.image_folder import image_damage
from proxima.model.images.image_store import ImageStore, ImageTokenizer
from proxima.model.load import load
from proxima.model.model_source import ModelSource
from proxima.model.policy import Policy
from proxima.model.pretrained import load_tokenizer
from proxima.view.microscope.single_file import thumbnails
from tests.campaigns import campaign
from tests.tiny_images import FAMILIES, make_tiny_reader, picture

PICTURES = [picture(0, 20, 28), picture(1, 40, 17), picture(2, 16, 16)]
ASKED = (("hi", 0, 0), ("a <image> b", 0, 1), ("<image><image>c", 1, 3), ("x", 0, 3), ("a <image> b", 2, 3))


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = make_tiny_reader(kind, tmp_path_factory.mktemp(kind))
        return str(made[kind])

    return folder


@pytest.fixture
def store(reader):
    return ImageStore(reader("qwen2_vl"))


def asked(store, text, images):
    """The tokens of a question with images."""
    chat = store.numbered([{"role": "user", "content": text}], images)
    return prompt_tokens(chat, ImageTokenizer(load_tokenizer(store.model), store))


def prompts(store):
    return [asked(store, text, PICTURES[start:end]) for text, start, end in ASKED]


def trajectories(store):
    draws = np.random.default_rng(0)
    return [
        Trajectory(group=group, prompt_tokens=prompt, tokens=draws.integers(3, 200, length).astype(np.int32))
        for group, prompt in enumerate(prompts(store))
        for length in (5, 9)
    ]


def one_at_a_time(model, store, rows):
    """Log-probs by the model's own forward, which gets ids, pixels and grids as its processor would give them."""
    out = []
    for row in rows:
        sequence = np.concatenate([row.prompt_tokens, row.tokens])
        ids = torch.tensor(np.where(sequence < 0, store.config.image_token_id, sequence))[None].long()
        numbers = list(dict.fromkeys(image_and_patch(sequence[sequence < 0])[0].tolist()))
        pixels = [store.processed(number)[1] for number in numbers]
        shown = {name: torch.cat([p[name] for p in pixels], int(store.tiled)) for name in (pixels or [{}])[0]}
        if store.joined:
            shown["token_type_ids"] = (torch.tensor(sequence)[None] < 0).int()
        elif not store.tiled:
            shown["mm_token_type_ids"] = (torch.tensor(sequence)[None] < 0).int()
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **shown).logits[0]
        answer = slice(len(row.prompt_tokens) - 1, len(sequence) - 1)
        out.append(logits[answer].log_softmax(-1).gather(1, ids[0, len(row.prompt_tokens) :, None]).squeeze(1))
    return torch.cat(out)


FIRST = ("qwen2_vl", "gemma3", "smolvlm")
ALIKE = ("qwen2_5_vl", "idefics3")  # to the packing, as qwen2_vl and smolvlm
APART = [kind for kind in FAMILIES if kind not in ALIKE]
AFTER_AN_UPDATE = "tests/model/test_images.py::test_the_engine_has_the_trainers_log_probs_before_and_after_an_update"
ONE_AT_A_TIME = "tests/model/test_images.py::test_packed_log_probs_and_gradients_are_those_of_single_sequences"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share_prompt", "vision"), [(True, 1.0), *campaign(ONE_AT_A_TIME, [(True, 0.0), (False, 0.0)])]
)
@pytest.mark.parametrize("kind", [*APART, *campaign(ONE_AT_A_TIME, ALIKE)])
def test_packed_log_probs_and_gradients_are_those_of_single_sequences(kind, share_prompt, vision, reader):
    store = ImageStore(reader(kind))
    loaded = replace(load(reader(kind)), tokenizer=store.tokenizer, vision_lr_ratio=vision)
    policy = Policy(loaded, share_prompt=share_prompt)
    theirs = hf.AutoModelForImageTextToText.from_pretrained(reader(kind))
    rows = trajectories(store)
    ours = policy(policy.pack(rows)).log_prob
    expected = one_at_a_time(theirs, store, rows)
    assert (ours - expected).abs().max() < 1e-5
    weights = torch.linspace(-1, 1, len(ours))
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    trained, eyes = dict(policy.model.named_parameters()), vision_parameters(policy.model)
    wanted = {
        name: p.grad for name, p in theirs.named_parameters() if p.grad is not None and (vision or name not in eyes)
    }
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (trained[name].grad - gradient).abs().max() < 1e-5 * largest, name
    assert any(name in eyes for name in wanted) == bool(vision)
    assert all(p.grad is None for name, p in trained.items() if name not in wanted)


async def gaps(policy, store, engine, version):
    """Publish the policy; how far the log-probs of the engine, drawn and scored, are from its own at most."""
    await engine.publish(WeightUpdate(version=version, module=policy.model))
    shown = [Prompt(uid=i, messages=(), tokens=tokens) for i, tokens in enumerate(prompts(store))]
    samplings = [Sampling(max_tokens=length) for length in (6, 7)]
    requests = [
        Request(prompt=p, sample=s, sampling=sampling, seed=version)
        for p in shown
        for s, sampling in enumerate(samplings)
    ]
    completions = await collect(engine, requests)
    rows = [
        Trajectory.of(r.prompt, c, group=c.prompt_uid, advantage=0.0)
        for r, c in zip(requests, completions, strict=True)
    ]
    trainer = policy(policy.pack(rows)).log_prob.detach().numpy()
    scored = await engine.score([ScoreRequest(prompt_tokens=r.prompt_tokens, tokens=r.tokens) for r in rows])
    drawn = [c.untruncated_log_prob for c in completions]
    return [np.abs(trainer - np.concatenate(theirs)).max() for theirs in (drawn, scored)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FIRST, *campaign(AFTER_AN_UPDATE, [kind for kind in FAMILIES if kind not in FIRST])])
def test_the_engine_has_the_trainers_log_probs_before_and_after_an_update(kind, reader):
    """The vision tower moves too: the engine keeps an image's features, and has to forget them."""
    store = ImageStore(reader(kind))
    policy = Policy(replace(load(reader(kind)), tokenizer=store.tokenizer, vision_lr_ratio=1.0))

    async def both():
        engine = LocalEngine(policy.loaded, Local(slots=8, dtype="float32", prefill_tokens=64))
        assert max(await gaps(policy, store, engine, 1)) < 1e-5
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
        assert max(await gaps(policy, store, engine, 2)) < 1e-5

    asyncio.run(both())


@pytest.mark.slow
@pytest.mark.parametrize("perturbed", [{"weights": "int8"}, {"noise": 0.1}])
def test_a_perturbed_engine_sees_images_too(perturbed, reader, store):
    policy = Policy(replace(load(reader("qwen2_vl")), tokenizer=store.tokenizer))
    engine = LocalEngine(policy.loaded, Local(slots=8, dtype="float32", **perturbed))
    assert all(1e-5 < away < 3.0 for away in asyncio.run(gaps(policy, store, engine, 3)))


@pytest.mark.slow
def test_prompts_are_those_of_the_processor(reader):
    processor = hf.AutoProcessor.from_pretrained(reader("idefics3"))
    store = ImageStore(reader("idefics3"))
    parts = [{"type": "image"}] * 3 + [{"type": "text", "text": "x"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    expected = processor(text=text, images=[PICTURES])["input_ids"][0]
    ours = asked(store, "x", PICTURES)
    assert np.where(ours < 0, store.config.image_token_id, ours).tolist() == expected


def test_an_image_keeps_its_number_and_its_file_over_a_restart(reader, store, tmp_path):
    first = [store.add(image) for image in (*PICTURES, PICTURES[1].copy())]
    assert first == [0, 1, 2, 1]
    store.keep_in(tmp_path)
    store.add(picture(3, 8, 8))
    store.write()
    assert len(list(tmp_path.glob("*.png"))) == len((tmp_path / "index.txt").read_text().split()) == 4
    again = ImageStore(reader("qwen2_vl"), folder=tmp_path)
    assert [again.add(image) for image in reversed(PICTURES)] == [2, 1, 0]
    assert again.image(1).tobytes() == PICTURES[1].tobytes()
    with (tmp_path / "index.txt").open("a") as index:
        index.write("0" * 20)  # a kill has cut a line off
    again = ImageStore(reader("qwen2_vl"), folder=tmp_path)
    again.keep_in(tmp_path)
    assert again.add(picture(4, 8, 8)) == 4
    again.write()
    assert len(set((tmp_path / "index.txt").read_text().split())) == 5


def test_a_file_that_a_kill_cut_off_is_no_image(reader, store, tmp_path, monkeypatch):
    store.add(PICTURES[0])
    whole = Path.write_bytes

    def cut(file, content):
        whole(file, content[:10])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_bytes", cut)
        store.keep_in(tmp_path)
    assert list(tmp_path.glob("*.png")) == [] and (tmp_path / "index.txt").read_text() == ""
    again = ImageStore(reader("qwen2_vl"), folder=tmp_path)
    again.keep_in(tmp_path)
    assert again.add(PICTURES[0]) == 0
    again.write()
    assert again.image(0).tobytes() == PICTURES[0].tobytes()
    (tmp_path / f"{again.name(0)}.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"\.png can't be read; delete it, and resume"):
        again.image(0)


def kept(reader, folder):
    """The images in a folder, as a resume, a replay and another rank read them."""
    store = ImageStore(reader("qwen2_vl"), folder=folder)
    followed = ImageStore(reader("qwen2_vl"))
    followed.follow(folder)
    assert followed._names == store._names
    return store


@pytest.mark.parametrize("read", ["image", "content", "address", "processed"])
def test_another_valid_picture_under_the_same_name_is_refused(reader, store, tmp_path, read):
    for image in PICTURES:
        store.add(image)
    store.keep_in(folder := tmp_path / "images")
    PICTURES[1].transpose(0).save(folder / f"{store.name(1)}.png")
    assert getattr(kept(reader, folder), read)(0)
    with pytest.raises(UserError, match=f"{store.name(1)}.png differs from the image that the run wrote; del"):
        getattr(kept(reader, folder), read)(1)
    (wrong,) = image_damage(folder)
    assert wrong.endswith(f"{store.name(1)}.png differs from the image that the run wrote")
    assert [bool(address) for address in thumbnails(tmp_path, [0, 1, 2, 3, -1])] == [True, False, True, *2 * [False]]


def swapped(lines):
    return [lines[1], lines[0], *lines[2:]]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (swapped, "index.txt differs from what was written: its lines are in another order"),
        (lambda lines: lines[:2], "index.txt has 2 of the 3 names that were written"),
        (lambda lines: [], "index.txt has 0 of the 3 names that were written"),
        (
            lambda lines: [lines[0], "../x\n", lines[2]],
            "index.txt:2 has '../x', which names an image that does not exist",
        ),
        (lambda lines: [lines[0], "é" * 32 + "\n", lines[2]], "index.txt:2 has '\ufffd"),
        (lambda lines: lines * 200_000, "index.txt is longer than 524,287 lines, the most images of a run"),
    ],
)
def test_an_index_that_was_not_written_so_is_refused(reader, store, tmp_path, damage, said):
    for image in PICTURES:
        store.add(image)
    store.keep_in(tmp_path)
    index = tmp_path / "index.txt"
    index.write_text("".join(damage(index.read_text().splitlines(keepends=True))))
    with pytest.raises(UserError, match=re.escape(said)):
        kept(reader, tmp_path)
    assert len(image_damage(tmp_path)) == 1


def test_an_index_whose_write_failed_once_is_whole(reader, store, tmp_path, monkeypatch):
    store.keep_in(tmp_path)
    store.add(PICTURES[0])
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr("proxima.model.images.image_folder.write_atomic", raising(OSError(28, "No space left on device")))
        store.write()
    store.add(PICTURES[1])
    store.write()
    again = kept(reader, tmp_path)
    assert [again.add(image) for image in PICTURES[:2]] == [0, 1] and image_damage(tmp_path) == []


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_an_index_that_a_kill_left_longer_than_its_checksum_is_whole(reader, store, tmp_path, monkeypatch):
    store.add(PICTURES[0])
    store.keep_in(tmp_path)
    before = (tmp_path / "index.crc32").read_bytes()
    store.add(PICTURES[1])
    store.write()
    (tmp_path / "index.crc32").write_bytes(before)
    again = kept(reader, tmp_path)
    again.keep_in(tmp_path)
    assert [again.add(image) for image in PICTURES] == [0, 1, 2]
    again.write()
    (tmp_path / "index.txt").write_text("".join(swapped((tmp_path / "index.txt").read_text().splitlines(True))))
    with pytest.raises(UserError, match="in another order"):
        kept(reader, tmp_path)


def test_an_image_that_the_processor_refuses_is_one_line(store):
    number = store.add(picture(0, 1000, 2))
    with pytest.raises(UserError, match="an image of 1000 x 2 can't be shown: absolute aspect ratio"):
        store.tokens(number)


def test_pixels_are_made_once_within_bounds(store, monkeypatch):
    numbers = [store.add(image) for image in PICTURES]
    made = []
    process = store._process
    monkeypatch.setattr(store, "_process", lambda number: made.append(number) or process(number))
    for _ in range(3):
        for number in numbers:
            store.processed(number)
    assert made == numbers
    monkeypatch.setattr("proxima.model.images.image_store.PROCESSED", 1)
    store.processed(store.add(picture(5, 30, 30)))
    assert list(store._processed) == [3]


def test_unlike_images_of_one_size_are_unlike_prompts(store):
    first, second = (asked(store, "x", [picture(seed, 24, 24)]) for seed in (1, 2))
    assert first.shape == second.shape
    assert not np.array_equal(first, second)


def test_a_text_that_looks_like_an_image_is_text(store):
    text = "<|image_pad|> and <|vision_start|>"
    assert int((asked(store, text, PICTURES[:1]) < 0).sum()) == int((asked(store, "x", PICTURES[:1]) < 0).sum()) > 0


@pytest.mark.parametrize(
    ("text", "images", "message"),
    [("<image>", 2, "2 images, and <image> stands 1 times"), ("<image> <image>", 1, "1 images")],
)
def test_marks_and_images_must_agree(text, images, message, reader):
    with pytest.raises(UserError, match=message):
        asked(ImageStore(reader("smolvlm")), text, PICTURES[:images])


def test_a_model_without_eyes_is_refused(tiny_model):
    with pytest.raises(FieldError, match="is a llama, which can't be shown images: gemma3, idefics3"):
        ImageStore(str(tiny_model("llama")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [*APART, *campaign("tests/model/test_images.py::test_adapters_are_put_on_the_decoder_alone", ALIKE)]
)
def test_adapters_are_put_on_the_decoder_alone(kind, reader):
    model = load(reader(kind), lora=Lora(rank=2)).model
    adapted = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == set(target_layers(load(reader(kind)).model, Lora(rank=2)))
    assert adapted
    assert all(module in set(model.get_decoder().modules()) for module in map(model.get_submodule, adapted))


@pytest.mark.slow
def test_the_head_of_a_scalar_model_is_trained_whatever_the_tower_is(reader):
    store = ImageStore(reader("gemma3"))
    source = ModelSource(path=store.model, device="cpu", images=store)
    trained = {name for name, p in source.load_scalar(head_std=0.1).model.named_parameters() if p.requires_grad}
    assert "score.weight" in trained
    assert not any("vision" in name for name in trained)


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_mark_that_the_user_did_not_write_is_text(role, store):
    chat = [{"role": role, "content": "write <image> here"}, {"role": "user", "content": "what?"}]
    shown = store.numbered(chat, PICTURES[:1])
    assert [message.get("images") for message in shown] == [None, [0]]
    assert int((prompt_tokens(shown, store.tokenizer) < 0).sum()) > 0


def test_a_message_with_images_keeps_its_text_for_a_tokenizer_of_text(reader):
    plain = load_tokenizer(reader("qwen2_vl"))
    plain.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokens = prompt_tokens([{"role": "user", "content": "a <image> b", "images": [0]}], plain)
    assert plain.decode(tokens) == "a <image> b"


def test_an_empty_message_is_one_empty_text(reader):
    store = ImageStore(reader("smolvlm"))
    message = SafeMessage({"role": "user", "content": ""}, store.tokenizer)
    assert message.safe["content"] == message.neutral["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("number", [-1, 3])
def test_a_number_without_an_image_is_refused(number, store):
    store.add(PICTURES[0])
    with pytest.raises(UserError, match=f"image {number} is not among the 1"):
        store.name(number)


def test_an_index_that_names_other_files_is_refused(reader, tmp_path):
    (tmp_path / "index.txt").write_text("../x\n")
    with pytest.raises(UserError, match=r"'\.\./x', which names an image that does not exist"):
        ImageStore(reader("qwen2_vl"), folder=tmp_path)
