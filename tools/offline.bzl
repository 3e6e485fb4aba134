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
