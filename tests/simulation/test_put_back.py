"""Each old defect of ``simulation/put_back.py`` can be put back into the present code."""

from __future__ import annotations

import pytest

from simulation.put_back import DEFECTS, ROOT, Defect


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_the_code_that_a_defect_replaces_occurs_once(defect: Defect) -> None:
    assert (ROOT / defect.file).read_text().count(defect.old) == 1
    assert defect.old != defect.new
