"""Macros for the folders of this project: a library by glob, and its tests."""

def python_folder(name, srcs = None, deps = [], data = [], testonly = False):
    """A py_library of a folder, and the files that tests of sources read.

    Args:
      name: The name of the library; usually the folder's.
      srcs: The sources; the folder's own .py files if None.
      deps: The libraries of other folders.
      data: Other files that the sources read when they run.
      testonly: Whether only tests may use it.
    """
    if srcs == None:
        srcs = native.glob(["*.py"], exclude = ["*_test.py"])
    native.py_library(
        name = name,
        srcs = srcs,
        data = data,
        testonly = testonly,
        visibility = ["//visibility:public"],
        deps = deps,
    )
    native.filegroup(
        name = "sources",
        srcs = native.glob(["**/*"], exclude = ["**/*.pyc"]),
        visibility = ["//visibility:public"],
    )

def python_tests(srcs, main, data = [], deps = [], large = [], slow = []):
    """A py_test for each test file; its name is the path without `.py`.

    Args:
      srcs: The test files.
      main: The program that runs a test file, which is its argument.
      data: Files that every test may read.
      deps: Libraries that every test may import.
      large: The files that take minutes.
      slow: The files that get the tag `slow`.
    """
    for src in srcs:
        native.py_test(
            name = src[:-len(".py")],
            size = "large" if src in large else "medium",
            srcs = [src, main],
            args = ["$(location %s)" % src],
            data = data + [src],
            main = main,
            tags = ["slow"] if src in slow else [],
            deps = deps,
        )
