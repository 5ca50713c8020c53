"""What docs/ promises by the letter: snippets run, and errors are quoted as they are raised."""

import ast
import os
import re
import subprocess
import sys

import pytest
from launch import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run_one_after_the_other(page, tmp_path):
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(snippets)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def texts_of_the_engine():
    """Every text in the sources, with dots for what is filled in."""
    for path in (ROOT / "ddl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[dsgr]|%\.\df", "...", node.value)


def test_troubleshooting_quotes_errors_that_exist():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert len(quoted) > 20
    texts = list(texts_of_the_engine())
    for text in quoted:
        assert any(text in known for known in texts), text


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *PAGES]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
