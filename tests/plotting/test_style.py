"""Figures do not need colour, and need matplotlib only when made."""

import itertools
import subprocess
import sys
from pathlib import Path

from kvarn_hf.plotting.style import figure, series_style, series_styles

ROOT = Path(__file__).parents[2]


def test_style_tells_series_apart_without_colour():
    styles = [series_style(i) for i in range(10)]
    for cue in ("linestyle", "marker", "hatch", "color"):
        assert len({getattr(style, cue) for style in styles}) == 10
    assert series_style(10) == series_style(0)

    def lightness(color):
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    # Those used most: grey levels that print apart.
    for one, other in itertools.pairwise(lightness(style.color) for style in styles[:4]):
        assert abs(one - other) > 30


def test_methods_look_the_same_in_every_figure():
    rtn, kvarn = series_styles(["rtn", "kvarn"])
    assert series_styles(["kvarn", "something", "rtn", "other"]) == [kvarn, series_style(1), rtn, series_style(3)]


def test_matplotlib_is_imported_when_a_figure_is_made():
    code = f"""
import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "kernels")]!r}
import kvarn_hf.plotting.errors, kvarn_hf.plotting.memory, kvarn_hf.plotting.tiles
assert not any(name.split(".")[0] == "matplotlib" for name in sys.modules)
sys.modules["matplotlib"] = None
try:
    kvarn_hf.plotting.memory.cache_bytes({{"a": {{"b": 1}}}})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == 'Figures need matplotlib: pip install "kvarn-hf[notebooks]".'


def test_a_figure_leaves_nothing_open():
    import matplotlib.pyplot as plt

    figure()
    assert plt.get_fignums() == []
