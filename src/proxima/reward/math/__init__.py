r"""Rewards that read a mathematical answer from a text, and the parsing that they share.

    extract          the numbers of a text, in linear time
    marked           the contents of `\boxed{…}` or of a tag, read as a fraction, or compared; `boxed`, `gsm8k`
    numeric_answer   one number as people write it: thousands, units, percent, mixed fractions
    answer_text      an unmarked answer; answers that are words or equations
    choice           answers that are options: `B`, `\textbf{(B)}\ 12`
    notation         upright constants, signs and sets in one notation; the words in a formula
    solution_set     inequalities as intervals
    symbolic         `math`: numbers and words here, formulas by math-verify in a worker process
    number, accuracy_1_5_2   the rewards that compare numbers and text only

Imports: stdlib, `proxima.data`, `proxima.reward.base`. `evaluate` and `prepare` also use `extract` and `marked`.
"""
