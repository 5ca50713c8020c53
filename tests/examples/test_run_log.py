import json

import pytest
from arguments import BadInput
from run_log import RunLog


def test_every_record_is_one_line_of_valid_json(tmp_path):
    log = RunLog(tmp_path / "run")
    log.record(1, 0, {"train/loss": 2.0, "comm/ratio": float("nan")})
    log.record(2, 0, {"train/loss": 4.0, "comm/ratio": 0.5}, {"bucket/wait": [0.1, 0.2]})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "epoch": 0, "train/loss": 2.0, "comm/ratio": None},
        {"step": 2, "epoch": 0, "train/loss": 4.0, "comm/ratio": 0.5, "bucket/wait": [0.1, 0.2]},
    ]
    assert log.mean("train/loss") == 3.0
    assert log.mean("comm/ratio") == 0.5  # of the steps that had one
    log.finish({})


def test_the_summary_is_printed_and_written_alike(tmp_path):
    text = RunLog(tmp_path).finish({"steps": 3, "val_accuracy": float("inf"), "P": 2})
    assert (tmp_path / "summary.json").read_text() == text + "\n"
    assert json.loads(text) == {"steps": 3, "val_accuracy": None, "P": 2}
    assert not list(tmp_path.glob("*.part"))


def test_a_second_run_starts_the_metrics_anew(tmp_path):
    for step in (1, 2):
        log = RunLog(tmp_path)
        log.record(step, 0, {})
        log.finish({})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [2]


def test_other_ranks_write_nothing_but_know_the_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = RunLog(None)
    log.record(1, 0, {"comm/bytes_sent": 10})
    assert log.mean("comm/bytes_sent") == 10
    assert json.loads(log.finish({"P": 2})) == {"P": 2}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(BadInput, match=r"taken.*choose another folder"):
        RunLog(tmp_path / "taken")
