"""When a training question gives an evaluation question away."""

from proxima.prepare.decontaminate import EvalSet, OverlapIndex, OverlapMatch

from .published import AFTER, BEFORE, LONG

W = [f"w{i}" for i in range(40)]


def overlap(*questions, **options):
    index = OverlapIndex(**options)
    index.add(EvalSet("eval", questions))
    return index


def hits(index, question):
    return index.contaminated(index.find(question))


def test_the_same_text_in_other_clothes():
    index = overlap("What is  $2+2$?")
    assert hits(index, BEFORE + "What is $2+2$?" + AFTER) == [OverlapMatch(("eval", 0), ())]
    assert hits(index, "What is $2-2$?") == []  # the same words with another sign are another question
    index = overlap("Compute $2^{10}$.", "Is $n!$ for $n = 5!$ well-known?", "?")
    for text in (
        "compute $2^{10}$.",
        "Compute 2^{10}",
        "COMPUTE $2^{10}$ !",
        "Compute\u200b $2^{10}$ .",
        "\ufeffCompute $2^{10}$.",
    ):
        assert hits(index, text) == [OverlapMatch(("eval", 0), ())], text
    assert hits(index, "is n! for n=5! well known") == [OverlapMatch(("eval", 1), ())]
    assert hits(index, "Is n! for n=5 well known") == []
    assert hits(index, "!") == []  # no word and no sign: the text itself
    assert hits(overlap("Compute $2^{10}$.", n=0), "compute 2^{10}") != []


def test_an_evaluation_question_with_an_addition_is_always_found():
    question = " ".join(W[:20])
    index = overlap(question, " ".join([*W[30:], *W[:10]]))
    looked = [index.find(f"{question} Variant number {i}") for i in range(12)]
    assert [[hit.where for hit in index.contaminated(entry)] for entry in looked] == [[("eval", 0)]] * 12
    assert len(index.phrases) == 8  # all of its runs are in more than ten questions
    assert [bool(index.contaminated(index.find(" ".join(W[i:20])))) for i in (3, 4, 5)] == [
        True,
        True,
        False,
    ]  # 5, 4 and 3 runs of 8


def test_other_numbers_in_a_common_wording_are_another_question():
    index = overlap(LONG.format(n=50), common=3)
    looked = [
        index.find(LONG.format(n=n) + more)
        for n, more in [*((i, "") for i in range(10)), (50, " Hurry!"), (5, " 50 eggs.")]
    ]
    assert [bool(index.contaminated(entry)) for entry in looked] == [False] * 10 + [True, True]


def test_thirteen_words_in_a_row():
    question = " ".join(W[:20])
    index = overlap(question)
    assert hits(index, " ".join(["a", *W[3:16], "b"])) == [OverlapMatch(("eval", 0), (" ".join(W[3:16]),))]
    assert hits(index, " ".join(["a", *W[3:15], "b"])) == []  # twelve
    assert hits(overlap(question, n=12), " ".join(["a", *W[3:15], "b"])) != []
    assert hits(overlap(question, n=0), " ".join(["a", *W[:19]])) == []
    assert hits(index, " ".join(W[:20]).upper().replace(" ", ", ")) != []  # neither case nor punctuation


def test_a_phrase_of_the_trade_says_nothing():
    phrase = " ".join(W[:13])
    index = overlap(f"{phrase} one two three", common=3)  # four runs: the phrase is a quarter of them
    looked = [index.find(f"{phrase} {name}") for name in ("a", "b", "c")]
    assert all(index.contaminated(entry) for entry in looked)
    looked.append(index.find(f"{phrase} d"))
    assert not any(index.contaminated(entry) for entry in looked)
    assert index.phrases == [(phrase, 4)]
    assert index.contaminated(index.find(f"{phrase} one two three")) == [
        OverlapMatch(("eval", 0), ())
    ]  # the same text always counts


def test_a_phrase_does_not_save_what_shares_more():
    index = overlap(" ".join(W[:20]), common=2)
    for name in ("a", "b", "c"):
        index.find(" ".join(W[:13]) + f" {name}")
    (hit,) = index.contaminated(index.find(" ".join(W[:14])))
    assert hit.grams == (" ".join(W[1:14]),)


def test_only_training_questions_count_towards_a_phrase():
    index = overlap(" ".join(W[:13]), common=1)
    index.find(" ".join(W[:14]), count=False)
    assert index.contaminated(index.find(" ".join(W[:14])))


def test_common_0_takes_nothing_for_a_phrase():
    index = overlap(" ".join(W[:13]), common=0)
    looked = [index.find(" ".join(W[:14])) for _ in range(50)]
    assert all(index.contaminated(entry) for entry in looked) and index.phrases == []


def test_several_sets_and_one_left_out():
    index = OverlapIndex()
    index.add(EvalSet("a", ["x?", "y?"]))
    index.add(EvalSet("b", ["y?"]))
    looked = index.find("y?")
    assert [hit.where for hit in looked] == [("a", 1), ("b", 0)]
    assert [hit.where for hit in index.contaminated(looked, except_set="a")] == [("b", 0)]
