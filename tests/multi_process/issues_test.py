"""The programs of docs/issues_that_work.md do what the page says.

Those of several machines run as two workers of this one. The others share this
process, which has the four logical CPUs that they ask for.
"""
# bazel: size=large tags=exclusive,slow data=//:sources
# bazel: deps=//tf_cross_shard,//tf_cross_shard/multi_worker

import pathlib
import re

import pytest

from tests.support import pages, programs

pytestmark = pytest.mark.slow

PAGE = "docs/issues_that_work.md"
PROGRAMS = pages.programs(PAGE)
WORKERS = {  # What two workers print, by the program's number.
  0: ["learned 2", "learned 2"],
  1: ["trained to 2.0", "trained to 2.0"],
  3: ["batches 5 of 5", "batches 5 of 7"],
}


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program_does_what_the_issue_wants(
  number: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.chdir(tmp_path)
  if number not in WORKERS:
    pages.check(PAGE, PROGRAMS[number], tmp_path)
    return
  (tmp_path / "program.py").write_text(PROGRAMS[number])
  launch = ["-m", "tf_cross_shard", "launch", "--workers=2", "program.py"]
  output = programs.run(launch, tmp_path)
  for index, line in enumerate(WORKERS[number]):
    assert re.search(rf"^\[worker {index}\] {line}$", output, re.MULTILINE)
    assert line in pages.text(PAGE)


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
