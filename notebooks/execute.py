"""Run notebooks top to bottom and save them with their outputs, without anything that depends on the machine.

python notebooks/execute.py                    # all of them
python notebooks/execute.py 01_quickstart      # one
"""

from __future__ import annotations

import base64
import io
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent
LIMIT = 300_000


def clean(notebook: nbformat.NotebookNode) -> None:
    """Drop progress bars and warnings, which name folders of the machine, and times of day; make pictures smaller."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = smaller(output.data["image/png"])
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def smaller(picture: str) -> str:
    """A PNG, in base64, with 256 colours."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    out = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode() + "\n"


def main(names: list[str]) -> None:
    """Execute the named notebooks in place, or all."""
    files = [HERE / f"{name}.ipynb" for name in names] or sorted(HERE.glob("*.ipynb"))
    for file in files:
        notebook = nbformat.read(file, as_version=4)
        start = time.monotonic()
        place = {"metadata": {"path": str(HERE)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
        clean(notebook)
        text = nbformat.writes(notebook) + "\n"
        if len(text.encode()) > LIMIT:
            raise SystemExit(f"{file.name} would have {len(text.encode()):,} bytes, more than {LIMIT:,}")
        file.write_text(text, encoding="utf-8")
        print(f"{file.name}: {time.monotonic() - start:.0f} s, {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
