"""The Python in README.md and docs/ runs, and prints what the pages say.

Each block of Python runs as it stands, in a namespace of its own. All blocks
run in this process, which has the four logical CPUs that they need. Blocks for
several machines run as two workers on this machine. The blocks of
docs/multi_worker.md have a test of their own, and those of docs/migration.md
build on each other.
"""

import pathlib
import re

import pytest

from tests.support import pages, workers

EXPECTED = {  # The blocks of Python, or the change of a line, of each page.
  "README.md": 2,
  "docs/callbacks.md": 2,
  "docs/coming_from.md": 1,
  "docs/embeddings.md": 1,
  "docs/ensembles.md": 1,
  "docs/groups.md": 3,
  "docs/limits.md": 1,
  "docs/quickstart.md": 1,
  "docs/saving.md": 1,
  "docs/search.md": 1,
  "docs/training.md": 2,
  "docs/updates.md": 5,
  "docs/vectorized.md": 1,
  "docs/virtual_tpu.md": 1,
}
MIGRATION = "docs/migration.md"
ELSEWHERE = {MIGRATION, "docs/multi_worker.md"}
WORKERS = {  # What two workers print, by page and number.
  ("docs/coming_from.md", 0): ["trained to 2.0", "trained to 2.0"],
}


def test_every_program_is_found() -> None:
  names = [f"docs/{x.name}" for x in pages.PROJECT.glob("docs/*.md")]
  found = {n: len(pages.programs(n)) for n in ["README.md", *names]}
  assert {
    name: count
    for name, count in found.items()
    if count and name not in ELSEWHERE
  } == EXPECTED


@pytest.mark.parametrize(
  ("page", "number"),
  [(page, i) for page, count in EXPECTED.items() for i in range(count)],
)
def test_program_runs_and_prints_what_the_page_says(
  page: str,
  number: int,
  tmp_path: pathlib.Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.chdir(tmp_path)
  program = pages.programs(page)[number]
  if (page, number) not in WORKERS:
    pages.check(page, program, tmp_path)
    return
  path = tmp_path / "program.py"
  path.write_text(program)
  printed = workers.run("program", 2, arguments={"path": path})
  for worker, line in zip(printed, WORKERS[page, number], strict=True):
    assert re.search(rf"^{line}$", worker.output, re.MULTILINE)
    assert line in pages.text(page)


def test_migration_continues_from_the_checkpoint_and_runs_twice(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.chdir(tmp_path)
  before, after, towers, read = pages.blocks(MIGRATION, "python")
  # The printed lines are shown below `after`, so nothing may follow it.
  for _ in range(2):
    pages.check(MIGRATION, before + after, tmp_path, shown_after=after)
  pages.check(MIGRATION, before + after + read, tmp_path, shown_after=after)
  pages.check(MIGRATION, towers, tmp_path)
