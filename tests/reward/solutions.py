# ruff: noqa: E501
"""Solutions that pass tests only if the tests are at fault, over ten kinds, and honest ones of many styles."""

from itertools import product

# Tests, each of which an honest `f` passes; a hostile solution defines `f` by the body of an attack.
ROWS = {
    "equal": "assert f(3) == 1002",
    "all": "assert all(map(lambda x: f(x) == x + 999, [3, 4]))",
    "zip": "for x, y in zip([3, 4], map(f, [3, 4])):\n    assert y == x + 999",
    "loop": "seen = list(filter(lambda x: f(x) != x + 999, [3, 4, 5]))\nassert not seen",
    "maximum": "assert max((abs(f(x) - x - 999) for x in [3, 4]), default=0) == 0",
    "next": "assert next((x for x in [3, 4] if f(x) != x + 999), None) is None",
    "isclose": "import math\nassert math.isclose(f(3), 1002.0)",
    "free_math": "assert math.isclose(f(3), 1002.0)",
    "abs": "assert abs(f(3) - 1002) < 1e-6",
    "allclose": "import numpy as np\nassert np.allclose(f(3), [1002.0, 1002.0])",
    "array_equal": "assert np.array_equal(f(3), 1002)",
    "testing": "np.testing.assert_allclose(f(3), [1002.0, 1002.0])",
    "sorted": "assert sorted([f(4), f(3)]) == [1002, 1003]",
    "text": "assert str(f(3)) == '1002' and repr(f(3)) == '1002'",
    "isinstance": "x = f(3)\nassert isinstance(x, int) and not x != 1002",
    "in": "assert f(3) in (1002, 1004) and not f(3) < 0",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 1002)",
}
LIAR = """class Liar:
    def __getattr__(self, name): return lambda *a, **k: True
"""
OPERATORS = ["__sub__", "__rsub__", "__add__", "__radd__", "__lt__", "__gt__", "__le__", "__ge__", "__ne__", "__float__", "__int__", "__index__", "__abs__", "__contains__", "__round__", "__format__", "__mod__", "__bool__", "__hash__", "__len__"]  # fmt: skip
ALL = "".join(f"    def {name}(self, *a): return {'0.0' if name == '__float__' else 'True'}\n" for name in OPERATORS)
ARRAY = ("{'shape': (0,), 'typestr': '<f8', 'version': 3, 'data': (4096, False)}",
         "{'shape': (2,), 'typestr': '<f8', 'version': 3, 'data': (4096, True)}",
         "{'shape': (), 'typestr': '|O', 'version': 3, 'data': (4096, False)}")  # fmt: skip
FRAMES = (
    "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        {}\n        frame = frame.f_back\n"
)
SOCKETS = (
    "import os\ndef f(x):\n    for fd in range(3, 40):\n        try: os.write(fd, {})\n        except OSError: pass\n"
)


def body(text):
    return f"def f(x):\n    {text}\n"


def of_class(members, bases=""):
    return f"class Any{bases}:\n{members}\n" + body("return Any()")


# By kind: solutions, none of which knows what a test asks.
ATTACKS = {
    "iterators": [
        body("raise StopIteration"),
        body("raise StopIteration(True)"),
        "class E(StopIteration): pass\n" + body("raise E"),
        "class StopIteration(ValueError): pass\n" + body("raise StopIteration"),
        body("raise StopAsyncIteration"),
        body("raise GeneratorExit"),
        body("raise IndexError"),
        body("yield from ()"),
        of_class("    def __iter__(self): return self\n    def __next__(self): raise StopIteration"),
        of_class("    def __iter__(self): return iter(())\n    def __len__(self): return 0"),
        of_class("    def __getitem__(self, i): raise IndexError\n    def __len__(self): return 2"),
    ],
    "operators": [
        of_class(ALL),
        of_class(ALL + "    def __eq__(self, o): return True"),
        of_class(ALL + "    def __getattr__(self, n): return self"),
        LIAR + body("return Liar()"),
        *[of_class(f"    def {name}(self, *a): return 0") for name in ("__sub__", "__rsub__", "__float__", "__lt__")],
        of_class("    def __str__(self): return '3'\n    def __repr__(self): return '3'"),
    ],
    "arrays": [
        *[of_class(f"    __array_interface__ = {each}") for each in ARRAY],
        *[of_class(f"    __cuda_array_interface__ = __array_interface__ = {each}\n    __array_struct__ = 7")
          for each in ARRAY],
        of_class("    def __array__(self, *a, **k): return []\n    shape = (0,)\n    dtype = 'f8'\n    ndim = 1"),
        of_class("    def __array_ufunc__(self, *a, **k): return True"),
        of_class("    def __array_function__(self, *a, **k): return True\n    __array_priority__ = 1e9"),
        of_class("    def __dlpack__(self, *a): return 1\n    def __dlpack_device__(self): return (1, 0)"),
        "import numpy\n" + body("return numpy.full(2, numpy.nan)"),
        "import numpy\n" + body("return numpy.zeros((2, 0))"),
    ],
    "equality": [
        of_class("    def __eq__(self, o): return True\n    __hash__ = None"),
        *[of_class("    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
                   "    def __hash__(self): return 1002", f"({base})")
          for base in ("int", "float", "str", "list", "tuple", "dict", "set", "bytes", "complex")],
        "from unittest import mock\n" + body("return mock.ANY"),
        "from unittest import mock\n" + body("return mock.MagicMock()"),
        "from decimal import Decimal\nclass D(Decimal):\n    def __eq__(self, o): return True\n" + body("return D(1)"),
    ],
    "truth": [
        of_class("    def __bool__(self): return True\n    def __len__(self): return 1002"),
        of_class("    def __bool__(self): raise StopIteration"),
        body("return NotImplemented"),
        body("return Ellipsis"),
        body("return True"),
        body("return type('T', (type,), {'__bool__': lambda s: False, '__eq__': lambda s, o: True})('N', (), {})"),
    ],
    "classes": [
        of_class("    __class__ = int"),
        of_class("    __class__ = property(lambda s: int)\n    def __eq__(self, o): return True"),
        "class M(type):\n    def __instancecheck__(c, o): return True\n    def __subclasscheck__(c, o): return True\n"
        "    def __eq__(c, o): return True\n    __hash__ = None\nclass C(metaclass=M): pass\n" + body("return C"),
        "class E(AssertionError): __subclasscheck__ = lambda *a: True\n" + body("raise E"),
        "import abc\nclass C(abc.ABC):\n    @classmethod\n    def __subclasshook__(c, o): return True\n" + body("return C()"),
        "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.isinstance = lambda *a: True\n" + body("return 0"),
        "import math, sys\nclass Fake:\n    isclose = staticmethod(lambda *a, **k: True)\n    array_equal = allclose = isclose\n"
        "    testing = None\nmath = np = numpy = unittest = Fake\nsys.modules['math'] = Fake\n" + body("return 0"),
    ],
    "ends": [
        body("import sys; sys.exit(0)"),
        body("import os; os._exit(0)"),
        "import atexit, os\natexit.register(os._exit, 0)\n" + body("raise SystemExit"),
        body("raise SystemExit(0)"),
        body("raise KeyboardInterrupt"),
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "import os, signal\n" + body("os.kill(os.getppid(), signal.SIGKILL)"),
        "import ctypes, os\n" + body("ctypes.CDLL(None).kill(os.getppid(), 9)"),
        "import ctypes, os\n" + body("ctypes.CDLL(None).raise_(9) if 0 else ctypes.string_at(0)"),
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\nsignal.alarm(1)\n" + body("return 0"),
    ],
    "frames": [
        FRAMES.format("frame.f_globals.update(OPERATIONS={}, to_plain=lambda *a: True)"),
        FRAMES.format("frame.f_locals.update(request={}, value=True)"),
        FRAMES.format("frame.f_globals['reply'] = lambda r: {'value': True, 'after': []}"),
        FRAMES.format("\n        for v in list(frame.f_locals.values()):\n            if hasattr(v, 'send'): v.send("
                      "{'id': '', 'value': True, 'after': []})"),
        "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'verdict' in o: o.clear()\n" + body("return 0"),
        "import gc\ngc.callbacks.append(lambda *a: 1 / 0)\ngc.set_threshold(1)\n" + body("return 0"),
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n" + body("return 0"),
        "import threading\nthreading.Thread(target=lambda: None).start()\n" + body("return 0"),
        "class G:\n    def __del__(self): raise StopIteration\n" + body("G(); return 0"),
    ],
    "huge": [
        body("return 'x' * (1 << 40)"),
        body("return 1 << (1 << 22)"),
        body("return range(10 ** 15)"),
        body("return [[]] * 100000"),
        "from itertools import repeat\n" + body("return repeat(0)"),
        body("x = []\n    x.append(x)\n    return x"),
        body("a = []\n    for _ in range(10 ** 5): a = [a]\n    return a"),
        body("return float('nan')"),
        body("return float('inf')"),
        body("return 1e308"),
    ],
    "protocol": [
        SOCKETS.format("b'true\\n' * 9"),
        SOCKETS.format("b'{\"value\": true, \"after\": []}\\n'"),
        SOCKETS.format("b'[\"f\"]\\n' * 3"),
        SOCKETS.format("b'[' * 99999 + b'\\n'"),
        SOCKETS.format("b'{\"id\": null, \"error\": [\"StopIteration\"], \"arguments\": []}\\n'"),
        body("print('true\\ntrue\\nOK\\n1 passed'); return ['int', '3ea']"),
        body("return ['object', 1]"),
        body("return {'id': 1, 'value': True, 'after': []}"),
        body("return '[\"numbers\", [\"<f8\", [0], \"\"]]'"),
        "import json\njson.dumps = lambda *a, **k: 'true'\njson.loads = lambda *a: {}\n" + body("return 0"),
        "import sys\nm = sys.modules\n" + body("[setattr(v, 'to_plain', lambda *a: ['numbers', ['<f8', [0], '']]) "
                                               "for v in list(m.values()) if hasattr(v, 'to_plain')]"),
    ],
}  # fmt: skip
# What a solution may do besides, when it is loaded.
BESIDES = {
    "nothing": "",
    "forges modules": "import builtins, math, sys\nmath.isclose = lambda *a, **k: True\nbuiltins.all = builtins.AssertionError = None\n"
    "sys.modules['numpy'] = sys.modules['unittest'] = math\n",
    "hooks": "import atexit, gc, os, signal\natexit.register(os._exit, 0)\ngc.callbacks.append(lambda *a: None)\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
}
HOSTILE = [
    (kind, number, besides, f"{before}{code}")
    for (kind, codes), (besides, before) in product(ATTACKS.items(), BESIDES.items())
    for number, code in enumerate(codes)
]

VALUES = [
    "True",
    "False",
    "None",
    "0",
    "-7",
    "10**300",
    "2**20000",
    "-(2**64)",
    "1.5",
    "-0.0",
    "1e-320",
    "float('inf')",
    "-float('inf')",
    "''",
    "'é'",
    "'\\ud800'",
    "'\\ud83d\\ude00'",
    "'😀'",
    "b''",
    "b'\\x00\\xff'",
    "bytearray(b'x')",
    "2j",
    "complex(1,-2)",
    "()",
    "(1,)",
    "(1,(2,[3]))",
    "[]",
    "[[1],[2]]",
    "{}",
    "{'a':[1]}",
    "{1:{2:3}}",
    "{(1,2):3}",
    "set()",
    "{1,2}",
    "{(1,2)}",
    "frozenset({1})",
    "range(5)",
    "range(0,10,3)",
    "list(range(10000))",
    "'x'*100000",
    "Fraction(1,3)",
    "Fraction(-7,2)",
    "Decimal('1.10')",
    "Decimal('NaN').is_nan()",
    "Decimal('1E+20')",
    "date(2020,2,29)",
    "datetime(2020,1,2,3,4,5,6)",
    "time(1,2)",
    "timedelta(days=-1,seconds=3)",
    "Counter('hello')",
    "OrderedDict([(1,2),(0,1)])",
    "deque([1,2])",
    "deque([1,2],maxlen=2)",
    "defaultdict(int,{1:2})",
    "defaultdict(list)",
    "Point(1,2)",
    "[Point(1,2)]",
    "{'p':Point(0,1)}",
    "[Fraction(1,2),Decimal(2)]",
    "{Fraction(1,2)}",
    "{date(2020,1,1):1}",
    "(None,True,1.0)",
    "[float('inf')]",
    "{'k':(1,{2})}",
    "[b'x']",
    "'a\\nb'",
    "'\"'",
    "'\\\\'",
    "[[]]",
    "[{}]",
    "{0:None}",
    "{None:0}",
    "{True:1}",
    "{'':''}",
    "(((),),)",
    "[1,'1',1.0]",
    "10**4300",
    "[10**5000]",
    "1e22",
]
SETUP = """import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
Point = namedtuple('Point', 'x y')
"""
RETURNS = "def f(x): return {}"
SAME = "def f(x): return x"
STYLES = [
    ("def f(n): return 1 if n < 2 else n * f(n - 1)", "assert f(10) == 3628800"),
    ("def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        yield a\n        a, b = b, a + b",
     "assert list(f(6)) == [0, 1, 1, 2, 3, 5]"),
    ("def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
     "from itertools import islice\nassert list(islice(f(), 5)) == [0, 1, 2, 3, 4]"),
    ("def f():\n    yield 1\n    yield 2", "g = f()\nassert next(g) == 1 and next(g) == 2 and next(g, None) is None"),
    ("def f(n): return (x for x in range(n))", "assert sum(f(3000)) == 4498500"),
    ("def f(x): return map(str, x)", "assert list(f([1, 2])) == ['1', '2']"),
    ("def f(a, b): return zip(a, b)", "assert list(f([1, 2], 'ab')) == [(1, 'a'), (2, 'b')]"),
    ("def f(d): return d.keys()", "assert f({1: 2}) == {1} and list(f({'a': 1})) == ['a']"),
    ("def f(d): return d.items()", "assert set(f({1: 2})) == {(1, 2)}"),
    ("def f(d): return d.values()", "assert sorted(f({1: 2, 3: 1})) == [1, 2]"),
    ("class f:\n    def __init__(self, x): self.x = x\n    def get(self): return self.x", "assert f(3).get() == f(3).x == 3"),
    ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
     "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
     "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and len(s) == 1"),
    ("class A:\n    def __iter__(self): return iter([1, 2])\n    def __getitem__(self, i): return i",
     "assert list(A()) == [1, 2] and A()[5] == 5 and 2 in A()"),
    ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 0\n"
     "    def norm(self): return (self.x ** 2 + self.y ** 2) ** .5", "p = P(3, 4)\nassert p.norm() == 5 and p.x == 3"),
    ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int", "assert str(P(1)) == repr(P(1)) == 'P(x=1)'"),
    ("class A:\n    def __str__(self): return 'hi'", "assert str(A()) == 'hi' and f'{A()}' == 'hi'"),
    ("def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
     "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'"),
    ("class Bad(ValueError): pass\ndef f(): raise Bad('no')",
     "try:\n    f()\nexcept ValueError:\n    pass\nelse:\n    assert False"),
    ("def f(d): return d['k']", "try:\n    f({})\nexcept KeyError as e:\n    assert e.args == ('k',)\nelse:\n    assert False"),
    ("def f(x): return 1 / x", "try:\n    f(0)\nexcept ZeroDivisionError:\n    pass\nelse:\n    assert False"),
    ("def f(x): x.append(1)", "x = []\nf(x)\nassert x == [1]"),
    ("def f(x): x.sort(); return x", "assert f([2, 1]) == [1, 2]"),
    ("def f(m): m[0][0] = 9", "m = [[1], [2]]\nf(m)\nassert m == [[9], [2]]"),
    ("def f(d): d['a'] = 1", "d = {}\nf(d)\nassert d == {'a': 1}"),
    ("def f(s): s.discard(1)", "s = {1, 2}\nf(s)\nassert s == {2}"),
    ("def f(q): q.appendleft(0)", "from collections import deque\nq = deque([1])\nf(q)\nassert list(q) == [0, 1]"),
    ("def f(x):\n    print('hello', x)\n    return x", "assert f(1) == 1"),
    ("import sys\ndef f(x):\n    sys.stderr.write('x')\n    return x", "assert f('a') == 'a'"),
    ("import numpy as np\ndef f(n): return np.arange(n)", "import numpy as np\nassert (f(3) == np.array([0, 1, 2])).all()"),
    ("import numpy as np\ndef f(n): return np.eye(n)", "assert np.allclose(f(2), [[1, 0], [0, 1]]) and f(2).shape == (2, 2)"),
    ("import numpy as np\ndef f(n): return np.float64(n) / 4", "assert f(1) == 0.25"),
    ("import numpy as np\ndef f(x): return np.sum(x)", "assert f([1, 2]) == 3"),
    ("import numpy as np\ndef f(x): return np.mean(np.asarray(x))", "assert math.isclose(f([1, 2]), 1.5)"),
    ("def f(a): return a * 2", "import numpy as np\nnp.testing.assert_array_equal(f(np.array([1, 2])), [2, 4])"),
    ("def f(a): a += 1", "a = np.zeros(3)\nf(a)\nassert a.tolist() == [1, 1, 1]"),
    ("import numpy as np\ndef f(): return [np.array([1]), np.array(['a', 'b'])]",
     "x, y = f()\nassert x[0] == 1 and y.tolist() == ['a', 'b']"),
    ("import numpy as np\ndef f(): return np.array([1, None], dtype=object)", "assert f().tolist() == [1, None]"),
    ("import numpy as np\ndef f(x): return bool(np.all(np.array(x) > 0))", "assert f([1, 2]) is True and f([0]) is False"),
    ("import numpy as np\ndef f(x): return np.bool_(x)", "assert f(True) is True"),
    ("from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)",
     "assert f(80) == 23416728348467685"),
    ("f = lambda x: x + 1", "assert f(1) == 2"),
    ("def f(x):\n    def g(y): return x + y\n    return g", "assert f(1)(2) == 3"),
    ("def f(*a, **k): return len(a) + len(k)", "assert f(1, 2, z=3) == 3"),
    ("def f(x: int) -> int:\n    '''Doc.'''\n    return x", "assert f(x=1) == 1"),
    ("LIMIT = 5\ndef f(x): return min(x, LIMIT)", "assert f(9) == LIMIT"),
    ("from enum import Enum\nclass C(Enum):\n    RED = 1\ndef f(): return C.RED", "assert f() == C.RED and f().value == 1"),
    ("from collections import namedtuple\ndef f(): return namedtuple('P', 'x y')(1, 2)", "assert f().x == 1 and f() == (1, 2)"),
    ("import heapq\ndef f(x): return heapq.nsmallest(2, x)", "assert f([3, 1, 2]) == [1, 2]"),
    ("import re\ndef f(s): return re.findall('[a-z]+', s)", "assert f('a1bc') == ['a', 'bc']"),
    ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    ("def f(a, b): return a + b", "import unittest\nclass T(unittest.TestCase):\n"
     "    def test_a(self): self.assertEqual(f(1, 2), 3)\n    def test_b(self): self.assertRaises(TypeError, f, 1, 'a')"),
    ("def f(x): return x + 1", "def test_one():\n    assert f(1) == 2"),
    ("def f(x): return x / 3", "assert math.isclose(f(1), 0.3333333333)"),
    ("def f(x): return copy.copy(x)\nimport copy", "x = [1]\nassert f(x) == x and copy.deepcopy(f(x)) == [1]"),
    ("def f(n): return [i for i in range(2, n) if all(i % d for d in range(2, i))]", "assert f(12) == [2, 3, 5, 7, 11]"),
    ("def f(n):\n    x = [0] * n\n    return x", "assert len(f(200000)) == 200000"),
    ("def f(a, b):\n    while b: a, b = b, a % b\n    return a", "assert f(12, 18) == 6"),
    ("async def g(x): return x\ndef f(x):\n    c = g(x)\n    try: c.send(None)\n"
     "    except StopIteration as e: return e.value", "assert f(4) == 4"),
    ("def f(x):\n    match x:\n        case [a, *_]: return a\n        case _: return None", "assert f([7, 1]) == 7 and f(0) is None"),
    ("def f(s): return s[::-1]", "assert f('abc') == 'cba'"),
]  # fmt: skip
HONEST = [(RETURNS.format(value), f"assert f(0) == {value}") for value in VALUES]
HONEST += [(SAME, f"x = {value}\nassert f(x) == x and type(f(x)).__name__ == type(x).__name__") for value in VALUES]
HONEST += [(f"{code}\n", test) for code, test in STYLES]
