"""README.md and docs/ name what there is; pages_test.py runs their Python."""

import re
import subprocess

import pytest

from tests.support import pages

PAGES = [
  "README.md",
  *sorted(
    x.relative_to(pages.PROJECT).as_posix()
    for x in pages.PROJECT.glob("docs/**/*.md")
  ),
]


def test_plain_program_differs_in_one_line_only() -> None:
  [block] = pages.blocks("README.md", "diff")
  plain = re.sub("(?m)^[- ]", "", re.sub("(?m)^[+].*\n", "", block))
  compile(plain, "README.md", "exec")
  assert len(re.findall("(?m)^-", block)) == 1
  assert "tf_cross_shard" not in plain


@pytest.mark.parametrize("page", PAGES)
def test_links_and_programs_of_a_page_exist(page: str) -> None:
  """Links, headings that they lead to, programs, and shell that parses."""
  for link in re.findall(r"\]\(([^)\s]+)\)", pages.text(page)):
    file, _, heading = link.partition("#")
    here = pages.PROJECT / page
    target = here.parent / file if file else here
    if target.suffix == ".png" or link.startswith("http"):
      continue  # Pictures are no sources, which is what Bazel gives a test.
    assert target.exists(), link
    if heading:
      headings = re.findall("(?m)^#+ (.*)$", target.read_text(encoding="utf-8"))
      anchors = [re.sub(r"[^\w -]", "", x).lower() for x in headings]
      assert heading in [x.replace(" ", "-") for x in anchors], link
  for file in re.findall(
    r"(?:benchmarks|examples|tests|tools)/[\w/]+\.\w+", pages.text(page)
  ):
    assert (pages.PROJECT / file).exists(), file
  for script in pages.blocks(page, "sh"):
    subprocess.run(["bash", "-nc", script], check=True)


def test_readme_is_short_and_index_names_all() -> None:
  assert len(pages.text("README.md").splitlines()) <= 150
  index = pages.text("docs/index.md")
  for page in PAGES:
    assert page in ("README.md", "docs/index.md") or f"({page[5:]})" in index


def test_design_names_each_folder() -> None:
  house = pages.text("docs/design.md").partition("<!-- house -->")[2]
  tree = house.partition("<!-- /house -->")[0]
  root = pages.PROJECT / "tf_cross_shard"
  there = [x.parent for x in root.glob("_src/**/*/__init__.py")]
  assert sorted(re.findall(r"(?m)^(\S+)/ +\S", tree)) == sorted(
    x.relative_to(root).as_posix() for x in there
  )


def test_pages_that_the_package_names_exist() -> None:
  for file in (pages.PROJECT / "tf_cross_shard").rglob("*.py"):
    for page in re.findall(r"docs/[\w/]+\.md", file.read_text("utf-8")):
      assert (pages.PROJECT / page).exists(), (file, page)
