"""Write the golden files anew."""

from __future__ import annotations

from .surface import SURFACES
from .test_contracts import GOLDEN, encoded

for name, make in SURFACES.items():
    (GOLDEN / f"{name}.json").write_text(encoded(make()))
