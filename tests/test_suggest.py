from hypothesis import given
from hypothesis import strategies as st

from partita.suggest import suggest


def test_the_nearest_name_is_asked_for():
    assert suggest("gpt-2", ["gpt2", "bert", "vgg16"]) == "did you mean gpt2?"


def test_two_near_names_are_both_named():
    assert suggest("resnet5", ["resnet50", "resnet101", "bert"]) == (
        "did you mean resnet50 or resnet101?"
    )


def test_case_does_not_matter():
    assert suggest("a100", ["A100", "V100x"]) == "did you mean A100?"


def test_where_nothing_is_near_the_choices_are_listed():
    assert suggest("zzz", ["b", "a"]) == "known are a, b"


def test_a_long_list_is_cut():
    text = suggest("zzz", [f"name{number:02d}" for number in range(30)])
    assert text.startswith("known are name00, ")
    assert text.endswith("name11, ... (30 in all)")


def test_nothing_to_choose_from_is_said():
    assert suggest("x", []) == "there is nothing to choose from"


@given(st.text(), st.lists(st.text()))
def test_it_always_says_something(name, known):
    assert suggest(name, known)
    assert suggest(name, known) == suggest(name, reversed(known))
