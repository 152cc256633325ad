r"""Rewards that read a mathematical answer from a text, and the parsing that they share.

    marked           the contents of `\boxed{…}` or of a tag, and the numbers of a text; `boxed`, `gsm8k`
    numbers          `number`, `accuracy_1_5_2`: the rewards that compare numbers and text only
    numeric_answer   one number as people write it: thousands, units, percent, mixed fractions
    answer_text      an unmarked answer; answers that are words, equations or options (`B`, `\textbf{(B)}\ 12`)
    notation         upright constants, signs, sets and inequalities in one notation; the words in a formula
    symbolic         `math`: numbers and words here, formulas by math-verify in a worker process

Imports: stdlib, `proxima.data`, `proxima.reward.base`. `evaluation` and `prepare` also use `marked`.
"""
