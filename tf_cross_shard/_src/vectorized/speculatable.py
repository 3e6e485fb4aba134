"""Finds branches and loops that may run for models that are not in them.

Such an operation ends, cannot fail for any input, and has no effects on others.
The converters of variables take care of models that are not in a branch.
"""
# ruff: noqa: SLF001

from typing import Any, Final

import tensorflow as tf

from tf_cross_shard._src.vectorized import vectorizer

# pfor converts elementwise operations by one function.
_BY_ELEMENT: Final = vectorizer.pfor._pfor_converter_registry["AddV2"]
# These fail on integers: division by zero, and negative exponents.
_DIVISIONS: Final = frozenset(
  {
    *("Div", "FloorDiv", "FloorMod", "Mod", "Pow", "RealDiv", "TruncateDiv"),
    *("TruncateMod", "Inv", "Reciprocal"),
  }
)
_SPECULATABLE: Final = frozenset(
  {
    # Values and shapes.
    *("BroadcastGradientArgs", "BroadcastTo", "Cast", "ConcatOffset"),
    *("ConcatV2", "Const", "ExpandDims", "Fill", "Identity", "IdentityN"),
    *("NoOp", "OnesLike", "Pack", "Placeholder", "PlaceholderWithDefault"),
    *("PreventGradient", "Rank", "Reshape", "Shape", "ShapeN", "Size"),
    *("Squeeze", "StopGradient", "Tile", "Transpose", "Unpack", "ZerosLike"),
    # Mathematics.
    *("AddN", "All", "Any", "ArgMax", "ArgMin", "AvgPool", "AvgPoolGrad"),
    *("BatchMatMulV2", "BatchMatMulV3", "BiasAdd", "BiasAddGrad"),
    *("ClipByValue", "Conv2D", "Conv2DBackpropFilter"),
    *("Conv2DBackpropInput", "Cumsum", "Einsum", "EluGrad", "Equal"),
    *("L2Loss", "LeakyRelu", "LeakyReluGrad", "LogSoftmax", "MatMul", "Max"),
    *("MaxPool", "MaxPoolGrad", "Mean", "Min", "NotEqual", "Prod"),
    *("ReciprocalGrad", "Relu6Grad", "ReluGrad", "RsqrtGrad", "Select"),
    *("SelectV2", "SeluGrad", "SigmoidGrad", "Softmax", "SoftplusGrad"),
    *("SoftmaxCrossEntropyWithLogits", "SoftsignGrad", "SqrtGrad", "Sum"),
    *("TanhGrad", "XlaReplicaId"),
    # Random numbers.
    *("RandomStandardNormal", "RandomUniform", "RandomUniformInt"),
    *("StatelessRandomGetKeyCounter", "StatelessRandomUniformV2"),
    *("StatelessRandomNormalV2", "StatelessRandomUniform"),
    *("StatelessRandomNormal", "TruncatedNormal", "RngReadAndSkip"),
    # Variables, and what conditionals and loops keep for their gradients.
    *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
    *("OptionalFromValue", "OptionalNone", "ReadVariableOp"),
    *("TensorListPopBack", "TensorListPushBack", "VariableShape"),
    *("EmptyTensorList", "VarIsInitializedOp"),
  }
)
_FUNCTIONS: Final = ("f", "then_branch", "else_branch", "cond", "body")


def is_speculatable(graph: Any) -> bool:
  """Returns whether a graph may run for models that do not take part."""
  return all(_is_speculatable(op) for op in graph.get_operations())


def _is_speculatable(op: tf.Operation) -> bool:
  functions = [
    op.graph._get_function(op.get_attr(name).name)
    for name in _FUNCTIONS
    if name in op.node_def.attr
  ]
  if functions:
    return all(
      hasattr(function, "graph") and is_speculatable(function.graph)
      for function in functions
    )
  if op.type in _DIVISIONS:
    return not op.outputs[0].dtype.is_integer
  if op.type in ("StridedSlice", "Slice"):  # Constant bounds fit or never do.
    return all(x.op.type == "Const" for x in op.inputs[1:])
  return (
    op.type in _SPECULATABLE
    or op.type.startswith("ResourceApply")
    or (vectorizer.pfor._pfor_converter_registry.get(op.type) is _BY_ELEMENT)
  )
