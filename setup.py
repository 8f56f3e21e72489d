"""Compiles what every request passes through in the router with mypyc; all else of the build is in pyproject.toml.

Only a wheel gets compiled modules: in an editable install they would hide the sources beside them. Where there is no
C compiler, or mypyc does not run, the wheel is plain Python, which does the same at about twice the CPU.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

COMPILED = [
    *(f"router/{name}.py" for name in ("aborts", "admission", "audit", "auth", "body", "breaker", "errors")),
    *(f"router/{name}.py" for name in ("instances", "journey", "metrics", "prefix", "prefix_index", "proxy")),
    *(f"router/{name}.py" for name in ("reschedule", "selection", "server", "splitwise", "upstream", "usage")),
    # A compiled class can only be extended by compiled ones, so the policies come all together.
    *sorted(str(path) for path in Path("router/policies").glob("*.py")),
]


def extensions() -> list[Extension]:
    """The extension modules of this build."""
    if not {"bdist_wheel", "build_ext"} & set(sys.argv):
        return []
    try:
        from mypyc.build import mypycify

        # Types are checked in scripts/check, with what is imported at hand; here that need not be installed.
        found = mypycify(
            ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", *COMPILED],
            opt_level=os.environ.get("MYPYC_OPT_LEVEL", "3"),  # as others that build with mypyc name it
        )
    except (ImportError, SystemExit) as exc:
        print(f"the router is not compiled: {exc}", file=sys.stderr)
        return []
    for extension in found:
        extension.optional = True
    return found


setup(ext_modules=extensions())
