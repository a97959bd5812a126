"""Write docs/reproductions/comparisons.md from the recorded fits of all studies."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reproduce.compared import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
