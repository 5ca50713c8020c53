"""Texts, vocabularies and streams."""

import pytest
import torch

from ddl.workloads import text
from ddl.workloads.lstm import SIZES, LSTMLanguageModel
from ddl.workloads.streams import IGNORED, judged_columns, rank_streams, windows


def write(folder, **contents):
    paths = []
    for name, content in contents.items():
        paths.append(folder / f"ptb.{name}.txt")
        paths[-1].write_text(content)
    return paths


def test_code_is_split_into_names_numbers_signs_and_ends_of_lines():
    tokens = text.split_code("\n\nif x_1 >= 0.5:  # why\n\n    f(x)\n")
    assert tokens == "if x_1 > = 0.5 : # why <eos> f ( x ) <eos>".split()


def test_words_are_split_as_in_ptb():
    assert text.split_words(" the <unk> n't\n N years \n") == [
        *("the", "<unk>", "n't", "<eos>"),
        *("N", "years", "<eos>"),
    ]


def test_the_vocabulary_is_the_most_frequent_words_of_the_training_text(tmp_path):
    files = write(tmp_path, train="b a b\nc a b\n", valid="d a\n", test="b c\n")
    corpus = text.read_corpus(files, "words", words=4)
    assert corpus.words == ("b", "<eos>", "a", "<unk>")
    assert corpus.train.tolist() == [0, 2, 0, 1, 3, 2, 0, 1]
    assert corpus.valid.tolist() == [3, 2, 1]
    assert corpus.test.tolist() == [0, 3, 1]


def test_unk_of_the_text_itself_is_no_second_word(tmp_path):
    files = write(tmp_path, train="<unk> <unk> a\n", valid="x y\n", test="a a\n")
    corpus = text.read_corpus(files, "words", words=10)
    assert corpus.words == ("<unk>", "<eos>", "a")
    assert corpus.valid.tolist() == [0, 0, 1]


def test_a_single_file_is_cut_into_three(tmp_path):
    (file,) = write(tmp_path, all=" ".join(map(str, range(99))) + "\n")
    corpus = text.read_corpus([file], "words", words=200)
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [80, 10, 10]


def test_the_standard_library_is_text_on_every_machine():
    corpus = text.read_corpus([], "code", 1000, train_tokens=20_000, held_out_tokens=5_000)
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [20_000, 5_000, 5_000]
    assert len(corpus.words) == 1000
    assert {"<eos>", "<unk>", "self", "("} <= set(corpus.words)
    again = text.read_corpus([], "code", 1000, train_tokens=20_000, held_out_tokens=5_000)
    assert torch.equal(corpus.train, again.train) and corpus.words == again.words


@pytest.mark.parametrize(
    ("contents", "words"),
    [({"train": "a b\n", "valid": "", "test": "a b\n"}, ["valid part", "0 tokens"])],
)
def test_too_little_text_is_said(tmp_path, contents, words):
    with pytest.raises(ValueError) as caught:
        text.read_corpus(write(tmp_path, **contents), "words", 10)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt.*give a text file"):
        text.read_corpus([tmp_path / "nowhere.txt"], "words", 10)


@pytest.mark.parametrize("P", [1, 2, 3])
def test_ranks_have_contiguous_parts_of_equal_length(P):
    tokens = torch.arange(1000)
    parts = [rank_streams(tokens, rank, P, streams=4) for rank in range(P)]
    assert len({part.shape for part in parts}) == 1
    joined = torch.cat([part.t().flatten() for part in parts])
    assert torch.equal(joined, tokens[: len(joined)])
    assert len(joined) > 1000 - 4 * P


def test_too_few_tokens_for_the_streams_are_said():
    with pytest.raises(ValueError, match="10 training tokens for 3 ranks of 4 streams"):
        rank_streams(torch.arange(10), 0, 3, 4)


def test_windows_follow_each_other_and_predict_every_word_but_the_first():
    streams = rank_streams(torch.arange(44), 0, 1, 4)
    pairs = list(windows(streams, 4))
    assert [len(inputs) for inputs, _ in pairs] == [4, 4, 2]
    assert torch.equal(torch.cat([inputs for inputs, _ in pairs]), streams[:-1])
    assert torch.equal(torch.cat([targets for _, targets in pairs]), streams[1:])


@pytest.mark.parametrize("length", [2, 3, 33, 100])
def test_every_word_but_the_first_is_judged_once(length):
    tokens = torch.arange(length)
    inputs, targets = judged_columns(tokens, 8)
    judged = targets[targets != IGNORED]
    assert sorted(judged.tolist()) == list(range(1, length))
    assert torch.equal(inputs[targets != IGNORED] + 1, judged)


def test_the_large_model_is_the_published_size():
    size = SIZES["large"]
    with torch.device("meta"):
        model = LSTMLanguageModel(10_000, size.hidden, size.dropout)
        tied = LSTMLanguageModel(10_000, size.hidden, size.dropout, tied=True)
    assert sum(p.numel() for p in model.parameters()) == 66_034_000
    assert sum(p.numel() for p in tied.parameters()) == 51_034_000


def test_the_state_carries_what_was_read_and_no_gradient():
    torch.manual_seed(0)
    model = LSTMLanguageModel(12, 8, 0.0).eval()
    tokens = torch.randint(12, (6, 3))
    whole, _ = model(tokens)
    first, state = model(tokens[:2])
    assert not any(part.requires_grad for part in state)
    second, _ = model(tokens[2:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole)
