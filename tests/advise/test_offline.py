"""`python -m ddl.advise --offline`: what it prints and writes, and what it refuses."""

import json
import os
import subprocess
import sys

import pytest
from launch import ROOT

from ddl.advise import candidates
from ddl.advise.__main__ import main

FLAGS = ["--offline", "--network", "10gbe", "--workers", "64", "--compute", "v100"]


def answer(capsys, *more):
    main([*FLAGS, "--json", "-", *more])
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_the_documented_command_answers_for_thousands_of_workers():
    done = subprocess.run(
        [sys.executable, "-m", "ddl.advise", *FLAGS, "--workers", "4096", "--model", "resnet50"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "4096 workers" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Take gtopk")


def test_the_table_has_a_row_for_every_candidate(capsys):
    main(FLAGS)
    lines = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("compressor"))
    assert lines[head].split()[:3] == ["compressor", "collective", "step"]
    rows = lines[head + 1 : head + 1 + len(candidates.DEFAULT)]
    names = [label.partition(":")[0] for label in candidates.DEFAULT]
    assert [row.split()[0] for row in rows] == names
    assert len({len(row.split()) for row in rows}) == 1


def test_the_json_holds_links_layers_predictions_and_a_recommendation(capsys):
    found, err = answer(capsys)
    assert err.splitlines()[-1] == found["recommendation"]["sentence"]
    assert (found["model"], found["workers"], found["batch_size"]) == ("resnet50", 64, 32)
    assert found["links"]["beta_seconds_per_byte"] == pytest.approx(1 / 1.18e9)
    assert sum(layer["numel"] for layer in found["layers"]) == 25_557_032
    assert sum(found["buckets"]) == 25_557_032
    assert list(found["predictions"]) == list(candidates.DEFAULT)
    for p in found["predictions"].values():
        parts = p["compute_seconds"] + p["exposed_seconds"] + p["update_seconds"]
        assert p["seconds"] == pytest.approx(parts)
        assert 0 < p["efficiency"] <= 1
    assert found["recommendation"]["candidate"] in found["predictions"]
    assert found["predictions"]["none"]["hiding_density"] is None


def test_networks_decide_whether_compression_pays(capsys):
    slow, _ = answer(capsys, "--network", "1gbe")
    fast, _ = answer(capsys, "--network", "400gib", "--workers", "4")
    assert slow["recommendation"]["compressor"] != "none"
    assert fast["recommendation"]["compressor"] == "none"


def test_links_may_be_given_in_numbers(capsys):
    found, _ = answer(capsys, "--network", "1e-3,2e-8")
    assert found["links"]["alpha_seconds"] == 1e-3


def test_the_plot_is_a_picture(tmp_path, capsys):
    file = tmp_path / "advice.png"
    main([*FLAGS, "--compressors", "none", "gtopk", "--plot", str(file)])
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused(capsys, [*FLAGS, "--plot", str(tmp_path / "a.png")]).startswith(
        "python -m ddl.advise: --plot needs matplotlib, which was not found; pip install"
    )


def refused(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == "" and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offline"], "--offline needs --network and --workers and --compute"),
        ([*FLAGS, "--model", "resnet18"], "--offline knows alexnet, "),
        ([*FLAGS, "--verify"], "--offline runs nothing"),
        ([*FLAGS, "--image-size", "64"], "one image size only"),
        ([*FLAGS, "--density", "10"], "expected a density in (0, 1]"),
        ([*FLAGS, "--compressors", "magic"], "compressor must be one of none, topk"),
        ([*FLAGS, "--compressors", "topk:exact"], "has no choice of collective"),
        ([*FLAGS, "--compressors", "none", "none"], "names one twice"),
        ([*FLAGS, "--network", "token-ring"], "is not one of 1gbe, "),
        ([*FLAGS, "--plot", "a.txt"], "expected a name in .png, .pdf, .svg"),
        ([*FLAGS, "--json", "no/such/folder/a.json"], "there is no folder no/such/folder"),
        (["--network", "10gbe"], "--network and --workers go together"),
        (["--network", "10gbe", "--workers", "8", "--verify"], "only imagines them"),
        (["--compute", "v100"], "--compute goes with --offline"),
        (["--model", "resnet5000"], "unknown --model resnet5000, expected a classifier"),
        (["--model", "nowhere:make"], "--model nowhere:make could not be made"),
        (["--model", "json:loads"], "could not be made (TypeError"),
        (["--model", "os:getcwd"], "returned str, expected an nn.Module"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(capsys, arguments, message):
    assert message in refused(capsys, arguments)


def test_only_the_first_rank_complains(capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "PMI_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        main(["--density", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "")
