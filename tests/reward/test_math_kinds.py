"""Kinds of answers that math-verify alone judges wrongly: tiny values, options, upright constants, sets, named sums,
dots and hedges. Each table gives the row's answer and texts."""

import math
from dataclasses import replace

import pytest

from proxima.reward.math.marked import Boxed, Gsm8kReward
from proxima.reward.math.numbers import Accuracy152, Number
from proxima.reward.math.symbolic import Math
from proxima.reward.text import Exact, Regex
from proxima.reward.workers import graders
from tests.lent_servers import lent_servers
from tests.reward.make import ask, completions, corrects, prompt, runner

pytest.importorskip("math_verify")
pytestmark = pytest.mark.usefixtures("lent_servers")

RIGHT, WRONG = {}, {}


def rows(table):
    """(answer, texts) of each line, `answer: text | text`; ⏎ is a new line."""
    lines = [line.replace("⏎", "\n").split(": ", 1) for line in table.strip().splitlines()]
    return [(answer, texts.split(" | ")) for answer, texts in lines]


RIGHT["precision"] = rows(r"""
\frac{1}{2^{60}}: \boxed{2^{-60}} | \boxed{\frac{4}{2^{62}}} | \boxed{\left(\frac12\right)^{60}} | $\frac{1}{4^{30}}$
\frac{1}{20!}: \boxed{\frac{21}{21!}} | \boxed{\frac{1}{19! \cdot 20}}
10^{-20}: \boxed{\frac{1}{10^{20}}} | \boxed{10 \cdot 10^{-21}} | \boxed{1 \times 10^{-20}}
1-\frac{1}{2^{100}}: \boxed{\frac{2^{100}-1}{2^{100}}} | \boxed{1-2^{-100}} | \boxed{1-4^{-50}}
e^{-100}: \boxed{\frac{1}{e^{100}}} | \boxed{(e^{-50})^2}
\frac{\pi}{10^9}: \boxed{\pi\times 10^{-9}} | \boxed{0.00000000314159} | \boxed{0.00000000314159265}
\frac{\sqrt{2}}{100}: \boxed{0.014142} | \boxed{0.0141421} | \boxed{\frac{1}{50\sqrt{2}}}
\sqrt{2}+\sqrt{3}: \boxed{\sqrt{5+2\sqrt{6}}} | \boxed{3.146264} | \boxed{3.14626437}
\left(\frac{1}{2^{60}},3\right): \boxed{(2^{-60},3)}
[0,10^{-20}]: \boxed{[0,\frac{1}{10^{20}}]}
\{1,3^{-50}\}: \boxed{\{\frac{1}{3^{50}},1\}}
x+2^{-60}: \boxed{x+\frac{1}{2^{60}}}
2^{100}: \boxed{4^{50}} | \boxed{1267650600228229401496703205376}
0.000001: \boxed{0.000001} | \boxed{\frac{1}{1000000}} | \boxed{10^{-6}=0.000001} | \boxed{1\times10^{-6}}
0.000001: \boxed{0.0001\%}
0.0000014: \boxed{1.4\times10^{-6}} | \boxed{0.00000140} | 1.4e-6
\frac{1}{81}: \boxed{0.0123457} | \boxed{0.012346} | \boxed{0.01234568}
\frac{1}{3}: \boxed{0.333333} | \boxed{33.3333333\%}
\frac{1}{30000000}: \boxed{0.0000000333333} | \boxed{0.00000003333333}
2.5\times10^{-12}: \boxed{0.0000000000025} | \boxed{2.50 \times 10^{-12}}
6.02\times10^{23}: \boxed{602000000000000000000000} | \boxed{6.020\times 10^{23}}
12.5\%: \boxed{0.125} | \boxed{\frac{1}{8}} | \boxed{12.50}
0.5\pi: \boxed{\frac{\pi}{2}}
""")
WRONG["precision"] = rows(r"""
\frac{1}{2^{60}}: \boxed{\frac{1}{2^{61}}} | \boxed{\frac{1}{2^{59}}} | \boxed{0} | \boxed{0.0} | \boxed{-2^{-60}}
\frac{1}{2^{60}}: \boxed{10^{-18}} | $2^{-61}$
\frac{1}{20!}: \boxed{\frac{1}{21!}} | \boxed{\frac{1}{19!}} | \boxed{\frac{2}{20!}} | \boxed{0}
10^{-20}: \boxed{10^{-21}} | \boxed{10^{-19}} | \boxed{0} | \boxed{2\cdot10^{-20}}
1-\frac{1}{2^{100}}: \boxed{1} | \boxed{1.0} | \boxed{1.000000} | \boxed{1-2^{-99}} | \boxed{1+2^{-100}}
1-\frac{1}{2^{100}}: \boxed{0.999999}
1-\frac{1}{2^{2018}}: \boxed{1} | \boxed{1-\frac{1}{2^{2017}}}
\frac{2^{300}+1}{3 \cdot 2^{400}}: \boxed{\frac{1}{3 \cdot 2^{400}}} | \boxed{\frac{1}{3 \cdot 2^{100}}}
e^{-100}: \boxed{e^{-101}} | \boxed{0} | \boxed{-e^{-100}} | \boxed{\pi^{-100}}
e^{-50}i: \boxed{0} | \boxed{e^{-51}i} | \boxed{-e^{-50}i}
\frac{\pi}{10^9}: \boxed{0} | \boxed{0.0} | \boxed{0.000000} | \boxed{0.0000000031417} | \boxed{\pi\cdot10^{-10}}
\frac{\pi}{10^9}: \boxed{\frac{3}{10^9}}
\frac{\sqrt{2}}{100}: \boxed{0.01414} | \boxed{0.0142} | \boxed{0.014143}
\sqrt{2}+\sqrt{3}: \boxed{3.14626} | \boxed{\sqrt{5+2\sqrt{6}}+10^{-40}} | \boxed{\pi}
\left(\frac{1}{2^{60}},3\right): \boxed{(2^{-61},3)} | \boxed{(0,3)}
[0,10^{-20}]: \boxed{[0,10^{-21}]} | \boxed{\{0\}}
\{1,3^{-50}\}: \boxed{\{1,3^{-51}\}} | \boxed{\{0,1\}}
\begin{pmatrix}2^{-60}&0\end{pmatrix}: \boxed{\begin{pmatrix}2^{-61}&0\end{pmatrix}}
\begin{pmatrix}2^{-60}&0\end{pmatrix}: \boxed{\begin{pmatrix}0&0\end{pmatrix}}
x+2^{-60}: \boxed{x+2^{-61}} | \boxed{x}
2^{100}: \boxed{2^{100}+1} | \boxed{1267650600228229401496703205377} | \boxed{2^{99}} | \boxed{1.26765\times10^{30}}
0.000001: \boxed{0.0000014} | \boxed{0.0000006} | \boxed{0} | \boxed{0.000000} | \boxed{0.0000010001}
0.000001: \boxed{0.00000149}
0.0000014: \boxed{0.000001} | \boxed{0.0000015} | \boxed{0.00000141} | \boxed{1\times10^{-6}}
0.000002: \boxed{0.0000024} | \boxed{0.0000016} | \boxed{2\times10^{-7}}
\frac{1}{81}: \boxed{0.01234} | \boxed{0.012347} | \boxed{0.0123}
\frac{1}{30000000}: \boxed{0.00000003} | \boxed{0.000000033} | \boxed{0.000000} | \boxed{0.00000003334}
2.5\times10^{-12}: \boxed{2.5\times10^{-13}} | \boxed{0.000000} | \boxed{2.6\times10^{-12}} | \boxed{0}
6.02\times10^{23}: \boxed{6.02\times10^{22}} | \boxed{6.03\times10^{23}} | \boxed{6.020001\times10^{23}}
0: \boxed{0.0000001} | \boxed{10^{-7}} | \boxed{1\times10^{-9}}
""")
RIGHT["options"] = rows(r"""
B: \boxed{B} | \boxed{(B)} | \boxed{\text{(B)}} | \boxed{\textbf{(B)}} | \boxed{\textbf{(B) } 12} | \boxed{\mathrm{B}}
B: \boxed{\mathbf{(B)}}
B: \boxed{B.} | \boxed{B)} | \boxed{B: the second one} | \boxed{B. 12} | \boxed{B) 12} | \boxed{\text{(B) } 12}
B: \boxed{\textbf{(B)}\ 12}
B: \boxed{\text{Option B}} | \boxed{\text{B: a circle}} | \boxed{\text{B}} | \boxed{(b)} | \boxed{b}
B: \boxed{\text{(B) } \frac{1}{2}} | \boxed{(B) $12}
B: Answer: B | The answer is B. | **Answer: B** | **Answer:** B | Answer: **B** | Answer: (B) | Answer: B) 12
B: answer is (b) | Answer:⏎B
B: So the answer is $B$. | The answer is $\text{(B)}$. | The answer is option B. | The correct option is B.
B: The correct choice is (B). | Answer: B, because A is not prime.
B: The answer is B because C and D are too large. | The answer is B since 2+2=4. | Answer: B. 12
B: Answer: B: the second one | So the answer is: B
B: Therefore, the correct answer is therefore B. | The answer is (B) 12. | <answer>B</answer> | <answer>(B)</answer>
B: <answer>B. 12</answer> | <answer>b</answer>
B: A is false. Answer: A⏎No. Answer: B
B: The answer is "B" | Answer: `B` | The answer is **(B)**. | ANSWER: B | Answer: B — the circle
A: \boxed{A} | Answer: A | The answer is A. | Answer: (A) | Answer: A) a triangle | \boxed{A: a triangle}
A: The answer is A, since a triangle has three sides.
A: \boxed{\text{(A) } A \cup B} | Answer: a
I: \boxed{I} | Answer: I
P: \boxed{P} | Answer: P
(B): \boxed{B} | Answer: B | \boxed{\text{B}}
\textbf{(B)}: \boxed{B} | Answer: B | The answer is (B).
\text{B}: \boxed{B} | Answer: B | \boxed{\textbf{(B)}}
\mathrm{(B)}: \boxed{B} | Answer: B
\textbf{(B)}\ 12: \boxed{B} | \boxed{\textbf{(B)}\ 12} | \boxed{(B)} | \boxed{12} | Answer: B | Answer: 12
\textbf{(B)}\ 12: \boxed{\text{B}} | \boxed{B: 12}
\textbf{(D) }\frac{3}{7}: \boxed{D} | \boxed{\frac{3}{7}} | \boxed{\textbf{(D)}} | The answer is D.
\textbf{(E)}\ \text{none of these}: \boxed{E} | \boxed{\text{none of these}} | Answer: E
\textbf{(C)}\ 2\sqrt{3}: \boxed{C} | \boxed{\sqrt{12}}
B) the second one: \boxed{B} | Answer: B | \boxed{\text{the second one}}
D.: \boxed{D} | Answer: D
Monday: Answer: Monday
x: \boxed{x} | Answer: x | The answer is $x$.
2\sqrt{3}: Answer: 2\sqrt{3}
""")
WRONG["options"] = rows(r"""
B: \boxed{C} | \boxed{A} | \boxed{\text{(C)}} | \boxed{AB} | \boxed{A, B} | \boxed{B, C} | \boxed{B \text{ or } C}
B: \boxed{(B)(C)} | \boxed{B/C} | \boxed{BC}
B: \boxed{\text{(B) or (C)}} | \boxed{\text{B and C}} | \boxed{B: C} | \boxed{A: B} | \boxed{(B) 12, (C) 15}
B: \boxed{\text{not B}} | \boxed{B + 1} | \boxed{2B} | \boxed{B^2} | \boxed{B = C}
B: Answer: C | Answer: B or C | Answer: A or B | Answer: B/C | Answer: A, B, C | Answer: B, C | Answer: B and C
B: Answer: not B | The answer is not B. | The answer isn't B.
B: The answer is either B or C. | The answer is A. B is wrong. | B | (B) | Option B | Answer: B (or C)
B: Answer: B. Or maybe C. | Answer: B, maybe C | Answer: (B) or (C)
B: Answer: A triangle | Answer: Both are right | Answer: By symmetry 12 | Answer: BB | Answer: | Answer: 12 | \boxed{12}
B: \boxed{} | Answer: B or maybe C | Answer: B & C | Answer: BC
B: Answer: B⏎Answer: C | <answer>C</answer> | <answer>B or C</answer> | <answer>A. B</answer> | \boxed{B} or \boxed{C}
B: \boxed{\text{maybe } B} | \boxed{B?} | \boxed{\text{B or C}}
A: Answer: A triangle ABC | Answer: A circle | The answer is a number. | The answer is A triangle because of B.
A: \boxed{\text{A triangle}} | \boxed{B} | Answer: An apple
A: Answer: All of them | Answer: B. A is wrong. | \boxed{B: A} | \boxed{\text{B, not A}} | Answer: B, not A
A: \boxed{\text{(B) A}}
I: Answer: I think 5 | The answer is I do not know.
\textbf{(B)}\ 12: \boxed{C} | \boxed{\text{(C) } 12} | \boxed{13} | \boxed{\textbf{(A)}\ 12} | Answer: C | Answer: 13
\textbf{(B)}\ 12: \boxed{B, C} | \boxed{12, 13}
\textbf{(E)}\ \text{none of these}: \boxed{D} | \boxed{\text{none}} | \boxed{\text{all of these}}
(B): \boxed{C} | Answer: C | \boxed{12}
x: \boxed{y} | Answer: y | Answer: x or y | Answer: x + 1 | \boxed{2x}
""")
RIGHT["upright"] = rows(r"""
1-\frac{1}{\mathrm{e}}: \boxed{1-\frac{1}{e}} | \boxed{1-e^{-1}} | \boxed{1-\mathrm{e}^{-1}} | $1-\frac1{\text{e}}$
1-\frac{1}{e}: \boxed{1-\frac{1}{\mathrm{e}}} | \boxed{1-\frac{1}{\operatorname{e}}} | \boxed{1-\frac{1}{\rm e}}
1-\frac{1}{e}: \boxed{1-\frac{1}{\text{e}}}
e^2: \boxed{\mathrm{e}^2} | \boxed{{\rm e}^2} | \boxed{\operatorname{e}^{2}} | \boxed{\text{e}^2} | \boxed{\textrm{e}^2}
e^2: \boxed{\mathrm e^2} | \boxed{\mathit{e}^2} | \boxed{\exp(2)} | \boxed{ℯ^2}
3e^{-2x}: \boxed{3\mathrm{e}^{-2x}} | \boxed{\frac{3}{\mathrm{e}^{2x}}} | \boxed{3\,\mathrm{e}^{-2x}}
2+3i: \boxed{2+3\mathrm{i}} | \boxed{2+3\text{i}} | \boxed{3\operatorname{i}+2} | \boxed{2+3\rm{i}}
2+3i: \boxed{2+3\,\mathrm{i}} | \boxed{z = 2+3\mathrm{i}} | \boxed{2+3{\rm i}}
2+3\mathrm{i}: \boxed{2+3i} | \boxed{2+3\mathrm{i}} | \boxed{3i+2}
\mathrm{i}: \boxed{i} | \boxed{\mathrm{i}}
\frac{1+\mathrm{i}}{2}: \boxed{\frac{1}{2}+\frac{i}{2}} | \boxed{\frac12(1+\mathrm{i})}
e^{i\pi/3}: \boxed{\mathrm{e}^{\mathrm{i}\pi/3}} | \boxed{\mathrm{e}^{\frac{\mathrm{\pi i}}{3}}}
e^{i\pi/3}: \boxed{\mathrm{e}^{\pi\mathrm{i}/3}} | \boxed{e^{\frac{\pi \mathrm{i}}{3}}}
2\pi: \boxed{2\mathrm{\pi}} | \boxed{2\text{\pi}} | \boxed{2π}
\pi\mathrm{e}: \boxed{e\pi} | \boxed{\pi e}
2\mathrm{e}: \boxed{2e} | \boxed{\mathrm{e}+\mathrm{e}}
\mathrm{e}: \boxed{e} | \boxed{\mathrm{e}} | Answer: e
""")
WRONG["upright"] = rows(r"""
1-\frac{1}{\mathrm{e}}: \boxed{1+\frac{1}{e}} | \boxed{1} | \boxed{1-\mathrm{e}}
e^2: \boxed{\mathrm{e}^3} | \boxed{2\mathrm{e}} | \boxed{\mathrm{i}^2} | \boxed{e}
2+3i: \boxed{2+3\mathrm{e}} | \boxed{2-3\mathrm{i}} | \boxed{2+3} | \boxed{5} | \boxed{2+3\mathrm{j}}
2+3i: \boxed{2+3\mathrm{m}}
2+3\mathrm{i}: \boxed{5} | \boxed{2+3} | \boxed{3+2\mathrm{i}} | \boxed{2+3\mathrm{e}}
e^{i\pi/3}: \boxed{\mathrm{e}^{\mathrm{i}\pi/4}} | \boxed{\mathrm{e}^{\pi/3}}
5: \boxed{2+3\mathrm{i}} | \boxed{5\mathrm{i}} | \boxed{5\mathrm{e}}
2\sqrt{3}: \boxed{2\sqrt{3}\mathrm{i}} | \boxed{2\sqrt{3}\mathrm{e}} | \boxed{2\sqrt{3}+\mathrm{i}}
2\sqrt{3}: \boxed{2\mathrm{i}\sqrt{3}}
""")
RIGHT["sets"] = rows(r"""
\emptyset: \boxed{\varnothing} | \boxed{\{\}} | \boxed{\{ \}} | \boxed{\left\{\right\}} | \boxed{∅}
\emptyset: \boxed{\text{the empty set}} | \boxed{\emptyset}
\varnothing: \boxed{\emptyset} | \boxed{\{\}} | \boxed{\varnothing} | Answer: $\varnothing$
\{\}: \boxed{\varnothing} | \boxed{\emptyset}
(-\infty,2]\cup[3,\infty): \boxed{x\le 2 \text{ or } x\ge 3} | \boxed{x \leq 2 \lor x \geq 3}
(-\infty,2]\cup[3,\infty): \boxed{x≤2 \text{ or } x≥3} | \boxed{x \ge 3 \text{ or } x \le 2}
(-\infty,2]\cup[3,\infty): \boxed{2 \ge x \text{ or } 3 \le x} | \boxed{x\leqslant 2 \text{ or } x\geqslant 3}
(-\infty,2]\cup[3,\infty): \boxed{x\le 2, x\ge 3} | \boxed{x\le 2 \cup x\ge 3} | \boxed{x \le 2 \vee x \ge 3}
(-\infty,2]\cup[3,\infty): \boxed{x \in (-\infty,2]\cup[3,\infty)} | \boxed{t\le 2 \text{ or } t\ge 3}
(-\infty,2]\cup[3,\infty): \boxed{x\le 2 \text{ or } x\ge \frac{6}{2}} | The answer is $x \le 2$ or $x \ge 3$.
(-\infty,2]\cup[3,\infty): \boxed{\{x \mid x\le 2 \text{ or } x\ge 3\}}
(-\infty,2]\cup[3,\infty): \boxed{-\infty < x \le 2 \text{ or } 3 \le x < \infty} | \boxed{(-∞,2]∪[3,∞)}
(-\infty,2]\cup[3,\infty): \boxed{x\le2\quad\text{or}\quad x\ge3}
(-1,0)\cup(2,3): \boxed{-1<x<0 \text{ or } 2<x<3} | \boxed{2<x<3 \text{ or } -1<x<0} | \boxed{0>x>-1 \text{ or } 3>x>2}
(-1,0)\cup(2,3): \boxed{-1<x<0, 2<x<3}
[2,5]: \boxed{5\ge x\ge 2} | \boxed{2\le x\le 5} | \boxed{x\ge 2 \text{ and } x\le 5} | \boxed{x \le 5, x \ge 2}
[2,5]: \boxed{2 \le k \le 5} | \boxed{5 \geq x \geq 2} | \boxed{2 \leqslant x \leqslant 5}
[2,5]: \boxed{x\in[2,5]} | \boxed{\{x \mid 2\le x\le5\}} | \boxed{\{x : 2 \le x \le 5\}}
[2,5]: \boxed{\left\{x \in \mathbb{R} \mid 2\le x\le5\right\}} | \boxed{2 \le f(x) \le 5} | \boxed{2\le \theta\le 5}
[2,5]: \boxed{2 ≤ x ≤ 5}
(2,5]: \boxed{2<x\le5} | \boxed{5 \ge x > 2} | \boxed{x>2 \land x\le5} | \boxed{x \le 5 \text{ and } x > 2}
(2,5]: \boxed{2 < x_1 \le 5}
(5,\infty): \boxed{x>5} | \boxed{5<x} | \boxed{x \gt 5} | \boxed{5<x<\infty}
[\sqrt{2},\infty): \boxed{x\ge\sqrt{2}} | \boxed{\sqrt2 \le x} | \boxed{x \ge \frac{2}{\sqrt{2}}}
(a,\infty): \boxed{x>a} | \boxed{a<x}
(-\infty,1)\cup(1,\infty): \boxed{x\ne 1} | \boxed{x \neq 1} | \boxed{\mathbb{R}\setminus\{1\}}
(-\infty,1)\cup(1,\infty): \boxed{x<1 \text{ or } x>1} | \boxed{x ≠ 1} | \boxed{\text{all real numbers except } 1}
(-\infty,1)\cup(1,2)\cup(2,\infty): \boxed{x\ne 1, x\ne 2} | \boxed{x \neq 1 \text{ and } x \neq 2} | \boxed{x\ne1,2}
(-\infty,1)\cup(1,2)\cup(2,\infty): \boxed{\mathbb{R}\setminus\{1,2\}}
(-\infty,\infty): \boxed{\mathbb{R}} | \boxed{\text{all real numbers}} | \boxed{x\in\mathbb{R}} | \boxed{\mathbb R}
(-\infty,\infty): \boxed{ℝ}
\mathbb{R}: \boxed{(-\infty,\infty)} | \boxed{\text{all real numbers}} | \boxed{\mathbf{R}}
\text{all real numbers}: \boxed{\mathbb{R}} | \boxed{(-\infty,\infty)} | \boxed{\text{All real numbers}}
\text{all real numbers}: The answer is all real numbers.
x\le 2 \text{ or } x\ge 3: \boxed{(-\infty,2]\cup[3,\infty)} | \boxed{x\ge 3 \text{ or } x\le 2}
x\le 2 \text{ or } x\ge 3: \boxed{x \leq 2 \lor x \geq 3} | \boxed{x\le 2 \text{ or } x\ge 3}
x\le 2 \text{ or } x\ge 3: \boxed{x \in (-\infty,2]\cup[3,\infty)}
2<x<5: \boxed{5>x>2} | \boxed{(2,5)} | \boxed{x>2 \text{ and } x<5} | \boxed{x\in(2,5)}
x>3: \boxed{3<x} | \boxed{(3,\infty)}
x\in[2,5]: \boxed{2\le x\le5} | \boxed{[2,5]} | \boxed{5\ge x\ge2}
x=1 \text{ or } x=2: \boxed{x=1 \text{ or } x=2} | \boxed{x=2 \text{ or } x=1} | \boxed{\{1,2\}}
x=1 \text{ or } x=2: The answer is $x=1$ or $x=2$.
1, 2: \boxed{1, 2} | \boxed{2,1} | \boxed{1 \text{ and } 2} | The answer is 1 and 2. | The answer is $1$ and $2$.
1, 2: Answer: 2, 1
\pm\sqrt{2}: \boxed{\sqrt{2}, -\sqrt{2}} | \boxed{x = \pm\sqrt{2}} | \boxed{-\sqrt{2} \text{ or } \sqrt{2}}
""")
WRONG["sets"] = rows(r"""
\emptyset: \boxed{\{0\}} | \boxed{0} | \boxed{(-\infty,\infty)} | \boxed{\{\emptyset, 1\}} | \boxed{}
(-\infty,2]\cup[3,\infty): \boxed{x< 2 \text{ or } x\ge 3} | \boxed{x\le 2 \text{ or } x> 3} | \boxed{x\le 2}
(-\infty,2]\cup[3,\infty): \boxed{x\ge 3} | \boxed{2\le x\le 3} | \boxed{x\le 2 \text{ and } x\ge 3}
(-\infty,2]\cup[3,\infty): \boxed{x\ge 2 \text{ or } x\le 3} | \boxed{x\le 3 \text{ or } x\ge 2}
(-\infty,2]\cup[3,\infty): \boxed{x\le 2 \text{ or } y\ge 3} | \boxed{x\le 2 \text{ or maybe } x\ge 3}
(-\infty,2]\cup[3,\infty): \boxed{x\le 2 \text{ or } x\ge 4} | \boxed{\mathbb{R}}
(-1,0)\cup(2,3): \boxed{-1<x<0} | \boxed{-1<x<3} | \boxed{-1\le x<0 \text{ or } 2<x<3}
(-1,0)\cup(2,3): \boxed{-1<x<0 \text{ and } 2<x<3} | \boxed{(-1,0)\cap(2,3)}
[2,5]: \boxed{5\le x\le 2} | \boxed{2<x\le5} | \boxed{2\le x<5} | \boxed{2\ge x\ge5} | \boxed{x\ge2} | \boxed{x\le5}
[2,5]: \boxed{x\ge 2 \text{ or } x\le 5} | \boxed{5>x\ge2} | \boxed{2\le x\le6} | \boxed{x \le 2, x \ge 5}
(2,5]: \boxed{2\le x\le5} | \boxed{2<x<5} | \boxed{5>x\ge2} | \boxed{x>2 \text{ or } x\le5}
(5,\infty): \boxed{x\ge5} | \boxed{x<5} | \boxed{5>x} | \boxed{x>6} | \boxed{x\ne5} | \boxed{x>5 \text{ and } x<7}
(a,\infty): \boxed{x<a} | \boxed{x\ge a} | \boxed{a>x}
(-\infty,1)\cup(1,\infty): \boxed{x=1} | \boxed{x\ne2} | \boxed{x<1} | \boxed{\mathbb{R}} | \boxed{x\ne1, x\ne2}
(-\infty,1)\cup(1,\infty): \boxed{\text{all real numbers except } 2} | \boxed{\text{all real numbers}}
(-\infty,\infty): \boxed{\mathbb{Z}} | \boxed{\emptyset} | \boxed{x>0} | \boxed{\text{no real numbers}}
(-\infty,\infty): \boxed{\text{real}} | \boxed{\text{all integers}} | \boxed{\mathbb{R}\setminus\{0\}}
\text{all real numbers}: \boxed{\emptyset} | \boxed{\mathbb{Z}} | \boxed{(0,\infty)} | \boxed{\text{all integers}}
\text{all real numbers}: \boxed{0}
x\le 2 \text{ or } x\ge 3: \boxed{(-\infty,2)\cup[3,\infty)} | \boxed{x\le 2} | \boxed{y\le 2 \text{ or } y\ge 3}
x\le 2 \text{ or } x\ge 3: \boxed{[2,3]} | \boxed{x\le 3 \text{ or } x\ge 2}
2<x<5: \boxed{2<y<5} | \boxed{[2,5]} | \boxed{2<x} | \boxed{5<x<2}
x=1 \text{ or } x=2: \boxed{x=1} | \boxed{x=2} | \boxed{x=1 \text{ or } x=3} | \boxed{1} | The answer is $x=1$.
1, 2: \boxed{1} | \boxed{1, 3} | \boxed{1, 2, 3} | The answer is 1. | The answer is 1 and 3.
""")
RIGHT["sums"] = rows(r"""
62: \boxed{a+b+c = 12+25+25 = 62} | \boxed{a+b+c=62} | $a+b+c=62$ | The answer is $a+b+c = 62$.
62: \boxed{a + b + c = 12 + 25 + 25 = 62} | <answer>a+b+c=62</answer> | \boxed{p \cdot q=62}
293: \boxed{m+n=293} | Thus $m+n=293$. | Answer: m+n = 256+37 = 293 | \boxed{m + n = 256 + 37 = \textbf{293}}
293: \[m+n=256+37=293.\] | \boxed{n-m=293} | \boxed{mn=293} | \boxed{m_1+m_2=293}
293: \boxed{AB+CD=293} | \boxed{\alpha+\beta=293} | \boxed{a+b = 293\text{ cm}} | \boxed{\frac{m}{n} = 293}
293: \boxed{abc = 293} | \boxed{\left(m+n\right) = 293}
""")
RIGHT["sums"] += rows(r"""
2\sqrt{3}: \boxed{a+b=2\sqrt{3}} | $x+y = \sqrt{12}$ | \boxed{a+b = \sqrt{3}+\sqrt{3} = 2\sqrt{3}}
\frac{n(n+1)}{2}: \boxed{1+2+\cdots+n = \frac{n(n+1)}{2}} | \boxed{S = 1+2+\ldots+n = \frac{n^2+n}{2}}
""")
WRONG["sums"] = rows(r"""
293: \boxed{m+n=256+37} | \boxed{m+n} | \boxed{m+n=256+38=293} | \boxed{m+n=294} | \boxed{m+n=293+1}
293: \boxed{m=256,n=37} | \boxed{256+37} | \boxed{m+n=293=294} | \boxed{293=m+n} | \boxed{m+n<293}
62: \boxed{x+1=62} | \boxed{2x=62} | \boxed{x^2=62} | \boxed{3a+b=62} | \boxed{x \text{ or } y=62}
62: \boxed{a+b=62 \text{ or } 63} | \boxed{\text{not } x = 62} | \boxed{x+y=61, z=62}
61: \boxed{x+1=62} | \boxed{x+1=61} | \boxed{60+1} | \boxed{a+b=60+1}
x+y=5: \boxed{5} | \boxed{x+y=6} | \boxed{x-y=5} | Answer: 5
2\sqrt{3}: \boxed{x+1=2\sqrt{3}} | \boxed{a+b=\sqrt{3}} | \boxed{a+b=2\sqrt{3}=\sqrt{3}}
""")
RIGHT["words"] = rows(r"""
\sqrt{2}: \boxed{\sqrt{2}\text{ cm}} | \boxed{\sqrt{2}\text{ cm}^2} | \boxed{\sqrt{2}\text{ square units}}
\sqrt{2}: \boxed{\sqrt{2}\,\mathrm{m/s}} | \boxed{\sqrt{2}\text{ miles per hour}} | \boxed{\text{Area} = \sqrt{2}}
\sqrt{2}: \boxed{x=\sqrt{2}\text{ units}}
k\pi: \boxed{k\pi\text{ where }k\in\mathbb{Z}} | \boxed{k\pi \text{ for any integer } k}
k\pi: \boxed{x=k\pi\text{, where }k\text{ is an integer}} | \boxed{k\pi}
e^x+C: \boxed{e^x+C \text{ where } C \text{ is a constant}} | \boxed{\mathrm{e}^x + C}
2\sqrt{3}\text{ cm}: \boxed{2\sqrt{3}} | \boxed{2\sqrt{3}\text{ cm}} | \boxed{\sqrt{12}\text{ cm}}
""")
RIGHT["words"] += rows(r"""
2\sqrt{3}: \boxed{2\sqrt{3}\text{ cm$^2$}} | \boxed{2\sqrt{3}\mathrm{~cm}} | \boxed{2\sqrt{3}\,\text{cm}}
2\sqrt{3}: \boxed{2\sqrt{3}\text{ m}}
2\mathrm{ln}\frac{1}{2}: \boxed{2\ln\frac12} | \boxed{-2\ln 2}
2\operatorname{arctan}\frac{1}{2}: \boxed{2\arctan\frac12} | \boxed{2\mathrm{arctan}\frac12}
\operatorname{lcm}(4,x): \boxed{\mathrm{lcm}(4,x)}
\mathbf{i}+2\mathbf{j}: \boxed{2\mathbf{j}+\mathbf{i}} | \boxed{i+2j}
\mathrm{P}(A): \boxed{P(A)}
\text{Area} = 2\sqrt{3}: \boxed{2\sqrt{3}} | \boxed{\text{Area}=\sqrt{12}}
61: The answer is 61. No other number fits. | The answer is 61, not 62. | The answer is the smallest, 61.
2\text{ hours }30\text{ minutes}: \boxed{2\text{ hours }30\text{ minutes}} | Answer: 2 hours 30 minutes
12\text{ inches by }5\text{ inches}: \boxed{12\text{ inches by }5\text{ inches}}
""")
WRONG["words"] = rows(r"""
2\text{ hours }30\text{ minutes}: \boxed{2} | \boxed{2\text{ hours}} | \boxed{30}
12\text{ inches by }5\text{ inches}: \boxed{12} | \boxed{12\text{ inches by }6\text{ inches}}
""")
WRONG["words"] += rows(r"""
2\sqrt{3}: \boxed{2\sqrt{3}\text{, 5}} | \boxed{2\sqrt{3}\text{ 5}} | \boxed{2\sqrt{3}\text{ A}\sqrt{5}}
2\sqrt{3}: \boxed{2\sqrt{3}\text{m}\sqrt{7}}
2\sqrt{3}: \boxed{2\sqrt{3}\text{ V}+\text{5}} | \boxed{2\sqrt{3}\textbf{1}} | \boxed{2\sqrt{3}\mathrm{1}}
2\sqrt{3}: \boxed{2\sqrt{3}\mathbf{x}}
2\mathrm{ln}\frac{1}{2}: \boxed{2} | \boxed{2\ln 2}
2\operatorname{arctan}\frac{1}{2}: \boxed{2} | \boxed{2\arctan\frac13}
\mathrm{P}(A): \boxed{\mathrm{P}(B)}
61: The answer is 61 to 62 | The answer is not 61. | The answer isn't 61 | The answer is less than 61
61: The answer is at most 61
61: Answer: 61 or more | Answer: 61 and a half | The answer is 61 and 1/2
61: The answer is 61. No, 62. | Answer: 61 … 62 | The answer is between 61 and 62
B: Answer: B. C. | Answer: B; C | \boxed{B \text{ (not sure)}}
\sqrt{2}: \boxed{\sqrt{2}\text{ or maybe }\sqrt{3}} | \boxed{\sqrt{2}\text{ or }\sqrt{3}} | \boxed{\sqrt{2} or \sqrt{3}}
\sqrt{2}: \boxed{\sqrt{2}\text{ maybe}} | \boxed{\text{maybe }\sqrt{2}} | \boxed{\sqrt{2}, \sqrt{3}}
\sqrt{2}: \boxed{\sqrt{2}\text{ and }\sqrt{3}}
\sqrt{2}: \boxed{\sqrt{2}\text{ is wrong, it is }\sqrt{3}} | \boxed{\sqrt{2}\mathrm{ or maybe }\sqrt{3}}
\sqrt{2}: \boxed{\sqrt{2}\text{ (or }\sqrt{3})} | \boxed{\sqrt{2}\lor\sqrt{3}}
\sqrt{2}: \boxed{\sqrt{2}\text{, alternatively }\sqrt{3}} | \boxed{\sqrt{2}\text{ unless }x=3}
\sqrt{2}: The answer is $\sqrt{2}$ or $\sqrt{3}$. | The answer is $\sqrt{2}$ or maybe $\sqrt{3}$.
\sqrt{2}: The answer is $\sqrt{2}$, $\sqrt{3}$. | It is $\sqrt{2}$ or $\sqrt{3}$ | It is $\sqrt{3}$ or $\sqrt{2}$
\sqrt{2}: The answer is $\sqrt{2}$. Or maybe $\sqrt{3}$.
\sqrt{2}: \boxed{\text{not }\sqrt{2}} | \boxed{\sqrt{2}\text{ with }\sqrt{3}} | \boxed{\sqrt{2}\text{ for }\sqrt{3}}
\sqrt{2}: \boxed{\pm\sqrt{2}} | \boxed{\sqrt{2}\textbf{ perhaps }\sqrt{3}} | \boxed{\sqrt{2}\operatorname{or}\sqrt{3}}
\sqrt{2}: \boxed{\sqrt{2}\quad\sqrt{3}} | \boxed{\sqrt{2}\mbox{ or else }\sqrt{3}}
61: \boxed{61 \text{ or } 62} | \boxed{61\text{ or maybe }62} | Answer: 61 or 62 | Answer: 62 or 61
61: The answer is 61, 62. | The answer is 61 and 62. | It is 61 or 62. | It is 62 or 61. | \boxed{61\text{ maybe}}
61: \boxed{61 perhaps} | <answer>61 or 62</answer>
61: <answer>62 or 61</answer> | The answer is 61 or maybe 62. | The answer is $61$ or $62$. | The answer is 61 (or 62).
61: Answer: 61. Or maybe 62. | \boxed{\text{either }61\text{ or }62} | The answer is 61, perhaps 62. | \boxed{61/62}
61: Answer: 61; 62
Monday: Answer: Monday or Tuesday | \boxed{\text{Monday or Tuesday}} | The answer is Monday. Or maybe Tuesday.
Monday: \boxed{\text{not Monday}} | \boxed{\text{Monday, Tuesday}}
""")
RIGHT["dots"] = rows(r"""
1, 2, \ldots, n: \boxed{1, 2, \ldots, n} | \boxed{1,2,\dots,n} | \boxed{1, 2, ..., n} | \boxed{1,2,…,n}
1, 2, \ldots, n: The answer is $1, 2, \cdots, n$.
55: \boxed{1+2+\cdots+10=55} | \boxed{1+2+3+...+10=55} | The answer is $1+2+\ldots+10=55$. | The answer is 55...
0.\overline{3}: \boxed{0.\overline{3}} | \boxed{\frac{1}{3}}
""")
WRONG["dots"] = rows(r"""
1, 2, \ldots, n: \boxed{1, 3, 5, \ldots, 2n-1} | \boxed{2} | \boxed{n} | \boxed{1,2} | \boxed{1,2,n}
1, 2, \ldots, n: \boxed{1, 2, \ldots} | Answer: 1 | \boxed{1, 2, \ldots, 2n} | \boxed{} | I don't know.
1+2+\cdots+n: \boxed{1+2+n} | \boxed{\frac{n(n+1)}{2}} | \boxed{1}
\frac{1}{3}: \boxed{0.333\ldots} | \boxed{0.333333...} | \boxed{0.333333\dots} | Answer: 0.333333...
\frac{1}{3}: Answer: $0.333333\ldots$ | \boxed{0.333333…} | \boxed{\frac{1}{3}\ldots}
61: \boxed{61\ldots} | \boxed{61, \ldots} | \boxed{1, 2, \ldots, 61} | \boxed{\ldots, 61} | Answer: 61, 62, ...
61: Answer: 1, 2, ..., 61 | \boxed{61 \dots 62} | \boxed{1+2+\cdots+61} | \boxed{61...}
2\sqrt{3}: \boxed{2\sqrt{3}\ldots} | \boxed{2\sqrt{3}, \dots} | \boxed{\sqrt{3}+\cdots+\sqrt{3}}
2\sqrt{3}: \boxed{\ldots 2\sqrt{3}} | \boxed{2\sqrt{3}...} | \boxed{3.464101615\ldots}
\{1,2,3\}: \boxed{\{1,2,\ldots,3\}} | \boxed{1, 2, 3, \ldots}
""")

# A text that was escaped twice: math-verify takes `\\frac` for `\frac`, and so the words behind `\\text` count too
RIGHT["doubled backslashes"] = rows(r"""
\\frac{1}{3}: \boxed{\frac{1}{3}} | \boxed{\\frac{1}{3}} | \boxed{0.\\overline{3}}
61: \boxed{61\\text{ cm}^2} | \boxed{61^\\circ} | \boxed{122/2 = \\textbf{61}}
1000: \boxed{1\\,000}
50\\%: \boxed{0.5} | \boxed{50\%}
\\text{even}: \boxed{\\textbf{ Even }} | Answer: even
2\\sqrt{3}: \boxed{\\sqrt{12}\\text{ cm}} | \boxed{2\sqrt{3}}
1-\\frac{1}{\\mathrm{e}}: \boxed{1-e^{-1}}
\\{1,2\\}: \boxed{\{2,1\}}
\\textbf{(C)}\\ 2\\sqrt{3}: \boxed{C} | \boxed{\sqrt{12}}
\\left[0,5\\right): \boxed{0 \\le x < 5} | \boxed{0 \le x < 5}
\begin{pmatrix}1\\x\end{pmatrix}: \boxed{\begin{pmatrix}1 \\ x\end{pmatrix}}
""")
WRONG["doubled backslashes"] = rows(r"""
1-\\frac{1}{\\mathrm{e}}: \boxed{1}
2\sqrt{3}: \boxed{2\\sqrt{3}\\text{, 5}} | \boxed{2\\sqrt{3}\\text{m}\\sqrt{7}} | \boxed{2\\sqrt{3}\\ldots}
\sqrt{2}: \boxed{\\sqrt{2}\\text{ or maybe }\\sqrt{3}} | \boxed{\\sqrt{2}\\text{ with }\\sqrt{3}}
x=1 \\text{ or } x=2: \boxed{x=2}
1, 2, \\ldots, n: \boxed{2} | \boxed{1, 2}
""")
RIGHT["spacing and fonts"] = rows(r"""
p-q: \boxed{p - q} | \boxed{-q+p}
merry-go-round: \boxed{\text{Merry-go-round}}
-5: \boxed{–5}
300000: \boxed{3 ~\cdot 10^{5}} | \boxed{3\;\times\,10^{ 5 }}
25\%: \boxed{25\, \%}
61: \boxed{{\bf 61}} | \boxed{61\operatorname{cm}} | \boxed{61\,\;\text{cm}}
\frac{1}{2}: \boxed{\frac{\displaystyle 1}{2}} | \boxed{1\displaystyle /2} | \boxed{\frac{1}{\,2}}
\text{Yes}: \boxed{\tt{Yes}} | \boxed{\text{\displaystyle Yes}}
B: \boxed{\left(B\right)}
(-\infty,-5)\cup(5,\infty): \boxed{x<-5\text{\, or }x>5}
[0,2000]: \boxed{0 \le x \le 2{,}000} | \boxed{[0, 2{,}000]}
1000\pi: \boxed{1{,}000\pi} | \boxed{x = 1{,}000\pi}
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}: \boxed{\begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}}
""")
WRONG["spacing and fonts"] = rows(r"""
p-q: \boxed{p + q} | \boxed{q-p}
-5: \boxed{5} | \boxed{4–9}
1000\pi: \boxed{1{,}00\pi} | \boxed{1{,}001\pi}
\frac{1}{2}: \boxed{1\displaystyle 2} | \boxed{\frac{1}{\,3}}
B: \boxed{\left(C\right)}
""")

VERDICTS = [(kind, *row, True) for kind, table in RIGHT.items() for row in table]
VERDICTS += [(kind, *row, False) for kind, table in WRONG.items() for row in table]


@pytest.fixture(scope="module")
def judged():
    with lent_servers(), runner(Math(), workers=2) as made:
        yield lambda answer, texts: ask(made, answer, *texts)


@pytest.mark.parametrize(("kind", "answer", "texts", "right"), VERDICTS)
def test_verdicts(judged, kind, answer, texts, right):
    given = {t: (s.valid, s.value, s.correct, s.error) for t, s in zip(texts, judged(answer, texts), strict=True)}
    assert given == dict.fromkeys(texts, (True, float(right), right, None))


SOLUTION = r"We add: $54+7=61$. Therefore the answer is $\boxed{61}$."


def test_a_whole_solution_suggests_what_reads_it():
    hint = r"is a whole solution; for the answer in its \boxed{61}, "
    for reward in (Math(), Boxed()):
        assert reward.unreadable(SOLUTION) == hint + "set answer_in_box=true in the reward"
    for reward in (Number(), Regex(), Accuracy152(), Exact()):
        assert reward.unreadable(SOLUTION) == hint + "use 'math' or 'boxed' with answer_in_box=true"
    for reward in (Math(), Boxed(), Number(), Exact()):
        assert reward.unreadable("54+7=61\n#### 61") == "is a whole solution; use 'gsm8k' for the number after its ####"
    assert Accuracy152().unreadable("54+7=61\n#### 61") is None


@pytest.mark.parametrize("reward", [Math, Boxed])
def test_the_box_of_a_whole_solution_is_the_answer(reward):
    texts = r"\boxed{61}", r"\boxed{62}", SOLUTION
    assert reward(answer_in_box=True).unreadable(SOLUTION) is None
    assert corrects(reward(answer_in_box=True), SOLUTION, *texts) == [True, False, True]
    assert corrects(reward(), r"$\boxed{61}$.", *texts) == [True, False, True]
    assert reward(answer_in_box=True).unreadable("61") == r"has no \boxed{…}, which answer_in_box=true reads"


@pytest.mark.parametrize("reward", [Math(), Boxed(), Number(), Exact(), Gsm8kReward(), Regex(), Accuracy152()])
@pytest.mark.parametrize("answer", [math.nan, math.inf])
def test_nan_is_no_answer(reward, answer):
    assert (
        reward.unreadable(answer)
        == f"the row's answer is {answer}, which no completion can equal; give it a number or a text"
    )
    with pytest.raises(ValueError, match=f"the row's answer is {answer}"):
        reward.score(prompt(answer), completions(r"<answer>nan</answer> \boxed{nan}"))


def test_dots_are_named_before_the_run():
    why = "has dots for what is not written: only the same text is right; write the answer out, or remove the row"
    assert [Math().unreadable(answer) for answer in (r"1, 2, \ldots, n", "1, 2, ..., n", r"1+2+\cdots+n")] == [why] * 3
    assert Math().unreadable(r"0.\overline{3}") is None


@pytest.mark.parametrize(
    ("question", "right"), [("Find $10a+b$.", True), ("Let $10a+b=61$. Find a.", False), ("Find a.", False)]
)
def test_a_formula_has_a_value_if_the_question_asks_for_it(question, right):
    row = replace(prompt("61"), messages=({"role": "user", "content": question},))
    (score,) = Math().score(row, completions(r"\boxed{10a+b=61}"))
    assert score.correct is right
    named = replace(row, answer="10a+b=61")
    assert [s.correct for s in Math().score(named, completions(r"\boxed{61}", r"\boxed{62}"))] == [right, False]


def test_digits_that_cancel_are_computed():
    """math-verify's own comparison, which is left alone, finds no difference below 1e-15."""
    from math_verify import parse, verify

    tiny = [parse(f"${text}$", parsing_timeout=None) for text in (r"\frac{1}{2^{60}}", r"\frac{1}{2^{61}}")]
    assert not graders.verify(*tiny) and graders.verify(tiny[0], tiny[0])
    assert verify(*tiny, timeout_seconds=None)
