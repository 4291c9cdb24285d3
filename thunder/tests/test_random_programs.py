"""A fixed sample of random programs. ``tools/random_programs.py`` runs as many as asked."""

from __future__ import annotations

import pytest
from random_programs import compare, sample

PROGRAMS = 100


@pytest.mark.parametrize("source", sample(PROGRAMS, seed=2026), ids=range(PROGRAMS))
def test_random_program(source):
    # a program that stock thunder cannot compile would compare nothing
    assert compare(source) in ("agreed", "stock differs"), source
