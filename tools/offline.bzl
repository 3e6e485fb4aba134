"""Stands in for the rules that @bazel_tools would download.

Up to Bazel 4 they are also built in, as natives, and only their names are new.
"""

def _rules_impl(ctx):
    ctx.file(ctx.attr.folder + "/BUILD")
    names = ["{0} = native.{0}\n".format(rule) for rule in ctx.attr.rules]
    ctx.file(ctx.attr.folder + "/defs.bzl", "".join(names))

_rules = repository_rule(
    implementation = _rules_impl,
    attrs = {"folder": attr.string(), "rules": attr.string_list()},
)

def offline_repositories():
    """Makes the repositories rules_cc and rules_java."""
    cc = ["binary", "library", "test", "toolchain", "toolchain_suite"]
    java = ["import", "runtime", "toolchain"]
    _rules(name = "rules_cc", folder = "cc", rules = ["cc_" + x for x in cc])
    _rules(name = "rules_java", folder = "java", rules = ["java_" + x for x in java])
