"""README and docs/: their Python runs, and they name what there is.

Each block of Python runs as it stands, in a namespace of its own. All share
this process, which has the four logical CPUs that blocks ask for. The blocks
of docs/migration.md and docs/multi_worker.md build on each other or need
several processes, and have tests of their own.
"""
# bazel: data=//:sources deps=//tf_cross_shard,//tf_cross_shard/virtual_tpu

import contextlib
import io
import pathlib
import re
import subprocess

import pytest

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = pathlib.Path(__file__).absolute().parent.parent.parent
PAGES = [
  "README.md",
  *sorted(f"docs/{x.name}" for x in PROJECT.glob("docs/*.md")),
]
ELSEWHERE = ("docs/migration.md", "docs/multi_worker.md")
EXPECTED = {  # The blocks of Python, or the change of a line, of each page.
  "README.md": 2,
  "docs/custom_loops.md": 1,
  "docs/groups.md": 2,
  "docs/mixed_precision.md": 2,
  "docs/towers.md": 1,
  "docs/updates.md": 1,
  "docs/virtual_tpu.md": 1,
}


def _text(page: str) -> str:
  return (PROJECT / page).read_text(encoding="utf-8")


def _blocks(page: str, language: str) -> list[str]:
  return re.findall(rf"```{language}\n(.*?)```", _text(page), flags=re.DOTALL)


def _programs(page: str) -> list[str]:
  """Returns the page's programs; a diff is one, with its changes made."""
  changed = [
    re.sub("(?m)^[+ ]", "", re.sub("(?m)^-.*\n", "", block))
    for block in _blocks(page, "diff")
  ]
  return changed + _blocks(page, "python")


RUN = [
  pytest.param(page, program, id=f"{page}-{i}")
  for page in PAGES
  if page not in ELSEWHERE
  for i, program in enumerate(_programs(page))
]


def test_every_program_is_found() -> None:
  found = {page: len(_programs(page)) for page in PAGES}
  assert {
    p: n for p, n in found.items() if n and p not in ELSEWHERE
  } == EXPECTED


@pytest.mark.parametrize(("page", "program"), RUN)
def test_program_runs_and_prints_what_the_page_says(
  page: str,
  program: str,
  tmp_path: pathlib.Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  if re.search(r"CPU:\{|TowerOptimizer", program):  # This process has four.
    assert "set_logical_device_configuration" in program
  monkeypatch.chdir(tmp_path)
  names: dict[str, object] = {"__name__": "__main__"}
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    # From a file, because tf.function reads the source of what it traces.
    (tmp_path / "program.py").write_text(program)
    exec(compile(program, str(tmp_path / "program.py"), "exec"), names)
  lines = printed.getvalue()
  # What a page prints stands right behind the program; times differ.
  follows = _text(page).split(program)[-1]
  shown = re.match(r"```\n\n```text\n(.*?)```", follows, re.DOTALL)
  if shown:
    assert shown[1].split("compile seconds")[0] in lines
  if page == "docs/groups.md" and "replica_state" in program:
    [values] = re.findall(r"\[array\((.*?), dtype.*array\((.*?), dtype", lines)
    assert values[0] != values[1]
    assert (tmp_path / "groups.npz").exists()


def test_plain_program_differs_in_one_line_only() -> None:
  [block] = _blocks("README.md", "diff")
  plain = re.sub("(?m)^[- ]", "", re.sub("(?m)^[+].*\n", "", block))
  compile(plain, "README.md", "exec")
  assert len(re.findall("(?m)^-", block)) == 1
  assert "tf_cross_shard" not in plain


@pytest.mark.parametrize("page", PAGES)
def test_page_names_what_there_is(page: str) -> None:
  """Links, headings that they lead to, programs, and shell that parses."""
  for link in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
    file, _, heading = link.partition("#")
    target = (PROJECT / page).parent / file if file else PROJECT / page
    if target.suffix == ".png" or link.startswith("http"):
      continue  # Pictures are no sources, which is what Bazel gives a test.
    assert target.exists(), link
    if heading:
      headings = re.findall("(?m)^#+ (.*)$", target.read_text(encoding="utf-8"))
      anchors = [re.sub(r"[^\w -]", "", x).lower() for x in headings]
      assert heading in [x.replace(" ", "-") for x in anchors], link
  for file in re.findall(
    r"(?:benchmarks|examples|tools)/[\w/]+\.\w+", _text(page)
  ):
    assert (PROJECT / file).exists(), file
  for script in _blocks(page, "sh"):
    subprocess.run(["bash", "-nc", script], check=True)


def test_readme_is_short_and_index_names_all() -> None:
  assert len(_text("README.md").splitlines()) <= 180
  index = _text("docs/index.md")
  for page in PAGES:
    assert page in ("README.md", "docs/index.md") or f"({page[5:]})" in index


def test_design_names_the_modules() -> None:
  """Every file and folder in the picture of the house is there, and all are."""
  house = _text("docs/design.md").partition("<!-- house -->")[2]
  picture, _, _ = house.partition("<!-- /house -->")
  named = re.findall(r"(?m)^  (\w+(?:\.py|/)) ", picture.split("\ntests/")[0])
  root = PROJECT / "tf_cross_shard"
  there = {x.name + "/" for x in root.iterdir() if (x / "__init__.py").exists()}
  there |= {x.name for x in root.glob("*.py")}
  assert set(named) == there


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
