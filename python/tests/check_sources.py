"""What can be said of the Python module without building it: run by ctest with any Python, no package needed.

Syntax of every file for the oldest Python that pyproject.toml allows; that CMake builds every source file; that the
version is there where pyproject.toml looks for it; that names which C++ defines and Python repeats are the same.
"""

import ast
import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parents[2]
project = (root / "pyproject.toml").read_text()
faults = []


def check(holds, what):
    if not holds:
        faults.append(what)


oldest = tuple(map(int, re.search(r'requires-python = ">=(\d+)\.(\d+)"', project).groups()))
for file in sorted(root.glob("python/**/*.py")):
    try:
        ast.parse(file.read_text(), feature_version=oldest)
    except SyntaxError as error:
        faults.append(f"{file.relative_to(root)}:{error.lineno}: {error.msg}")

built = (root / "python/CMakeLists.txt").read_text()
for file in root.glob("python/src/*.cpp"):
    check(file.name in built, f"python/CMakeLists.txt does not build {file.name}")

pattern = re.search(r"regex = '(.*)'", project)[1]
check(re.search(pattern, (root / "CMakeLists.txt").read_text()), "pyproject.toml: no version in CMakeLists.txt")
for path in re.findall(r'wheel.packages = \["(.*)"\]', project):
    check((root / path / "__init__.py").is_file(), f"pyproject.toml: no package {path}")

roles = re.findall(r"case PlaneRole::\w+:\s*return \"(\w+)\"|\{PlaneRole::\w+, \"(\w+)\"\}", (root / "src/formats/packed.cpp").read_text())
names = [next(filter(None, pair)) for pair in roles]
planes = re.search(r'plane_names = r"(.*)"', (root / "python/w4q/_checkpoint.py").read_text())[1]
check(len(names) > 5, "src/formats/packed.cpp: no names of planes found")
for name in names:
    check(re.search(planes, f"model.layers.0.mlp.up_proj.0.{name}"), f"_checkpoint.py does not know the plane {name}")

sys.exit("\n".join(faults) or 0)
