"""Imports go downward only, and private names stay where they belong.

Reads the sources; the last part breaks small projects on purpose, to show that
each rule is one that can fail.
"""
# bazel: data=//:sources

import ast
import graphlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from tf_cross_shard import cross_shard

# Not resolved: under Bazel the files are links, and lead out of the sandbox.
PROJECT = Path(__file__).absolute().parent.parent
PACKAGE = "tf_cross_shard"

# The floors of the house. What is not listed takes its package's floor.
FLOORS = {
  "requirements": 0,
  "scaling": 0,
  "groups": 0,
  "drawing": 0,
  "conventions": 0,
  "converting": 0,
  "saving_notice": 0,
  "packing": 1,
  "wire": 1,
  "sparse": 1,
  "clipping": 1,
  "skipping": 1,
  "v1_rules": 1,
  "agreement": 1,
  "archive": 1,
  "arguments": 1,
  "virtual_tpu": 1,
  "multi_worker": 1,
  "collectives": 2,
  "gradients": 3,
  "placement": 3,
  "reduction": 3,
  "inner": 3,
  "group_copies": 3,
  "cross_shard": 4,
  "towers": 3,
  "minimizing": 4,
  "tower": 4,
  "replica_state": 4,
  "keras3": 5,
  "tf_keras": 5,
  "binding": 6,
  "migration": 7,
  "__init__": 8,
  "__main__": 8,
}
# Plain Python: who reduces with whom, and by what factor.
WITHOUT_TENSORFLOW = (
  "groups",
  "drawing",
  "scaling",
  "conventions",
  "saving_notice",
  "archive",
)
# What a module may not reach, directly or through others.
UNKNOWN_TO = {"reduction": "inner", "inner": "collectives"}
MOST_LINES = 300

Sources = dict[str, ast.Module]


def read(project: Path) -> Sources:
  """The modules of the package, by dotted name below it."""
  root = project / PACKAGE
  found = {}
  for file in sorted(root.rglob("*.py")):
    parts = file.relative_to(root).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
      parts = parts[:-1]
    found[".".join(parts)] = ast.parse(file.read_text())
  return found


def imported(tree: ast.Module, name: str, sources: Sources) -> Iterator[str]:
  """Yields every dotted name that a module imports, wherever it does so."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        is_package = name == "__init__" or any(
          other.startswith(f"{name}.") for other in sources
        )
        here = [PACKAGE, *name.split(".")][: None if is_package else -1]
        if name == "__init__":
          here = [PACKAGE]
        above = here[: len(here) - node.level + 1]
        base = ".".join([*above, *filter(None, [node.module])])
      yield from (f"{base}.{alias.name}" for alias in node.names)


def dependencies(sources: Sources) -> dict[str, set[str]]:
  """The modules of the package that each of them imports."""
  graph: dict[str, set[str]] = {}
  for name, tree in sources.items():
    graph[name] = set()
    for target in imported(tree, name, sources):
      if target.split(".")[0] != PACKAGE:
        continue
      below = target.split(".")[1:]
      while below and ".".join(below) not in sources:
        below.pop()  # a name in a module
      graph[name].add(".".join(below) or "__init__")
    graph[name].discard(name)
  return graph


def floor_of(name: str) -> int | None:
  """The floor of a module, or of the package it is in."""
  return FLOORS.get(name, FLOORS.get(name.split(".")[0]))


def upward_imports(project: Path) -> list[str]:
  """Every import that leads upward, or around in a circle."""
  graph = dependencies(read(project))
  faults = [
    f"{name} has no floor: give it one in DESIGN and here"
    for name in graph
    if floor_of(name) is None
  ]
  for name, targets in graph.items():
    for target in sorted(targets):
      here, there = floor_of(name), floor_of(target)
      if here is not None and there is not None and there > here:
        faults.append(f"{name} (floor {here}) imports {target} ({there})")
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    faults.append(f"imports in a circle: {error.args[1]}")
  return faults


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
  """The modules that importing `start`, or what is in it, brings in."""
  seen: set[str] = set()
  todo = [n for n in graph if n == start or n.startswith(f"{start}.")]
  while todo:
    name = todo.pop()
    if name not in seen:
      seen.add(name)
      todo.extend(graph[name])
  return seen


def forbidden_acquaintances(project: Path) -> list[str]:
  """Modules that reach what they are not to know."""
  graph = dependencies(read(project))
  return [
    f"{name} reaches {other}"
    for name, stranger in UNKNOWN_TO.items()
    for other in sorted(reachable(graph, name))
    if other.split(".")[0] == stranger
  ]


def tensorflow_imports(project: Path) -> list[str]:
  """Imports of TensorFlow or Keras in modules that are plain Python."""
  sources = read(project)
  return [
    f"{name} imports {target}"
    for name in WITHOUT_TENSORFLOW
    if name in sources
    for target in imported(sources[name], name, sources)
    if target.split(".")[0] in ("tensorflow", "keras", "tf_keras")
  ]


def defined(tree: ast.Module) -> set[str]:
  """Every name that a module gives to something of its own."""
  names: set[str] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      names.add(node.name)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.add(node.id)
    elif (
      isinstance(node, ast.Attribute)
      and isinstance(node.ctx, ast.Store)
      and _is_self(node.value)
    ):
      names.add(node.attr)
  return names


def _is_self(node: ast.expr) -> bool:
  return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private(name: object) -> bool:
  return (
    isinstance(name, str)
    and name.startswith("_")
    and name.isidentifier()
    and not name.startswith("__")
    and name != "_"
  )


def private_names_of(*things: Any) -> set[str]:
  """The private attributes that objects have."""
  return {name for thing in things for name in dir(thing) if _is_private(name)}


def keras_names() -> set[str]:
  """Private names of Keras' optimizers and variables."""
  variable = keras.Variable([1.0])
  optimizer = keras.optimizers.Adam(use_ema=True)
  optimizer.build([variable])
  scaled = keras.optimizers.LossScaleOptimizer(optimizer)
  older = tf_keras.optimizers.legacy.Adam()
  other = tf_keras.optimizers.Adam(use_ema=True)
  other.build([tf.Variable([1.0])])
  around = tf_keras.mixed_precision.LossScaleOptimizer(other)
  return private_names_of(variable, optimizer, scaled, older, other, around)


def distribute_names() -> set[str]:
  """Private names of tf.distribute."""
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  with strategy.scope():
    variable = tf.Variable(1.0)
  found = private_names_of(
    strategy, strategy.extended, variable, tf.distribute.ReplicaContext
  )
  # Put on each replica's variable, and not always there.
  return found | {"_distributed_container"}


def foreign_names(project: Path) -> dict[str, set[str]]:
  """The private names that each module takes from other libraries."""
  sources = read(project)
  others = keras_names() | distribute_names()
  own = {n for tree in sources.values() for n in defined(tree)} - others
  foreign: dict[str, set[str]] = {}
  for module, tree in sources.items():
    here = defined(tree)
    foreign[module] = set()
    for node in ast.walk(tree):
      if isinstance(node, ast.Attribute):
        name: Any = node.attr
        mine = name in own or (_is_self(node.value) and name in here)
      elif isinstance(node, ast.Constant):  # getattr(x, "_name")
        name, mine = node.value, node.value in own
      else:
        continue
      if _is_private(name) and not mine:
        foreign[module].add(name)
      if name == "raw_ops" or str(name).startswith("tensorflow.python"):
        foreign[module].add(name)
    for target in imported(tree, module, sources):
      if target.startswith("tensorflow.python") or "raw_ops" in target:
        foreign[module].add(target)
  return foreign


def misplaced_imports(project: Path) -> list[str]:
  """Imports of jax and its like in another place than the one for them."""
  return [
    f"{module} imports {text}"
    for module, tree in read(project).items()
    if module != "virtual_tpu.xla"
    for node in ast.walk(tree)
    for text in _module_names(node)
    if text.split(".")[0] in ("jax", "jaxlib", "libtpu")
  ]


def _module_names(node: ast.AST) -> list[str]:
  """What an import, or a call of import_module, names."""
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom):
    return [node.module or ""]
  if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
    return [a.value for a in node.args if isinstance(a, ast.Constant)]
  return []


def misplaced_names(project: Path) -> list[str]:
  """Private names of TensorFlow in another place than the one for them."""
  keras, distribute = keras_names(), distribute_names()
  faults = []
  for module, names in foreign_names(project).items():
    for name in sorted(names):
      package = module.split(".")[0]
      engine = not _is_private(name) or name in distribute - keras
      if package in ("collectives", "virtual_tpu", "multi_worker"):
        # The last two have strategies themselves. `keras` has what tensors
        # have.
        allowed = name not in keras - distribute or name == "_numpy"
      else:
        allowed = package == "inner" and not engine
      if not allowed:
        faults.append(f"{module} names {name}")
  return faults


def lines_of_code(text: str) -> int:
  """Lines without docstrings."""
  total = len(text.splitlines())
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
      first = node.body[0] if node.body else None
      if ast.get_docstring(node) is not None and first is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
  return total


def long_modules(project: Path) -> list[str]:
  """Modules that hold more than one idea's worth of code."""
  return [
    f"{file.relative_to(project)} has {lines} lines without docstrings"
    for file in sorted((project / PACKAGE).rglob("*.py"))
    if (lines := lines_of_code(file.read_text())) > MOST_LINES
  ]


# The house as it is.


def test_imports_go_downward() -> None:
  graph = dependencies(read(PROJECT))
  assert len(graph) > 15, f"too few modules in {PROJECT}"
  assert {"packing", "sparse", "collectives.base"} <= graph["reduction"]
  assert "cross_shard" in graph["keras3"] & graph["tf_keras"]
  assert {"keras3", "tf_keras"} <= graph["binding"]
  assert upward_imports(PROJECT) == []


def test_reduction_knows_no_optimizer_and_inner_no_collective() -> None:
  assert forbidden_acquaintances(PROJECT) == []


def test_groups_and_scaling_are_plain_python() -> None:
  assert tensorflow_imports(PROJECT) == []


def test_jax_is_met_in_one_file() -> None:
  sources = read(PROJECT)
  met = [
    n
    for node in ast.walk(sources["virtual_tpu.xla"])
    for n in _module_names(node)
  ]
  assert {"jax", "jax._src.lib", "jax.experimental.topologies"} <= set(met)
  assert misplaced_imports(PROJECT) == []


def test_private_names_are_where_they_belong() -> None:
  foreign = foreign_names(PROJECT)
  # The scan sees what is known to be there.
  assert "_use_merge_call" in foreign["collectives.alone"]
  assert "raw_ops" in foreign["collectives.meeting"]
  assert "_trainable_variables_indices" in foreign["inner.keras3"]
  assert misplaced_names(PROJECT) == []


def test_the_optimizer_replaces_nothing_private_of_keras() -> None:
  """A method of one name with a method of Keras' would be called by Keras."""
  assert not set(vars(cross_shard.CrossShard)) & keras_names()


def test_modules_are_short() -> None:
  assert long_modules(PROJECT) == []


# The rules can fail.


def write(project: Path, name: str, text: str) -> None:
  file = project / PACKAGE / name
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(text)


@pytest.fixture
def house(tmp_path: Path) -> Path:
  """A small project that keeps the rules."""
  for name, text in {
    "__init__.py": "from tf_cross_shard import cross_shard\n",
    "groups.py": "import numpy\n",
    "scaling.py": "",
    "conventions.py": "from tf_cross_shard import scaling\n",
    "clipping.py": "from tf_cross_shard import groups\n",
    "collectives/__init__.py": (
      "from tf_cross_shard.collectives import base\n"
    ),
    "collectives/base.py": (
      "import tensorflow as tf\n"
      "def f(extended):\n  return extended._use_merge_call(), tf.raw_ops\n"
    ),
    "inner/__init__.py": "",
    "inner/keras3.py": "def f(opt):\n  return opt._trainable_variables\n",
    "reduction.py": (
      "from tf_cross_shard import collectives\n"
      "from tf_cross_shard.clipping import Gradient\n"
    ),
    "cross_shard.py": (
      "from .inner import keras3\n"
      "class A:\n"
      "  def __init__(self):\n"
      "    self._mine = 1\n"
      "    self._values = self._mine\n"
      "  def f(self, other):\n"
      "    return other._mine, self._values\n"
    ),
  }.items():
    write(tmp_path, name, text)
  return tmp_path


RULES = (
  upward_imports,
  forbidden_acquaintances,
  tensorflow_imports,
  misplaced_names,
  long_modules,
)


def test_a_house_in_order_has_no_faults(house: Path) -> None:
  assert [rule(house) for rule in RULES] == [[]] * len(RULES)


@pytest.mark.parametrize(
  ("name", "line", "fault"),
  [
    (
      "clipping.py",
      "from tf_cross_shard import reduction",
      "clipping (floor 1) imports reduction (3)",
    ),
    (
      "clipping.py",
      "def f():\n  import tf_cross_shard.collectives.base",
      "clipping (floor 1) imports collectives.base (2)",
    ),
    (
      "groups.py",
      "from .collectives.base import f",
      "groups (floor 0) imports collectives.base (2)",
    ),
    (
      "inner/keras3.py",
      "from ..cross_shard import A",
      "inner.keras3 (floor 3) imports cross_shard (4)",
    ),
    (
      "reduction.py",
      "from tf_cross_shard import CrossShardOptimizer",
      "reduction (floor 3) imports __init__ (8)",
    ),
    ("scaling.py", "from tf_cross_shard import conventions", "in a circle"),
    ("novelty.py", "", "novelty has no floor"),
    (
      "reduction.py",
      "from tf_cross_shard.inner import keras3",
      "reduction reaches inner.keras3",
    ),
    (
      "inner/keras3.py",
      "from tf_cross_shard import collectives",
      "inner reaches collectives.base",
    ),
    ("groups.py", "import tensorflow as tf", "groups imports tensorflow"),
    ("scaling.py", "from keras import ops", "scaling imports keras.ops"),
    (
      "cross_shard.py",
      "def f(opt):\n  return opt._trainable_variables",
      "cross_shard names _trainable_variables",
    ),
    (
      "cross_shard.py",
      "class B(A):\n  def f(self):\n    return self._var_key(1)",
      "cross_shard names _var_key",
    ),
    (
      "reduction.py",
      "def f(v):\n  return getattr(v, '_distributed_container', None)",
      "reduction names _distributed_container",
    ),
    (
      "clipping.py",
      "def f(tf):\n  return tf.raw_ops",
      "clipping names raw_ops",
    ),
    (
      "inner/keras3.py",
      "from tensorflow.python.distribute import values",
      "inner.keras3 names tensorflow.python.distribute.values",
    ),
    (
      "inner/keras3.py",
      "def f(x):\n  return x._use_merge_call",
      "inner.keras3 names _use_merge_call",
    ),
    (
      "collectives/base.py",
      "def f(opt):\n  return opt._trainable_variables_indices",
      "collectives.base names _trainable_variables_indices",
    ),
    ("scaling.py", "x = 1\n" * 301, "scaling.py has 301 lines"),
  ],
)
def test_a_fault_is_found(
  house: Path, name: str, line: str, fault: str
) -> None:
  file = house / PACKAGE / name
  before = file.read_text() if file.exists() else ""
  write(house, name, f"{before}{line}\n" if before else f"{line.rstrip()}\n")
  found = [text for rule in RULES for text in rule(house)]
  assert any(fault in text for text in found), found


def test_an_upward_import_in_a_copy_of_this_project_is_found(
  tmp_path: Path,
) -> None:
  shutil.copytree(PROJECT / PACKAGE, tmp_path / PACKAGE)
  before = upward_imports(tmp_path)
  packing = (tmp_path / PACKAGE / "packing.py").read_text()
  write(tmp_path, "packing.py", f"{packing}\nfrom {PACKAGE} import reduction\n")
  found = [text for text in upward_imports(tmp_path) if text not in before]
  assert found[0] == "packing (floor 1) imports reduction (3)"
  assert "imports in a circle" in found[1]


def test_docstrings_do_not_count_as_code(house: Path) -> None:
  text = "def f():\n" + '  """One.\n' + "  more\n" * 400 + '  """\n'
  write(house, "scaling.py", text)
  assert lines_of_code(text) == 1
  assert long_modules(house) == []


if __name__ == "__main__":
  raise SystemExit(pytest.main([__file__, "-q"]))
