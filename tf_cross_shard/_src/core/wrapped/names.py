"""Names of an optimizer's variables that are the same in every program.

Keras' numbers in names, as in `dense_7`, depend on what was created before.
"""

from collections.abc import Iterable, Mapping, Sequence

from tf_cross_shard._src.core import variables as variables_lib
from tf_cross_shard._src.core.keras_types import Variable


def unique(names: Sequence[str]) -> list[str]:
  """Returns the names, with numbers for repeated names: `weight#2`."""
  counts: dict[str, int] = {}
  numbered = []
  for name in names:
    count = counts[name] = counts.get(name, 0) + 1
    numbered.append(name if count == 1 else f"{name}#{count}")
  return numbered


def stable_names(
  paths_of_variables: Iterable[str], trained: Sequence[Variable]
) -> list[str]:
  """Returns names without numbers that depend on earlier objects."""
  # For a trained variable "dense_7/kernel":
  #   adam/dense_7_kernel_momentum  ─▶  adam/dense/kernel/momentum
  #   gradient_sum/dense_7/kernel   ─▶  gradient_sum/dense/kernel
  trained_paths = list(map(variables_lib.path_of, trained))
  renumbered = variables_lib.renumbered(trained_paths)
  stable_of_path = dict(zip(trained_paths, renumbered, strict=True))
  # Maps the prefix of a slot's name to the stable name of the trained variable.
  stable: dict[str, str] = {}
  for variable, name in zip(trained, renumbered, strict=True):
    for path in (getattr(variable, "path", None), variable.name):
      if path:
        prefix = str(path).replace("/", "_").replace(":", "_")
        stable.setdefault(f"{prefix}_", name)
  paths = []
  for path in paths_of_variables:
    head, slash, last = path.rpartition("/")
    owners = [prefix for prefix in stable if last.startswith(prefix)]
    # A variable named exactly like a trained variable `kernel_1` is a copy of
    # it, not slot "1" of `kernel`.
    if owners and f"{last}_" not in stable:
      longest = max(owners, key=len)
      path = f"{head}{slash}{stable[longest]}/{last.removeprefix(longest)}"
    else:
      path = _with_stable_end(path, stable_of_path)
    paths.append(path)
  return variables_lib.renumbered(paths)


def _with_stable_end(path: str, stable_of_path: Mapping[str, str]) -> str:
  """Replaces the longest path of a trained variable at the end of a path."""
  parts_of_path = path.split("/")
  for start in range(len(parts_of_path)):
    stable = stable_of_path.get("/".join(parts_of_path[start:]))
    if stable is not None:
      return "/".join([*parts_of_path[:start], stable])
  return path
