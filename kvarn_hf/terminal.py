"""What commands print: tables that lose nothing in 80 columns, and how far a long run is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

# Called with the name of a stage, the steps done and the steps expected.
OnStep: TypeAlias = Callable[[str, int, int], None]


def table(*columns: str | tuple[str, int], title: str | None = None, names: Collection[str] = ()) -> Table:
    """An empty table whose headers wrap, and whose cells continue in the next line rather than being cut off.

    Some of the headers ``columns`` come with the least width of their cells. ``names`` are those of columns of text,
    which stand on the left and are wrapped only if they have a least width; all others hold numbers.
    """
    made = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
    for column in columns:
        header, least = (column, None) if isinstance(column, str) else column
        look: dict[str, Any] = {"justify": "left", "no_wrap": not least} if header in names else {"justify": "right"}
        made.add_column(header, overflow="fold", min_width=least, **look)
    return made


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print text as it is, in one line however long it is."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


class Bars:
    """A bar for every stage of a run; a line for every finished stage where there is no terminal.

    A context manager; its :meth:`update` is an :data:`OnStep`.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._bars = console, _bars(console)
        self._tasks: dict[str, TaskID] = {}
        self._finished: set[tuple[str, int]] = set()

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` steps of a stage are done."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)
        if self._bars.disable and done == total and (stage, total) not in self._finished:
            self._finished.add((stage, total))
            print_line(self._console, f"{stage}: {done} of {total}")


class Steps:
    """One bar for a run of many steps, and a line for whatever a step finds. Build with :func:`steps`."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task, self._what = bars, task, ""

    def begin(self, what: str) -> None:
        """Say what is being measured."""
        self._what = what
        self._bars.update(self._task, description=what)

    def found(self, text: str) -> None:
        """Print what was found."""
        print_line(self._bars.console, f"{self._what}: {text}")

    def end(self) -> None:
        """One step further."""
        self._bars.advance(self._task)


@contextmanager
def steps(console: Console, name: str, total: int) -> Iterator[Steps]:
    """A bar of ``total`` steps in a terminal; elsewhere what the steps find is printed, line by line."""
    with _bars(console) as bars:
        yield Steps(bars, bars.add_task(name, total=total))


def _bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not (console.is_terminal or console.is_jupyter))
