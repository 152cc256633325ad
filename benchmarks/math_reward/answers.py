"""Ten thousand answers as models write them, correctness known by construction, one in a hundred of them hostile.

Each kind generates one row's answer, other ways to write it, and wrong answers that look like it. Everything is drawn
from one seed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import comb, gcd, isqrt


@dataclass(frozen=True)
class Question:
    """A row's answer, ways to write it, and wrong ones."""

    kind: str
    answer: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A completion's text; `right` is None if it is hostile: any verdict except a reward is then acceptable."""

    kind: str
    text: str
    right: bool | None


def frac(a: int, b: int, form: str = r"\frac{%d}{%d}") -> str:
    sign = "-" if (a < 0) != (b < 0) else ""
    return sign + form % (abs(a), abs(b))


def coprime(r: random.Random, low: int, high: int) -> tuple[int, int]:
    while True:
        a, b = r.randint(low, high), r.randint(max(2, low), high)
        if gcd(a, b) == 1:
            return a, b


def square_free(r: random.Random) -> int:
    return r.choice([2, 3, 5, 6, 7, 10, 11, 13, 14, 15, 17, 19, 21, 22, 23])


def fraction(r: random.Random) -> Question:
    a, b = coprime(r, 1, 60)
    k = r.randint(2, 6)
    right = [
        frac(a * k, b * k),
        frac(a, b, r"\dfrac{%d}{%d}"),
        f"{a}/{b}",
        rf"\left(\frac{{{a}}}{{{b}}}\right)",
        rf"x = \frac{{{a}}}{{{b}}}",
    ]
    restated = (rf"{a} \cdot \frac{{1}}{{{b}}}", rf"\frac{{{a - 1}}}{{{b}}}+\frac{{1}}{{{b}}}", rf"{a} \div {b}")
    return Question(
        "fraction", frac(a, b), tuple(right), (frac(b, a), frac(a + 1, b), frac(-a, b), f"{a}.{b}", *restated)
    )


def decimal(r: random.Random) -> Question:
    a, b = r.randint(1, 400), r.choice([4, 5, 8, 16, 20, 25, 40])
    a += Fraction(a, b).denominator == 1
    value = Fraction(a, b)
    plain = f"{float(value):.6f}".rstrip("0")
    whole, rest = divmod(value.numerator, value.denominator)
    if whole:
        mixed = rf"{whole}\frac{{{rest}}}{{{value.denominator}}}"
    else:
        mixed = frac(rest, value.denominator)
    right = (frac(value.numerator, value.denominator), plain + "00", mixed, rf"\approx {plain}", rf"{plain}\text{{ m}}")
    return Question(
        "decimal",
        plain,
        right,
        (f"{float(value) + 0.1:.4f}", frac(value.denominator, value.numerator + value.denominator), "-" + plain),
    )


def surd(r: random.Random) -> Question:
    k, m = r.randint(2, 19), square_free(r)
    right = (
        rf"\sqrt{{{k * k * m}}}",
        rf"{k} \cdot \sqrt{{{m}}}",
        rf"\frac{{{k * m}}}{{\sqrt{{{m}}}}}",
        rf"\sqrt{{{m}}}\cdot {k}",
    )
    wrong = (rf"{k}\sqrt{{{m + 1}}}", rf"{k + 1}\sqrt{{{m}}}", rf"\sqrt{{{k * m}}}", str(k * m))
    return Question("surd", rf"{k}\sqrt{{{m}}}", right, wrong)


def surd_sum(r: random.Random) -> Question:
    a, b, c, d = r.randint(1, 20), r.randint(1, 9), square_free(r), r.randint(2, 9)
    answer = rf"\frac{{{a}+{b}\sqrt{{{c}}}}}{{{d}}}"
    right = (
        rf"\frac{{{b}\sqrt{{{c}}}+{a}}}{{{d}}}",
        rf"\frac{{{a}}}{{{d}}}+\frac{{{b}\sqrt{{{c}}}}}{{{d}}}",
        rf"\dfrac{{{a} + \sqrt{{{b * b * c}}}}}{{{d}}}",
    )
    wrong = (
        rf"\frac{{{a}-{b}\sqrt{{{c}}}}}{{{d}}}",
        rf"\frac{{{a}+{b}\sqrt{{{c}}}}}{{{d + 1}}}",
        rf"\frac{{{a + b}\sqrt{{{c}}}}}{{{d}}}",
    )
    return Question("surd sum", answer, right, wrong)


def pi_multiple(r: random.Random) -> Question:
    a, b = coprime(r, 1, 30)
    right = (
        rf"\frac{{{a}}}{{{b}}}\pi",
        rf"\frac{{{3 * a}\pi}}{{{3 * b}}}",
        rf"{a}\pi/{b}",
        rf"\dfrac{{\pi \cdot {a}}}{{{b}}}",
    )
    return Question(
        "pi",
        rf"\frac{{{a}\pi}}{{{b}}}",
        right,
        (frac(a, b), rf"\frac{{{a + 1}\pi}}{{{b}}}", rf"\frac{{{a}\pi^2}}{{{b}}}", rf"\frac{{{b}\pi}}{{{a}}}"),
    )


def interval(r: random.Random) -> Question:
    a, b, d = r.randint(-20, -1), r.randint(0, 9), r.randint(2, 9)
    c = b + r.randint(1, 9)
    answer = rf"(-\infty,{a}]\cup[{b},{c})"
    right = (
        rf"\left(-\infty, {a}\right] \cup \left[{b}, {c}\right)",
        rf"(-\infty, {a}] \cup [{b}, \frac{{{c * d}}}{{{d}}})",
        rf"[{b},{c}) \cup (-\infty,{a}]",
    )
    wrong = (
        rf"(-\infty,{a})\cup[{b},{c})",
        rf"(-\infty,{a}]\cup[{b},{c}]",
        rf"(-\infty,{a}]",
        rf"[{a},{b}]\cup[{c},\infty)",
    )
    return Question("interval", answer, right, wrong)


def point(r: random.Random) -> Question:
    a, (b, c) = r.randint(-15, 15), coprime(r, 1, 12)
    right = (rf"({a}, {frac(b, c)})", rf"\left({a}, \frac{{{2 * b}}}{{{2 * c}}}\right)", rf"({a},\dfrac{{{b}}}{{{c}}})")
    return Question(
        "point",
        rf"\left({a},\frac{{{b}}}{{{c}}}\right)",
        right,
        (rf"({frac(b, c)}, {a})", rf"({a}, {frac(b, c + 1)})", rf"({a + 1}, {frac(b, c)})"),
    )


def finite_set(r: random.Random) -> Question:
    members = r.sample(range(-30, 60), 3)
    shuffled = [members[2], members[0], members[1]]
    right = (
        rf"\{{{shuffled[0]}, {shuffled[1]}, {shuffled[2]}\}}",
        rf"\left\{{{', '.join(map(str, sorted(members)))}\right\}}",
    )
    other = [members[0], members[1], members[2] + 100]
    wrong = (rf"\{{{', '.join(map(str, other))}\}}", rf"\{{{members[0]}, {members[1]}\}}")
    return Question("set", rf"\{{{members[0]},{members[1]},{members[2]}\}}", right, wrong)


def polynomial(r: random.Random) -> Question:
    a, b = r.randint(1, 12), r.randint(1, 12)
    s, p = a - b, -a * b
    if s == 0:
        middle = ""
    else:
        middle = f"{'+' if s > 0 else '-'}{abs(s) if abs(s) > 1 else ''}x"
    expanded = f"x^2{middle}-{a * b}"
    right = (expanded, f"(x-{b})(x+{a})", rf"(x+{a}) \cdot (x-{b})", f"-{a * b}{middle}+x^2".replace("+-", "-"))
    wrong = (f"(x-{a})(x+{b + 1})", f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})", f"x^2-{a * b + 1}")
    assert p == -a * b
    return Question("polynomial", f"(x+{a})(x-{b})", right, wrong)


def equation(r: random.Random) -> Question:
    a, b = r.randint(2, 20), r.randint(1, 30)
    right = (f"y = {b} + {a}x", f"y={a}x + {b}", rf"y = {a} \cdot x + {b}")
    return Question("equation", f"y={a}x+{b}", right, (f"y={a}x-{b}", f"y={b}x+{a + b}", f"y={a + 1}x+{b}"))


def complex_number(r: random.Random) -> Question:
    a, b = r.randint(1, 40), r.randint(2, 40)
    right = (f"{b}i+{a}", f"{a} + {b}i", rf"{a} + {b}i ")
    return Question("complex", f"{a}+{b}i", right, (f"{a}-{b}i", f"{b}+{a + b}i", f"{a + b}i", str(a + b)))


def word(r: random.Random) -> Question:
    names = [
        "even",
        "odd",
        "ellipse",
        "parabola",
        "circle",
        "Friday",
        "Monday",
        "Evelyn",
        "Briana",
        "hyperbola",
        "neither",
        "obtuse",
        "acute",
    ]
    own, *others = r.sample(names, 4)
    return Question(
        "word",
        rf"\text{{{own}}}",
        (rf"\text{{ {own} }}", rf"\textbf{{{own}}}", rf"\mathrm{{{own}}}"),
        tuple(rf"\text{{{name}}}" for name in others),
    )


def degrees(r: random.Random) -> Question:
    a = r.randint(5, 175)
    return Question(
        "degrees",
        rf"{a}^\circ",
        (str(a), rf"{a}^{{\circ}}", rf"{a} ^\circ"),
        (rf"{a + 1}^\circ", rf"{180 + a}^\circ", str(a + 90)),
    )


def matrix(r: random.Random) -> Question:
    a, b, c, d = (r.randint(-9, 9) for _ in range(4))

    def made(kind: str, *entries: int | str) -> str:
        w, x, y, z = entries
        return rf"\begin{{{kind}}} {w} & {x} \\ {y} & {z} \end{{{kind}}}"

    right = (made("bmatrix", a, b, c, d), made("pmatrix", a, f"{b}", rf"\frac{{{2 * c}}}{{2}}" if c >= 0 else c, d))
    return Question(
        "matrix",
        made("pmatrix", a, b, c, d),
        right,
        (made("pmatrix", a, b, c, d + 1), made("pmatrix", a + 1, c, b, d), made("pmatrix", d, b, c, a + 20)),
    )


def power(r: random.Random) -> Question:
    base, exponent = r.randint(2, 9), r.randint(3, 9)
    value = base**exponent
    restated = (rf"{base}^{{{exponent}}}", rf"{base}^{{{exponent - 1}}}\cdot {base}", f"{base}**{exponent}")
    right = (
        f"{value:,}".replace(",", "{,}"),
        f"{value:,}",
        rf"{base}^{{{exponent}}} = {value}",
        f"{value}.00",
        f"({value})",
    )
    return Question(
        "power",
        str(value),
        right,
        (
            *restated,
            rf"{base}^{{{exponent + 1}}}",
            rf"{exponent + 10}^{base}",
            str(value + base),
            rf"{base}\cdot {exponent}",
        ),
    )


def chosen(r: random.Random) -> Question:
    n, k = r.randint(6, 24), r.randint(2, 5)
    value = comb(n, k)
    restated = (rf"\binom{{{n}}}{{{k}}}", rf"\frac{{{n}!}}{{{k}!\,{n - k}!}}", rf"\dbinom{{{n}}}{{{k}}}")
    right = (str(value), rf"\binom{{{n}}}{{{k}}} = {value}", rf"{value}\text{{ ways}}", rf"N = {value}")
    return Question(
        "binomial",
        str(value),
        right,
        (
            *restated,
            rf"\binom{{{n}}}{{{k + 1}}}" if n != 2 * k + 1 else "1",
            rf"{n}\cdot {k}" if value != n * k else "2",
            str(value + 1),
        ),
    )


def inequality(r: random.Random) -> Question:
    a, b = r.randint(-20, 0), r.randint(1, 20)
    right = (rf"{a} < x \leq {b}", rf"{a}<x\le {b}", rf"x \in ({a}, {b}]")
    return Question(
        "inequality", rf"{a}<x\leq{b}", right, (rf"{a}<x<{b}", rf"{a} \leq x \leq {b}", rf"{a}<x\leq{b + 1}")
    )


def percent(r: random.Random) -> Question:
    a = r.randint(1, 99)
    return Question(
        "percent",
        rf"{a}\%",
        (f"{a} \\%", f"{a}\\%", str(a), rf"{a}\text{{ percent}}"),
        (rf"{a + 1}\%", str(a + 100), rf"{a}.5\%"),
    )


def exponential(r: random.Random) -> Question:
    a, b = r.randint(2, 9), r.randint(2, 9)
    right = (rf"{a} \cdot e^{{{b}}}", rf"e^{{{b}}}\cdot {a}", rf"\frac{{{2 * a}e^{{{b}}}}}{{2}}")
    return Question(
        "exponential",
        rf"{a}e^{{{b}}}",
        right,
        (rf"{a}e^{{{b + 1}}}", rf"{a}e^{{-{b}}}", rf"{a + 1}e^{{{b}}}", rf"{a}^{{{b}}}"),
    )


def logarithm(r: random.Random) -> Question:
    a, b = r.randint(2, 12), r.choice([3, 5, 7, 11, 13])
    right = (rf"\frac{{{a}}}{{2}} \ln({b**2})", rf"{a} \ln({b})", rf"{a}\cdot\ln {b}")
    return Question("logarithm", rf"{a}\ln {b}", right, (rf"{a + 1}\ln {b}", rf"\ln {b}", rf"{a}\ln {b + 1}"))


def integer(r: random.Random) -> Question:
    a = r.randint(-500, 5000)
    root = isqrt(abs(a)) + 1
    right = (f"{a}", rf"{a}.", f"{a}.0", rf"x={a}", f"{a} dollars", rf"{a - root}+{root}={a}", rf"\left({a}\right)")
    restated = (
        *(
            f"{a - root} + {root}",
            rf"{a - root}+{root}",
            rf"\frac{{{2 * a}}}{{2}}",
            rf"{2 * a} / 2",
            rf"({a + root}) - {root}",
            rf"{a}*1",
        ),
        *(
            f"{a + 1}={a}",
            f"x={a - 1}={a}",
            rf"\int_0^{{{a}}} 1 dx",
            rf"\sum_{{k=1}}^{{{abs(a)}}} 1",
            rf"\sqrt{{{a * a}}}",
            rf"{a}!/{a - 1}!",
        ),
    )
    others = (str(a + 1), str(-a) if a else "7", str(a * 10 + 3), rf"\frac{{{a}}}{{7919}}" if a else "8")
    return Question("integer", str(a), right, others + restated)


KINDS: tuple[Callable[[random.Random], Question], ...] = (
    *(
        fraction,
        decimal,
        surd,
        surd_sum,
        pi_multiple,
        interval,
        point,
        finite_set,
        polynomial,
        equation,
        complex_number,
        word,
    ),
    *(degrees, matrix, power, chosen, inequality, percent, exponential, logarithm, integer),
)

THOUGHTS = (
    "Let me set up the equation and simplify both sides first. ",
    "We are given two conditions; combining them eliminates one unknown. ",
    "By symmetry it is enough to look at one case, $n = 3$, and to multiply. ",
    "Squaring both sides gives a quadratic whose discriminant is positive. ",
    "Checking the boundary: at $x = 0$ the left side vanishes. ",
)
FORMS = (
    "Therefore, the answer is $\\boxed{%s}$.",
    "\\[\\boxed{%s}\\]",
    "The final answer is $\\boxed{%s}$. I hope it is correct.",
    "So we get $$\\boxed{%s}.$$",
    "<think>done</think>\n<answer>%s</answer>",
)


def completion(r: random.Random, answer: str) -> str:
    """Return some reasoning, followed by the answer in a common format."""
    return "".join(r.sample(THOUGHTS, r.randint(1, 4))) + r.choice(FORMS) % answer


def hostile(r: random.Random) -> Answer:
    """Return an answer that attacks time, memory, the parser's stack, or the line in which it is sent."""
    n = r.randint(1, 9)
    digits, deep = r.randint(2_000, 60_000), r.randint(200, 3_000)
    made = {
        "power": [
            f"{n + 1}^{{{n + 1}^{{{n + 1}^{{99}}}}}}",
            "9**9**9**9",
            rf"(x+{n})^{{{n}00000}}",
            rf"{n + 1}^{{10^{{10}}}}",
            rf"({n}00000)!",
            rf"\binom{{10^{n + 3}}}{{{n}00000}}",
        ],
        "endless": [
            rf"(a+b+c+d)^{{{60 + n}0}}",
            rf"(x+{n})^{{{n + 1}000}}",
            rf"\prod_{{k=1}}^{{{n}999}}(x+k)",
            rf"\sum_{{k=1}}^{{{n}00000000}} \frac{{1}}{{k}}",
            rf"\sqrt{{(x+{n})^{{300}}(x+{n + 1})^{{300}}}}",
            rf"(\sqrt{{2}}+\sqrt{{3}}+\sqrt{{5}})^{{{20 + n}0}}",
            rf"\int_0^{n} \sin(x^x) \cos(x)^{{x}} dx",
            "x" + "^{x" * (20 + n) + "}" * (20 + n),
        ],
        "nesting": [
            "(" * deep + "1" + ")" * deep,
            "{" * deep + "1" + "}" * deep,
            r"\frac{1}{" * deep + "2" + "}" * deep,
            r"\sqrt{" * deep + "2" + "}" * deep,
            r"\left(" * 29 + "1" + r"\right)" * 29,
            "[" * deep,
            "|" * deep,
        ],
        "digits": [
            "9" * digits,
            "0." + "7" * digits,
            "-" * digits + "1",
            "1," * digits,
            f"1e{'9' * 300}",
            "1/" * digits + "1",
            "3" * digits + "/" + "7" * digits,
        ],
        "invalid": [
            r"\frac{1}{",
            r"\left(\right}",
            r"\begin{pmatrix}1&2\\",
            "\\" * digits,
            r"\sqrt[}{2]",
            "$" * 999,
            r"\text{" * 60,
            r"\end{matrix}\begin{matrix}",
            r"1 & 2 \\ & ^^ __",
            r"\newcommand{\x}{\x\x}\x",
            r"__import__('os').system('true')",
            r"\ud800 \boxed{",
        ],
        "null": [
            "\0" * n,
            f"4\0{n}",
            "\0" * digits,
            f"\\boxed\0{{{n}}}",
            "\ud800",
            "\udfff\0\x1b[2J",
            "‮" * 50,
            "\r\n\x85 \x0b",
        ],
    }
    kind = r.choice(sorted(made))
    text = r.choice(made[kind])
    form = r.choice(("\\boxed{%s}", "$%s$", "%s", "<answer>%s</answer>"))
    return Answer("hostile " + kind, form.replace("%s", text), None)


def groups(count: int, size: int, share_hostile: float, seed: int) -> list[tuple[str, list[Answer]]]:
    """Return `count` answers in groups of `size`: the row's answer, and the completions. All kinds occur equally often;
    about half of the ordinary answers are right."""
    r = random.Random(seed)
    bad = set(r.sample(range(count), round(count * share_hostile)))
    made: list[tuple[str, list[Answer]]] = []
    for start in range(0, count, size):
        question = KINDS[len(made) % len(KINDS)](r)
        own = []
        for i in range(start, min(start + size, count)):
            if i in bad:
                own.append(hostile(r))
                continue
            right = r.random() < 0.5
            written = r.choice(question.right if right else question.wrong)
            own.append(Answer(question.kind, completion(r, written), right))
        made.append((question.answer, own))
    return made
