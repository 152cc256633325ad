"""Where the time goes: which kind each operation is, and the least that it takes."""

import importlib
import sys
from collections import Counter

import pytest
import torch
from torch import nn

from benchmarks.where import kinds, phases
from benchmarks.where.limits import Machine, Products, Shapes
from benchmarks.where.parts import Phase, Times
from benchmarks.where.run import describe, summary


def test_every_function_that_is_watched_exists():
    places = [place for table in (phases.PHASES, phases.REGIONS) for own in table.values() for place in own]
    assert len(places) > 8
    for place in places:
        owner, name = phases.find(place)
        assert callable(getattr(owner, name))
    with pytest.raises(RuntimeError, match="kv_cache:KVCache.gone does not exist"):
        phases.find("proxima.engine.local.kv_cache:KVCache.gone")


@pytest.mark.parametrize(
    ("name", "region", "kind"),
    [
        ("aten::mm", None, "products"),
        ("mkldnn::_linear_pointwise", None, "products"),
        ("aten::mm", "vocabulary", "products"),
        ("aten::bmm", "attention", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", None, "attention"),
        ("aten::copy_", "attention", "copies"),
        ("aten::copy_", "vocabulary", "vocabulary"),
        ("aten::silu", None, "elementwise"),
        ("aten::_fused_adamw_", None, "elementwise"),
        ("aten::view", None, "overhead"),
        ("autograd::engine::evaluate_function: MmBackward0", None, "overhead"),
        ("MmBackward0", None, "overhead"),
        ("lab::one_pass", None, "fused"),
        ("kernel/StepKernels.attend", None, "attention"),
        ("kernel/Sample.__call__", None, "vocabulary"),
        ("kernel/TileLinear.__call__", None, "products"),
        ("kernel/StepKernels.other", None, "fused"),
        ("## Call CompiledFxGraph f3 ##", "attention", "attention"),
    ],
)
def test_kind_of_an_operation(name, region, kind):
    assert kinds.kind_of(name, region) == kind


class Model:
    """A product, and a region of another."""

    def __init__(self):
        self.weight = torch.randn(64, 64, requires_grad=True)

    def forward(self, x):
        return self.scores(x @ self.weight).sum()

    def scores(self, x):
        return torch.bmm(x[None], x.T[None])


def test_a_backward_pass_has_the_regions_of_its_forward_pass(monkeypatch):
    watched = {"forward": (f"{__name__}:Model.forward",), "backward": ("torch:Tensor.backward",)}
    monkeypatch.setattr(phases, "PHASES", watched)
    monkeypatch.setattr(phases, "REGIONS", {"attention": (f"{__name__}:Model.scores",)})
    model, before = Model(), Model.forward
    result, operations, clock = kinds.trace(lambda: model.forward(torch.randn(8, 64)).backward())
    for phase in watched:
        assert {"attention aten::bmm", "products aten::mm"} <= set(operations[phase])
        assert clock.seconds[phase] > sum(result[phase].values()) > 0
    assert Model.forward is before  # what was replaced is back


def test_a_compiled_kernel_is_an_operation(tmp_path, monkeypatch):
    (tmp_path / "lab_kernels").mkdir()
    (tmp_path / "lab_kernels" / "__init__.py").touch()
    code = "class Step:\n    def norm(self):\n        return sum(range(100_000))\n    def _own(self): ...\n"
    code += "def sample_kernel():\n    return lambda: sum(range(100_000))\n"
    (tmp_path / "lab_kernels" / "step.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(phases, "KERNELS", "lab_kernels")
    monkeypatch.setattr(phases, "PHASES", {"decode": (f"{__name__}:Model.forward",)})
    monkeypatch.setattr(phases, "REGIONS", {})
    assert list(phases.kernels()) == ["lab_kernels.step:Step.norm", "lab_kernels.step:sample_kernel"]
    module = importlib.import_module("lab_kernels.step")
    step = module.Step()
    monkeypatch.setattr(Model, "forward", lambda self: (step.norm(), module.sample_kernel()()))
    result, operations, clock = kinds.trace(lambda: Model().forward())
    assert list(operations["decode"]) == ["elementwise kernel/Step.norm", "vocabulary kernel/sample_kernel"]
    assert clock.seconds["decode"] > result["decode"]["elementwise"] > 0


def test_a_clock_counts_the_outer_phase(monkeypatch):
    own = sys.modules[__name__]
    monkeypatch.setattr(own, "outer", lambda: own.within(), raising=False)
    monkeypatch.setattr(own, "within", lambda: None, raising=False)
    monkeypatch.setattr(phases, "PHASES", {"a": (f"{__name__}:outer",), "b": (f"{__name__}:within",)})
    clock = phases.Clock()
    with clock.watch():
        own.outer()
    assert clock.seconds["a"] > 0 and clock.seconds["b"] == 0


def test_shapes_of_a_model(tiny_model):
    from proxima.model.load import load

    shapes = Shapes.of(load(str(tiny_model("qwen3")), device="cpu").model)
    assert len(shapes.layers) == 7 * shapes.depth and len(shapes.joined) == 4 * shapes.depth
    assert sum(a * b for a, b in shapes.layers) == sum(a * b for a, b in shapes.joined)
    assert sum(a * b for a, b in shapes.layers) + shapes.head[0] * shapes.head[1] <= shapes.parameters


def test_the_machine_and_its_products():
    machine = Machine(torch.float32, torch.device("cpu"), tiny=True)
    assert machine.flops > 0 and machine.moved(1 << 20, 1) > machine.moved(1 << 10, 1) > 0
    assert set(machine.rates[1 << 12]) == {"copy", "update", "read"}
    products = Products([(64, 32), (32, 64)], torch.bfloat16, torch.device("cpu"))
    assert products.forward(8) > 0 and products.forward(8, packed=True) > 0 and products.backward(8) > 0


def test_a_phase_is_divided_into_kinds():
    times = Times({}, {"decode": Counter(products=0.5, copies=0.25)}, {"decode": Counter({"products aten::mm": 0.5})})
    phase = times.phase("decode", [1.5, 1.0, 0.9], {"products": 0.25, "attention": 0.05}, tokens=100)
    assert phase.kinds == {"products": 0.5, "copies": 0.25, "overhead": 0.25} and phase.limit == pytest.approx(0.3)
    text = describe("decode", "2 rows", phase)
    assert "| matrix products           | 500.0   | 50%   | 250.0    | 50%          |" in text
    assert "longest: aten::mm 500.0" in text
    assert summary({"decode": phase}).splitlines()[-1].split("|")[-3:] == [
        " 25%                   ",
        " 30%          ",
        "",
    ]
    slow = times.phase("decode", [0.5], {})  # the profiled run took longer than the others
    assert slow.kinds == pytest.approx({"products": 1 / 3, "copies": 1 / 6, "overhead": 0.0})
    assert Phase([1.0], {}, {}).json()["limit"] == 0


def test_a_layer_of_an_unknown_form_counts_as_it_is():
    block = nn.ModuleDict({"mixer": nn.Linear(3, 5)})
    whole = nn.Module()
    whole.blocks = nn.ModuleList([block])
    whole.head = nn.Linear(3, 7)
    whole.config = type("Config", (), {"num_attention_heads": 1, "num_hidden_layers": 1, "hidden_size": 3})()
    whole.get_decoder = lambda: type("Decoder", (), {"layers": whole.blocks})()
    whole.get_output_embeddings = lambda: whole.head
    shapes = Shapes.of(whole)
    assert shapes.layers == shapes.joined == ((5, 3),) and shapes.head == (7, 3) and shapes.head_dim == 3
