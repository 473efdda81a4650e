"""What a user may type for a model, and what is said to the rest."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import FileError, InputError, ModelError
from partita.graph.files import write_graph
from partita.zoo import ALIASES, MODELS, build


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_the_model_it_stands_for(alias):
    assert build(alias, batch=1).name == ALIASES[alias]


@pytest.mark.parametrize("spec", ["GPT2", "Inception-V3", "gpt3_125m", "SqueezeNet1-1"])
def test_case_and_dashes_do_not_matter(spec):
    assert build(spec, batch=1).name.replace("_", "-") == spec.lower().replace("_", "-")


def test_an_at_sets_the_image_size_or_the_length():
    assert build("alexnet@227", batch=2).tensor("image").shape == (2, 3, 227, 227)
    assert build("gpt2@512", batch=2).tensor("input_ids").shape == (2, 512)
    assert build("gpt2", batch=2, seq=512) == build("gpt2@512", batch=2)


def test_without_batch_the_catalogue_decides():
    assert build("resnet50").tensor("image").shape[0] == MODELS["resnet50"].batch


def test_options_of_a_model_are_passed_on():
    small = build("rnnlm", batch=1, seq=8, hidden=64, layers=3, vocab=100)
    assert small.num_parameters == 2 * 100 * 64 + 100 + 3 * 4 * 64 * (64 + 64 + 2)
    shallow = build("densenet121", batch=1, blocks=(3, 3, 3, 3))
    assert shallow.num_parameters < 2e6


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gtp2", "there is no model 'gtp2'; did you mean gpt2"),
        ("resnet5", "did you mean resnet50"),
        ("lama-2-7b", "llama-2-7b"),
        ("zzzz", "there is no model 'zzzz'; known are alexnet, bert-base"),
        ("", "there is no model ''"),
        ("@3", "there is no model ''"),
        ("x" * 200, "there is no model 'xxx"),
        ("gpt2@-5", r"gpt2@-5: seq '-5' after the @; a whole number is needed"),
        ("gpt2@abc", r"gpt2@abc: seq 'abc' after the @; a whole number is needed"),
        ("gpt2@", r"gpt2@: seq '' after the @"),
        ("gpt2@1.5", "seq '1.5'"),
        ("gpt2@²", "seq '²'"),
        ("gpt2@0", "gpt2: seq is '0'; give a whole number from 1"),
        ("gpt2@512@512", "seq '512@512'"),
        ("gpt2@99999999999999999999", "a whole number is needed"),
        ("gpt2@2048", "gpt2: 2048 positions, and the model has learned 1024; choose at most 1024"),
        ("bert@513", "bert-base: 513 positions, and the model has learned 512"),
        ("alexnet@30", "alexnet: cannot be built with size 30: op 'features.5': pool of"),
        ("inception_v3@40", "inception_v3: cannot be built with size 40"),
        ("resnet50@2000000000", "resnet50: cannot be built with size 2000000000"),
        ("unet@100", "unet: size 100, which four halvings do not divide; choose 16 n"),
        ("vit@100", "vit-b16: size 100, which patches of 16 do not divide; choose a"),
        ("lstm@20000", "lstm: 200000 cells of steps and layers; unroll at most 100000"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_with_the_reason(spec, message):
    with pytest.raises(ModelError, match=message):
        build(spec, batch=1)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("gpt2", {"batch": 0}, "gpt2: batch is '0'; give a whole number from 1"),
        ("gpt2", {"batch": -3}, "batch is '-3'"),
        ("gpt2", {"batch": True}, "batch is 'True'"),
        ("gpt2", {"batch": 2.5}, "batch is '2.5'"),
        ("gpt2", {"batch": 2**40}, "batch is"),
        ("gpt2", {"dtype": "i64"}, "gpt2: dtype is 'i64'; use one of f64, f32, f16, bf16, f8"),
        ("gpt2", {"dtype": "float"}, "dtype is 'float'"),
        ("gpt2", {"size": 3}, "gpt2: has no option 'size'; it has seq, fused_attention"),
        ("gpt2", {"variant": "xl"}, "has no option 'variant'"),
        ("gpt2@5", {"seq": 5}, "gpt2@5: gives seq twice; give it once"),
        ("gpt2", {"fused_attention": 1}, "fused_attention is '1'; give true or false"),
        ("inception_v3", {"aux": "yes"}, "aux is 'yes'; give true or false"),
        ("deepspeech2", {"cell": "rnn"}, "deepspeech2: cell 'rnn'; use lstm or gru"),
        ("deepspeech2", {"cell": 3}, "cell is '3'; give str"),
        ("densenet121", {"blocks": (0,)}, "blocks is"),
        ("densenet121", {"blocks": ()}, "blocks is"),
        ("randwire", {"nodes": 4}, "a ring of 2 nodes with 4 neighbours"),
        ("randwire", {"nodes": 10**6}, "nodes is '1000000'; give a whole number from 1 to 1024"),
        ("seq2seq", {"encoder_layers": 2}, "4 decoder layers take their states from 2"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(spec, options, message):
    with pytest.raises(ModelError, match=message):
        build(spec, **options)


@pytest.mark.parametrize("builder", ["gpt:gpt2", "llama:llama", "t5:t5", "vit:vit", "bert:bert"])
def test_an_unknown_variant_is_refused_with_those_there_are(builder):
    function = next(m for m in MODELS.values() if m.builder == builder).function
    with pytest.raises(ModelError, match="has no variant 'huge'; use one of"):
        function("huge")


@given(st.text(max_size=30))
def test_any_text_is_a_model_or_refused(text):
    with contextlib.suppress(InputError):
        build(text, batch=1)


@given(st.sampled_from(["alexnet", "unet", "gpt2", "vit"]), st.integers(-10, 70))
def test_any_number_after_the_at_is_built_or_refused(name, number):
    spec = f"{name}@{number}"
    if number < 1:
        with pytest.raises(ModelError, match=str(number)):
            build(spec, batch=1)
        return
    with contextlib.suppress(ModelError):
        assert number in {size for tensor in build(spec, batch=1).inputs for size in tensor.shape}


class TestSavedGraphs:
    @pytest.mark.parametrize("ending", [".json", ".txt"])
    def test_a_saved_graph_is_read_back(self, tmp_path, ending):
        graph = build("alexnet", batch=4)
        write_graph(tmp_path / f"mine{ending}", graph)
        assert build(str(tmp_path / f"mine{ending}")) == graph

    def test_what_is_fixed_in_a_saved_graph_cannot_be_chosen(self, tmp_path):
        path = tmp_path / "mine.json"
        write_graph(path, build("alexnet", batch=4))
        for options in ({"batch": 8}, {"dtype": "f16"}, {"size": 32}):
            with pytest.raises(ModelError, match=f"{next(iter(options))} cannot be chosen"):
                build(str(path), **options)
        with pytest.raises(ModelError, match="@ cannot be chosen"):
            build(f"{path}@32")

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(FileError, match=r"nothing\.json: no such file"):
            build(str(tmp_path / "nothing.json"))
        with pytest.raises(FileError, match=r"nothing/config\.json: no such file"):
            build(str(tmp_path / "nothing"))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("not json", "is not JSON"),
            ("[1]", "holds a JSON list"),
            ("{}", 'has neither "format" .* nor "model_type"'),
            ('{"format": "partita/plan@1"}', "partita/graph@1"),
            ('{"format": 3}', "format"),
        ],
    )
    def test_a_file_that_is_no_model_is_refused(self, tmp_path, content, message):
        path = tmp_path / "thing.json"
        path.write_text(content)
        with pytest.raises(InputError, match=message) as caught:
            build(str(path))
        assert str(path) in str(caught.value)

    def test_an_at_in_a_file_name_is_part_of_it(self, tmp_path):
        path = tmp_path / "a@b.json"
        path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
        assert build(str(path)).name == "a@b"


def test_a_file_of_another_kind_is_no_model(tmp_path):
    other = tmp_path / "weights.bin"
    other.write_bytes(b"1")
    with pytest.raises(ModelError, match=r"weights.bin: is no model that is read; give a config"):
        build(str(other))
