r"""Rewards that read a mathematical answer from a text, and the parsing that they share.

    marked           the contents of `\boxed{…}` or of a tag, and the numbers of a text; `boxed`, `gsm8k`
    numbers          `number`, `accuracy_1_5_2`: the rewards that compare numbers and text only
    symbolic         `math`: the reward; what needs algebra is decided by math-verify in a worker process

An answer is found in a text, parsed into its normal form, and compared:

    found            the final answer of a text: marked, after `answer is`, or the last formula
    forms, formula   the normal forms: number, option, words, solutions of inequalities, formula
    answer_rules     parses the row's answer into its form; all rules of what equals it
    latex            LaTeX as tokens; the one list of fonts, functions, spacing and dots
    numeric_answer   one number as people write it: thousands, units, percent, mixed fractions
    arithmetic       the value of plain arithmetic, for the sides of an equality
    equations        sides of equalities, and the names on the left of them
    answer_options   `B`, `\textbf{(B)}\ 12`
    words            `even`, `\text{no solution}`, and words that are no mathematics
    notation         upright constants, signs and sets in one notation; the words in a formula
    inequalities     the set of their solutions
    algebra          what math-verify is asked, and what it may evaluate

Imports: stdlib, `proxima.data`, `proxima.reward.base`. `evaluation` and `prepare` also use `marked`.
"""
