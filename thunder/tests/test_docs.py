"""Every Python snippet of the README and of the guides runs, in order, as one program for each file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page: Path) -> list[tuple[int, str]]:
    """The page's Python snippets with the lines that they begin at."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: m.start()].count("\n") + 1, m.group(1)) for m in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets(page):
    namespace = {"__name__": "snippets"}
    found = snippets(page)
    assert found
    for line, source in found:
        exec(compile("\n" * line + source, str(page), "exec"), namespace)


def test_links_and_commands_name_files_that_exist():
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text) + re.findall(r"python ([\w/]+\.py)", text):
            assert (page.parent / target).exists() or (ROOT / target).exists(), f"{page.name}: {target}"
