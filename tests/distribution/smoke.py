"""Build the wheel, install it into an empty environment outside of the repository, and run jobs from there.

    python -m tests.distribution.smoke     # make wheel

The wheel is left in build/wheel.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from .wheel import ROOT, build_wheel, files_of, install, run

STEPS = 12


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        kept = ROOT / "build" / "wheel"
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, kept)
        print(f"{wheel.name}: {len(files_of(wheel))} files, {wheel.stat().st_size // 1000} kB, in build/wheel")
        commands = install(wheel, folder)
        craft = str(commands / "craft")
        print(run([craft, "--version"], folder).strip())
        run([craft, "--help"], folder)
        print(
            run(
                [str(commands / "python"), "-c", "import craft; print('import craft:', craft.__file__)"], folder
            ).strip()
        )
        script = folder / "train.py"
        script.write_text((ROOT / "examples" / "train_craft.py").read_text().replace("steps=200", f"steps={STEPS}"))
        summary = run([craft, "run", "--workers", "2", "--dir", str(folder / "run"), str(script)], folder)
        assert f"{STEPS} steps" in summary, summary
        print(f"craft run: 2 workers, {STEPS} steps")
        demo = run([craft, "demo", "--workers", "2", "--kills", "1", "--steps", "40", "--seed", "1"], folder)
        assert "Bit-identical." in demo, demo
        print("craft demo: one of 2 workers killed, bit-identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
