"""Every operation that pfor converts, against a loop over the models.

Each group of operations is one program, which computes them with each mixture
of stacked and shared inputs, and their gradients.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import testbed
from tf_cross_shard import VectorizedStrategy, per_model

N = 3
SLOW = pytest.mark.slow
raw = tf.raw_ops

# A function, the inputs of one model, and which of them no model may have of
# its own: operations whose results would have other shapes.
Case = tuple[Callable[..., Any], Sequence[np.ndarray], Sequence[int]]


def _numbers(*shape: int, low: float = 0.2, high: float = 0.9) -> np.ndarray:
  rng = np.random.default_rng(sum(shape) + len(shape))
  return rng.uniform(low, high, shape).astype("f4")


def _ids(*shape: int, below: int = 3) -> np.ndarray:
  return np.random.default_rng(len(shape)).integers(0, below, shape, "i4")


def _case(
  function: Callable[..., Any], *inputs: Any, shared: Sequence[int] = ()
) -> Case:
  return function, [np.asarray(x) for x in inputs], shared


def _of_model(value: np.ndarray, model: int) -> np.ndarray:
  """Returns an input of one model."""
  if value.dtype == np.bool_:
    return np.logical_xor(
      value, np.arange(value.size).reshape(value.shape) % 3 == model
    )
  if np.issubdtype(value.dtype, np.integer):
    return np.roll(value, model)
  return (value * (1 - model / 8)).astype(value.dtype)


def _with_gradients(
  function: Callable[..., Any], inputs: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Returns the outputs, and the gradients of a weighted sum of them."""
  inputs = [tf.identity(x) for x in inputs]
  floats = [x for x in inputs if x.dtype == tf.float32]
  with tf.GradientTape() as tape:
    tape.watch(floats)
    outputs = tf.nest.flatten(function(*inputs))
    loss = tf.constant(0.0)
    for y in outputs:
      if y.dtype == tf.float32:
        weights = tf.cos(tf.range(tf.size(y), dtype=tf.float32))
        loss += tf.reduce_sum(tf.reshape(y, [-1]) * weights)
  gradients = tape.gradient(loss, floats) if floats else []
  outputs += [tf.convert_to_tensor(g) for g in gradients if g is not None]
  return [
    tf.stack([tf.math.real(y), tf.math.imag(y)]) if y.dtype.is_complex else y
    for y in outputs
  ]


def _mixtures(case: Case) -> list[tuple[bool, ...]]:
  """Returns which inputs are stacked: all, all but one, or the first alone."""
  _, inputs, shared = case
  places = range(len(inputs))
  plain = [(), *((i,) for i in places), tuple(places[1:])]
  mixtures = {tuple(i not in (*p, *shared) for i in places) for p in plain}
  return sorted(mixture for mixture in mixtures if any(mixture))


def _check(cases: dict[str, Case], jit: bool = False) -> None:
  strategy = VectorizedStrategy(N)
  all_stacked = [
    testbed.per_replica(strategy, [_of_model(x, i) for i in range(N)])
    for case in cases.values()
    for x in case[1]
  ]

  def step(*given: tf.Tensor) -> dict[Any, Any]:
    remaining, results = iter(given), {}
    for name, case in cases.items():
      own = [next(remaining) for _ in case[1]]
      for mixture in _mixtures(case):
        inputs = [
          x if is_own else tf.constant(shared)
          for x, shared, is_own in zip(own, case[1], mixture, strict=True)
        ]
        results[f"{name} {mixture}"] = _with_gradients(case[0], inputs)
    return results

  got = tf.function(
    lambda x: strategy.run(step, x), autograph=False, jit_compile=jit
  )(all_stacked)
  plain = tf.function(step, autograph=False)
  failed = []
  for i in range(N):
    given = [
      tf.constant(_of_model(x, i)) for case in cases.values() for x in case[1]
    ]
    for name, wanted in plain(*given).items():
      for place, want in enumerate(wanted):
        value = strategy.experimental_local_results(got[name][place])[i]
        try:
          np.testing.assert_allclose(value, want, 2e-4, 2e-5)
        except AssertionError as error:
          failed.append(f"{name}, output {place}, model {i}: {error}")
  assert not failed, "\n".join(failed)


def _positional(operation: Any) -> Callable[..., Any]:
  """Returns a raw operation that takes its inputs by position."""

  def call(*inputs: tf.Tensor) -> Any:
    return operation(**dict(zip(_names(operation), inputs, strict=False)))

  return call


def _names(operation: Any) -> list[str]:
  return list(inspect.signature(operation).parameters)


UNARY = (
  "Abs Acos Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e"
  " BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0"
  " BesselY1 Ceil Cos Cosh Dawsn Digamma Elu Erf Erfc Erfinv Exp Expint"
  " Expm1 Floor FresnelCos FresnelSin Inv IsFinite IsInf IsNan LeakyRelu"
  " Lgamma Log Log1p Ndtri Neg OnesLike Rank Reciprocal Relu Relu6 Rint"
  " Round Rsqrt Selu Shape Sigmoid Sign Sin Sinh Size Softplus Softsign"
  " Spence Sqrt Square Tan Tanh ZerosLike Identity StopGradient"
)
BINARY = (
  "Add AddV2 Atan2 Div DivNoNan Equal FloorDiv FloorMod Greater GreaterEqual"
  " Igamma Igammac Less LessEqual Maximum Minimum MulNoNan Mul NotEqual Pow"
  " RealDiv SquaredDifference Sub Xdivy Xlog1py Xlogy Zeta"
)
INTEGERS = (
  "BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift TruncateDiv TruncateMod"
  " FloorDiv Mod Add"
)
SHAPES = [(), (2,), (3, 2), (2, 1, 3, 2)]
DEEP = (1, 2, 1, 2, 3, 2)  # Some kernels take so many axes, but not one more.


def _unary() -> dict[str, Case]:
  cases = {}
  for name in UNARY.split():
    cases[name] = _case(_positional(getattr(raw, name)), _numbers(3, 2))
  cases["Acosh"] = _case(tf.acosh, _numbers(3, 2) + 1.5)
  for shape in SHAPES:
    x = _numbers(*shape)
    cases[f"complex {shape}"] = _case(
      lambda x: (
        tf.math.conj(tf.complex(x, x * x)),
        tf.abs(tf.complex(x, 1.0 - x)),
        tf.math.angle(tf.complex(x, x * 2.0)),
      ),
      x,
    )
    cases[f"Cast {shape}"] = _case(lambda x: tf.cast(x * 9.0, tf.int32), x)
    cases[f"Bitcast {shape}"] = _case(lambda x: tf.bitcast(x, tf.int32), x)
    cases[f"Bucketize {shape}"] = _case(
      lambda x: raw.Bucketize(input=x, boundaries=[0.3, 0.6]), x
    )
    cases[f"CheckNumerics {shape}"] = _case(
      lambda x: tf.debugging.check_numerics(x, ""), x
    )
    cases[f"L2Loss {shape}"] = _case(tf.nn.l2_loss, x)
    cases[f"not {shape}"] = _case(tf.logical_not, x > 0.5)
  return cases


def _binary() -> dict[str, Case]:
  cases = {}
  pairs = [((), ()), ((3,), (2, 3)), ((2, 3), ()), ((3, 1, 2), (3, 1))]
  for name in BINARY.split():
    low = 1.2 if name == "Zeta" else 0.2
    for x, y in pairs if name in ("AddV2", "Pow") else pairs[-1:]:
      cases[f"{name} {x} {y}"] = _case(
        _positional(getattr(raw, name)),
        *(_numbers(*x, low=low, high=2.0), _numbers(*y)),
      )
  for name in INTEGERS.split():
    cases[f"{name} of integers"] = _case(
      _positional(getattr(raw, name)),
      *(_ids(2, 3, below=9), _ids(3, below=5) + 1),
    )
  for x, y in pairs:
    for name in ("LogicalAnd", "LogicalOr"):
      cases[f"{name} {x} {y}"] = _case(
        _positional(getattr(raw, name)), _numbers(*x) > 0.5, _numbers(*y) > 0.4
      )
    cases[f"SelectV2 {x} {y}"] = _case(
      tf.where, _numbers(*x) > 0.5, _numbers(*y), _numbers(*x)
    )
  for x in (), (3, 2):
    cases[f"ApproximateEqual {x}"] = _case(
      _positional(raw.ApproximateEqual), _numbers(*x), _numbers(*x)
    )
    for condition in {x, x[:1], ()}:
      cases[f"Select {condition} {x}"] = _case(
        lambda c, x, y: raw.Select(condition=c, x=x, y=y),
        *(_numbers(*condition) > 0.5, _numbers(*x), _numbers(*x) * 2),
      )
    cases[f"ClipByValue {x}"] = _case(
      lambda t, low, high: raw.ClipByValue(
        t=t, clip_value_min=low, clip_value_max=high
      ),
      *(_numbers(*x), np.float32(0.3), np.float32(0.6)),
    )
    cases[f"ClipByValue {x} by tensors"] = _case(
      lambda t, low, high: raw.ClipByValue(
        t=t, clip_value_min=low, clip_value_max=high
      ),
      *(_numbers(*x), _numbers(*x) * 0.8, _numbers(*x) * 0.9),
    )
    cases[f"AddN {x}"] = _case(
      lambda a, b, c: tf.add_n([a, b, c]), *[_numbers(*x)] * 3
    )
  cases["Cross"] = _case(tf.linalg.cross, _numbers(2, 3), _numbers(2, 3) ** 2)
  cases["Betainc"] = _case(tf.math.betainc, *[_numbers(2, 3)] * 3)
  cases["Polygamma"] = _case(
    tf.math.polygamma, np.full([2], 2.0, "f4"), _numbers(3, 2), shared=[0]
  )
  return cases


def _reductions() -> dict[str, Case]:
  cases = {}
  reductions = {
    "Sum": tf.reduce_sum,
    "Mean": tf.reduce_mean,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
    "Prod": tf.reduce_prod,
  }
  for shape in ((2,), (2, 1, 3, 2)):
    rank, x = len(shape), _numbers(*shape)
    for name, reduce in reductions.items():
      axes = [None, 0, -1, *([[0, -1]] if rank > 1 else []), []]
      for axis, keep in itertools.product(axes, [False, True]):
        cases[f"{name} {shape} {axis} {keep}"] = _case(
          lambda x, f=reduce, a=axis, k=keep: f(x, a, k), x
        )
    for axis in (0, -1):
      for name, f in (("ArgMax", tf.argmax), ("ArgMin", tf.argmin)):
        cases[f"{name} {shape} {axis}"] = _case(
          lambda x, f=f, a=axis: f(x, a), x
        )
      for exclusive, reverse in itertools.product([False, True], repeat=2):
        for f in (tf.math.cumsum, tf.math.cumprod):
          cases[f"{f.__name__} {shape} {axis} {exclusive} {reverse}"] = _case(
            lambda x, f=f, o=(axis, exclusive, reverse): f(x, *o), x
          )
      cases[f"all and any {shape} {axis}"] = _case(
        lambda x, a=axis: (tf.reduce_all(x, a), tf.reduce_any(x, a)), x > 0.5
      )
    cases[f"TopKV2 {shape}"] = _case(lambda x: tf.math.top_k(x, 2), x)
  for shape in *SHAPES[1:], DEEP[1:], DEEP:
    x = _numbers(*shape)
    if len(shape) < 6:  # TensorFlow takes five axes.
      cases[f"Softmax {shape}"] = _case(tf.nn.softmax, x)
    cases[f"LogSoftmax {shape}"] = _case(tf.nn.log_softmax, x)
  return cases


def _shapes() -> dict[str, Case]:
  cases: dict[str, Case] = {}

  def add(
    name: str, f: Callable[..., Any], *inputs: Any, **options: Any
  ) -> None:
    cases[name] = _case(f, *inputs, **options)

  for shape in *SHAPES, DEEP[1:], DEEP:
    rank, x = len(shape), _numbers(*shape)
    axes = sorted({-rank, -1, 0, rank - 1}) if rank else []
    for axis in (*axes, rank):
      add(
        f"ExpandDims {shape} {axis}", lambda x, a=axis: tf.expand_dims(x, a), x
      )
      add(
        f"Pack {shape} {axis}",
        lambda x, y, a=axis: tf.stack([x, y], a),
        *(x, x * 2),
      )
    add(f"Squeeze {shape}", tf.squeeze, x)
    add(f"Reshape {shape}", lambda x: tf.reshape(x, [-1]), x)
    add(f"Fill {shape}", lambda v, s=shape: tf.fill(s, v), np.float32(2))
    add(
      f"Fill {shape} by int64",
      lambda v, s=shape: tf.fill(tf.constant(s, tf.int64), v),
      np.float32(2),
    )
    add(
      f"BroadcastTo {shape}", lambda x, s=shape: tf.broadcast_to(x, [2, *s]), x
    )
    add(f"EnsureShape {shape}", lambda x, s=shape: tf.ensure_shape(x, s), x)
    for depth_axis in (-1, 0, rank):
      add(
        f"OneHot {shape} {depth_axis}",
        lambda i, a=depth_axis: tf.one_hot(i, 4, axis=a),
        _ids(*shape),
      )
    for axis in axes:
      add(f"Unpack {shape} {axis}", lambda x, a=axis: tf.unstack(x, axis=a), x)
      add(
        f"ConcatV2 {shape} {axis}",
        lambda x, y, a=axis: tf.concat([x, y], a),
        *(x, x * 2),
      )
      add(f"ReverseV2 {shape} {axis}", lambda x, a=axis: tf.reverse(x, [a]), x)
      add(f"Roll {shape} {axis}", lambda x, a=axis: tf.roll(x, 1, a), x)
      add(
        f"Split {shape} {axis}",
        lambda x, a=axis, n=shape[axis]: tf.split(x, n, a),
        x,
      )
      add(
        f"SplitV {shape} {axis}",
        lambda x, a=axis, n=shape[axis]: tf.split(x, [n - 1, 1], a),
        x,
      )
      if shape[axis] == 1:
        add(f"Squeeze {shape} {axis}", lambda x, a=axis: tf.squeeze(x, a), x)
    if rank:
      last_first = [rank - 1, *range(rank - 1)]
      add(f"Transpose {shape}", lambda x, o=last_first: tf.transpose(x, o), x)
      add(
        f"Transpose {shape} by negative axes",
        lambda x, r=rank: tf.stop_gradient(
          raw.Transpose(x=x, perm=list(range(-r, 0))[::-1])
        ),
        x,
      )
      add(f"Tile {shape}", lambda x, r=rank: tf.tile(x, [2] * r), x)
      pads = [[i % 2, 1] for i in range(rank)]
      add(f"Pad {shape}", lambda x, p=pads: tf.pad(x, p), x)
      add(
        f"PadV2 {shape}",
        lambda x, v, p=pads: raw.PadV2(input=x, paddings=p, constant_values=v),
        *(x, np.float32(-7)),
      )
      add(f"StridedSlice {shape}", lambda x: x[..., ::-1], x)
      add(f"StridedSlice {shape} new", lambda x: x[1:, ..., tf.newaxis], x)
      add(f"StridedSlice {shape} last", lambda x: x[..., -1], x)
      add(
        f"StridedSlice {shape} own",
        lambda x, i: x[i],
        x,
        np.int32(1) * (shape[0] > 1),
      )
      add(f"Slice {shape}", lambda x, r=rank: tf.slice(x, [0] * r, [-1] * r), x)
      add(
        f"Slice {shape} own",
        lambda x, b, r=rank: tf.slice(x, b, [1] * r),
        *(x, _ids(rank, below=1)),
      )
      if rank > 1 and shape[0] > 1:
        add(f"Roll {shape} twice", lambda x: tf.roll(x, [1, 1], [0, -1]), x)
        add(f"Roll {shape} own", lambda x, s: tf.roll(x, s, -1), x, np.int32(1))
  return cases


def _gathers() -> dict[str, Case]:
  cases: dict[str, Case] = {}
  for shape in SHAPES[1:]:
    rank, x = len(shape), _numbers(*shape)
    for axis in range(-1, rank):
      for ids in np.int32(0), _ids(2, 2, below=shape[axis]):
        cases[f"GatherV2 {shape} {axis} {ids.shape}"] = _case(
          lambda x, i, a=axis: tf.gather(x, i, axis=a), x, ids
        )
    for batch in range(1, rank):
      for axis in range(batch, rank):
        ids = _ids(*shape[:batch], 2, below=shape[axis])
        cases[f"GatherV2 {shape} {axis} of batches {batch}"] = _case(
          lambda x, i, a=axis, b=batch: tf.gather(x, i, axis=a, batch_dims=b),
          *(x, ids),
        )
    for depth in range(1, rank + 1):
      cases[f"GatherNd {shape} {depth}"] = _case(
        tf.gather_nd, x, _ids(2, depth, below=min(shape))
      )
      updates = _numbers(2, *shape[depth:])
      places = np.zeros([2, depth], "i4")
      places[0] = min(shape) - 1
      cases[f"ScatterNd {shape} {depth}"] = _case(
        lambda i, u, s=shape: tf.scatter_nd(i, u, s), places, updates
      )
      if depth == 2:
        for f in (tf.tensor_scatter_nd_add, tf.tensor_scatter_nd_max):
          cases[f"{f.__name__} {shape}"] = _case(f, x, places, updates)
  for dtype in ("i4", "i8"):
    cases[f"tensor_scatter_nd_update {dtype}"] = _case(
      tf.tensor_scatter_nd_update,
      *(_numbers(3, 2), np.array([[2], [0]], dtype), _numbers(2, 2)),
    )
  for f in (
    tf.math.unsorted_segment_sum,
    tf.math.unsorted_segment_max,
    tf.math.unsorted_segment_min,
    tf.math.unsorted_segment_prod,
  ):
    for depth in (1, 2):
      cases[f"{f.__name__} {depth}"] = _case(
        lambda x, i, f=f: f(x, i - 1, 2),
        *(_numbers(3, 2, 2), _ids(*(3, 2)[:depth])),
      )
  for weights in ("sum", "mean", "sqrt_n"):
    f = getattr(tf.sparse, f"segment_{weights}")
    for number in (None, 4):
      cases[f"SparseSegment {weights} {number}"] = _case(
        lambda x, i, s, f=f, n=number: f(x, i, s, num_segments=n),
        *(_numbers(5, 2), _ids(4, below=5), np.array([0, 0, 1, 2], "i4")),
        shared=[2],
      )
  ordered = np.sort(_numbers(2, 5), -1)
  for side in ("left", "right"):
    cases[f"searchsorted {side}"] = _case(
      lambda s, v, side=side: tf.searchsorted(s, v, side),
      *(ordered, _numbers(2, 3)),
    )
  return cases


def _matrices() -> dict[str, Case]:
  cases: dict[str, Case] = {}
  for a, b in itertools.product([False, True], repeat=2):
    x = _numbers(*((2, 3) if not a else (3, 2)))
    y = _numbers(*((3, 4) if not b else (4, 3)))
    cases[f"MatMul {a} {b}"] = _case(
      lambda x, y, a=a, b=b: tf.matmul(x, y, a, b), x, y
    )
    for left, right in (
      ((2,), (2,)),
      ((3, 2), (2,)),
      ((2, 1), (1, 3)),
      ((), (2,)),
    ):
      of_x = np.broadcast_to(x, [*left, *x.shape])
      of_y = np.broadcast_to(y, [*right, *y.shape])
      cases[f"BatchMatMulV2 {left} {right} {a} {b}"] = _case(
        lambda x, y, a=a, b=b: raw.BatchMatMulV2(x=x, y=y, adj_x=a, adj_y=b),
        *(of_x, of_y),
      )
    cases[f"BatchMatMul {a} {b}"] = _case(
      lambda x, y, a=a, b=b: raw.BatchMatMul(x=x, y=y, adj_x=a, adj_y=b),
      *(np.stack([x, x * 2]), np.stack([y, y * 3])),
    )
  equations: list[tuple[Any, ...]] = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("bij,bjk->bki", (2, 2, 3), (2, 3, 4)),
    ("...ij,jk->...ik", (2, 2, 3), (3, 4)),
    ("abcd,cde->abe", (2, 3, 2, 2), (2, 2, 3)),
    ("ii->i", (3, 3)),
    ("ij->", (2, 3)),
    ("i,j->ij", (2,), (3,)),
  ]
  for equation, *sizes in equations:
    cases[f"Einsum {equation}"] = _case(
      lambda *x, e=equation: tf.einsum(e, *x), *(_numbers(*s) for s in sizes)
    )
  for batch in ((), (2,), (2, 3)):
    m = _numbers(*batch, 3, 3) + 2 * np.eye(3, dtype="f4")
    positive = m @ np.swapaxes(m, -1, -2) + np.eye(3, dtype="f4")
    right = _numbers(*batch, 3, 2)
    cases[f"Cholesky {batch}"] = _case(tf.linalg.cholesky, positive)
    cases[f"MatrixInverse {batch}"] = _case(tf.linalg.inv, m)
    cases[f"MatrixDeterminant {batch}"] = _case(tf.linalg.det, m)
    cases[f"LogMatrixDeterminant {batch}"] = _case(tf.linalg.slogdet, m)
    cases[f"MatrixSolve {batch}"] = _case(tf.linalg.solve, m, right)
    cases[f"MatrixTriangularSolve {batch}"] = _case(
      tf.linalg.triangular_solve, m, right
    )
    cases[f"SelfAdjointEigV2 {batch}"] = _case(tf.linalg.eigvalsh, positive)
    cases[f"Qr {batch}"] = _case(lambda m: tf.abs(tf.linalg.qr(m)[1]), m)
    cases[f"MatrixBandPart {batch}"] = _case(
      lambda m: tf.linalg.band_part(m, 1, 0), m
    )
    cases[f"MatrixDiagV3 {batch}"] = _case(tf.linalg.diag, _numbers(*batch, 3))
    cases[f"MatrixDiagV3 {batch} k"] = _case(
      lambda d: tf.linalg.diag(d, k=1, padding_value=5.0), _numbers(*batch, 3)
    )
    cases[f"MatrixDiagPartV3 {batch}"] = _case(
      lambda m: (
        tf.linalg.diag_part(m),
        tf.linalg.diag_part(m, k=(-1, 1), padding_value=2.0),
      ),
      m,
    )
    cases[f"MatrixSetDiagV3 {batch}"] = _case(
      lambda m, d: tf.linalg.set_diag(m, d), m, _numbers(*batch, 3)
    )
    cases[f"MatrixDiag {batch}"] = _case(
      lambda d: raw.MatrixDiag(diagonal=d), _numbers(*batch, 3)
    )
    cases[f"MatrixDiagPart {batch}"] = _case(
      lambda m: raw.MatrixDiagPart(input=m), m
    )
    cases[f"MatrixSetDiag {batch}"] = _case(
      lambda m, d: raw.MatrixSetDiag(input=m, diagonal=d),
      *(m, _numbers(*batch, 3)),
    )
  cases["Diag"] = _case(lambda d: raw.Diag(diagonal=d), _numbers(3))
  cases["Diag of a matrix"] = _case(
    lambda d: raw.Diag(diagonal=d), _numbers(2, 3)
  )
  cases["DiagPart"] = _case(lambda m: raw.DiagPart(input=m), _numbers(3, 3))
  for name in ("fft", "ifft", "fft2d", "ifft2d"):
    transform = getattr(tf.signal, name)
    cases[name] = _case(
      lambda x, f=transform: f(tf.complex(x, x * 2)), _numbers(3, 4)
    )
  for name in ("rfft", "rfft2d"):
    cases[name] = _case(getattr(tf.signal, name), _numbers(3, 4))
    back = getattr(tf.signal, f"i{name}")
    cases[f"i{name}"] = _case(
      lambda x, f=back: f(tf.complex(x, x * 0.5)), _numbers(3, 4)
    )
  return cases


def _networks() -> dict[str, Case]:
  cases: dict[str, Case] = {}
  for shape in (3, 2), (2, 3, 2), (2, 1, 3, 2), DEEP[1:]:  # at most five axes
    for form, size in (("NHWC", shape[-1]), ("NCHW", shape[1])):
      if form == "NCHW" and len(shape) < 3:
        continue  # TensorFlow needs three axes.
      cases[f"BiasAdd {shape} {form}"] = _case(
        lambda x, b, f=form: raw.BiasAdd(value=x, bias=b, data_format=f),
        *(_numbers(*shape), _numbers(size)),
      )
      cases[f"BiasAddGrad {shape} {form}"] = _case(
        lambda x, f=form: raw.BiasAddGrad(out_backprop=x, data_format=f),
        _numbers(*shape),
      )
  logits, images = _numbers(4, 3), _numbers(2, 6, 6, 4)
  f = tf.nn.softmax_cross_entropy_with_logits
  cases["SoftmaxCrossEntropyWithLogits"] = _case(f, logits, logits**2)
  cases["SoftmaxCrossEntropyWithLogits of one row"] = _case(
    lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y),
    *(logits, logits[:1] ** 2),
  )
  cases["SparseSoftmaxCrossEntropyWithLogits"] = _case(
    lambda i, x: tf.nn.sparse_softmax_cross_entropy_with_logits(i, x),
    *(_ids(4), logits),
  )
  for padding in ("SAME", "VALID", [[0, 0], [1, 0], [0, 2], [0, 0]]):
    for step in (1, 2):
      cases[f"Conv2D {padding} {step}"] = _case(
        lambda x, w, p=padding, s=step: tf.nn.conv2d(x, w, s, p),
        *(images, _numbers(3, 2, 4, 2)),
      )
      if isinstance(padding, list):
        continue
      # Without oneDNN, TensorFlow has no gradients of it on CPUs.
      cases[f"Conv2D {padding} {step} of groups"] = _case(
        lambda x, w, p=padding, s=step: tf.stop_gradient(
          tf.nn.conv2d(x, w, s, p)
        ),
        *(images, _numbers(3, 2, 2, 4)),
      )
      cases[f"DepthwiseConv2dNative {padding} {step}"] = _case(
        lambda x, w, p=padding, s=step: tf.nn.depthwise_conv2d(
          x, w, [1, s, s, 1], p
        ),
        *(images, _numbers(3, 2, 4, 2)),
      )
      for pool in (tf.nn.max_pool2d, tf.nn.avg_pool2d):
        cases[f"{pool.__name__} {padding} {step}"] = _case(
          lambda x, f=pool, p=padding, s=step: f(x, 2, s, p), images
        )
      cubes = _numbers(1, 4, 4, 4, 2)
      for pool in (tf.nn.max_pool3d, tf.nn.avg_pool3d):
        cases[f"{pool.__name__} {padding} {step}"] = _case(
          lambda x, f=pool, p=padding, s=step: f(x, 2, s, p), cubes
        )
      cases[f"Conv3D {padding} {step}"] = _case(
        lambda x, w, p=padding, s=step: tf.nn.conv3d(x, w, [1, s, s, s, 1], p),
        *(cubes, _numbers(2, 2, 2, 2, 3)),
      )
  cases["Conv2DTranspose"] = _case(
    lambda x, w: tf.nn.conv2d_transpose(x, w, [2, 12, 12, 2], 2),
    *(images, _numbers(3, 3, 2, 4)),
  )
  for training in (False, True):
    cases[f"FusedBatchNormV3 {training}"] = _case(
      lambda x, s, o, m, v, t=training: tf.compat.v1.nn.fused_batch_norm(
        x, s, o, None if t else m, None if t else v, is_training=t
      )[:1],
      *(images, _numbers(4), _numbers(4), _numbers(4), _numbers(4)),
    )
  cases["SpaceToDepth"] = _case(lambda x: tf.nn.space_to_depth(x, 2), images)
  cases["DepthToSpace"] = _case(lambda x: tf.nn.depth_to_space(x, 2), images)
  cases["SpaceToBatchND"] = _case(
    lambda x: tf.space_to_batch(x, [2, 3], [[0, 0], [0, 0]]), images
  )
  cases["BatchToSpaceND"] = _case(
    lambda x: tf.batch_to_space(x, [2, 2], [[0, 1], [1, 0]]),
    _numbers(8, 3, 3, 2),
  )
  for f in (
    tf.image.adjust_contrast,
    tf.image.adjust_saturation,
    tf.image.adjust_hue,
  ):
    cases[f.__name__] = _case(
      lambda x, f=f: tf.stop_gradient(f(x, 0.3)), _numbers(2, 4, 4, 3)
    )
  return cases


GROUPS = {
  "elementwise": _unary,
  "of two": _binary,
  "reductions": _reductions,
  "shapes": _shapes,
  "gathers": _gathers,
  "matrices": _matrices,
  "networks": _networks,
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("part", ["some", pytest.param("others", marks=SLOW)])
def test_as_a_loop_over_models(part: str, name: str) -> None:
  """Every twentieth case is fast."""
  cases = GROUPS[name]()
  some = list(cases)[::20]
  tried = some if part == "some" else [x for x in cases if x not in some]
  for i in range(0, len(tried), 60):
    _check({x: cases[x] for x in tried[i : i + 60]})


@pytest.mark.parametrize("name", ["reductions", "matrices"])
def test_compiled_as_a_loop_over_models(name: str) -> None:
  _check(dict(list(GROUPS[name]().items())[::20]), jit=True)


@pytest.mark.parametrize("form", ["NHWC", "NCHW"])
def test_bias_gradients_of_float16_add_up(form: str) -> None:
  """A sum in float16 would stop growing at 2,048."""
  strategy = VectorizedStrategy(2)
  shape = [2, 4096, 3] if form == "NHWC" else [2, 64, 3, 64]
  ones = per_model(tf.ones(shape, tf.float16))

  @tf.function
  def step() -> Any:
    return strategy.run(
      lambda x: raw.BiasAddGrad(out_backprop=x, data_format=form), args=(ones,)
    )

  for total in strategy.experimental_local_results(step()):
    assert total.numpy().tolist() == [4096.0] * 3
