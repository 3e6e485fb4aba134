"""What Bazel would otherwise download, made from what is on this machine."""

def _text_files_impl(ctx):
    for path, text in ctx.attr.files.items():
        ctx.file(path, text)

_text_files = repository_rule(
    implementation = _text_files_impl,
    attrs = {"files": attr.string_dict()},
)

def _natives(names):
    return "".join(["{0} = native.{0}\n".format(name) for name in names])

def offline_repositories():
    """Stands in for the rule sets that @bazel_tools loads.

    Up to Bazel 4 those rules are also built in, as natives; the repositories
    only give them their newer names.
    """
    _text_files(
        name = "rules_cc",
        files = {
            "cc/BUILD": "",
            "cc/defs.bzl": _natives([
                "cc_binary",
                "cc_library",
                "cc_test",
                "cc_toolchain",
                "cc_toolchain_suite",
            ]),
        },
    )
    _text_files(
        name = "rules_java",
        files = {
            "java/BUILD": "",
            "java/defs.bzl": _natives([
                "java_import",
                "java_runtime",
                "java_toolchain",
            ]),
        },
    )

_PYTHON_BUILD = """\
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

py_runtime(
    name = "python3",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "python",
    py3_runtime = ":python3",
)

toolchain(
    name = "toolchain",
    toolchain = ":python",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
    visibility = ["//visibility:public"],
)
"""

def _venv_python_impl(ctx):
    # Not resolved: only by its path in .venv does Python know whose it is.
    project = ctx.path(Label("//:WORKSPACE")).dirname
    python = project.get_child(".venv").get_child("bin").get_child("python")
    if not python.exists:
        fail("There is no {}: run `bash tools/test.sh` once.".format(python))
    ctx.file("BUILD", _PYTHON_BUILD.format(python = python))

venv_python = repository_rule(
    doc = "A Python toolchain: the interpreter of the project's .venv.",
    implementation = _venv_python_impl,
    local = True,
    configure = True,
)
