"""How the overlay gets in, and when it stays out.

Most tests run ``thunder_overlay.py`` in a process of its own, over a stock ``thunder`` of a few lines. The tests of the
installation make a virtual environment, build this distribution without a network and import the real thunder.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import thunder
import thunder.core.jit_ext as jit_ext
import thunder.torch.default_torch_ops as default_torch_ops
import thunder_overlay

CHECKOUT = Path(__file__).resolve().parents[2]
INSTALLED = Path(thunder.__file__).parent
TREE = Path(thunder_overlay.tree())
VARIABLE = thunder_overlay.VARIABLE
OFF = ("0", "off", "False")
REMOVED_FROM_TORCH = ("align_as", "align_to", "has_names", "refine_names", "rename")

STOCK = {
    "__about__.py": "__version__ = '0.2.6'",
    "__init__.py": "name = 'stock'",
    "core/__init__.py": "",
    "core/interpreter.py": "",
    "core/jit_ext.py": "value = 'stock'\ndef read():\n    return value\n",
}
OVERLAY = {
    "__overlay__.py": "name += ' and overlay'",
    "core/jit_ext.py": "import thunder_overlay\nthunder_overlay.execute_installed(globals())\nvalue = 'overlay'\n",
    "nested/__init__.py": "",
}
# what the tests with the stock thunder of a few lines begin with
REGISTER = """
import importlib, importlib.util, sys
import thunder_overlay
thunder_overlay.TESTED_HASH = {hash!r}
thunder_overlay.install()
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    """Writes files by relative path; gives the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs a command in an environment without settings for Python, pip and the overlay."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "COV_", "THUNDER_"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def output(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints; it must succeed."""
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Small:
    """A stock ``thunder`` of a few lines, and an overlay of it laid out as the wheel lays it out."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.stock = write(folder / "stock" / "thunder", STOCK)
        self.hook = folder / "hook"
        source = Path(thunder_overlay.__file__).read_text()
        write(self.hook, {"thunder_overlay.py": source})
        self.overlay = write(self.hook / "thunder_overlay_files", OVERLAY)
        self.path = [self.hook, self.stock.parent]
        self.hash = thunder_overlay.definitions_hash(str(self.stock))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Runs Python without the ``.pth`` files of the environment that the tests run in (``-S``)."""
        path = os.pathsep.join(map(str, self.path))
        return run(sys.executable, "-S", *arguments, cwd=self.folder, PYTHONPATH=path, **environment)

    def python(self, code: str, **environment: str) -> subprocess.CompletedProcess:
        """Registers the overlay and runs the code, which must succeed."""
        done = self.run("-c", REGISTER.format(hash=self.hash) + textwrap.dedent(code), **environment)
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return Small(tmp_path)


#
# The hook
#

PRINT_ALL = """
import thunder
from thunder.core import jit_ext
print(thunder.name, jit_ext.value, jit_ext.read(), sep=", ")
"""
STOCK_ALL, PATCHED_ALL = "stock, stock, stock\n", "stock and overlay, overlay, overlay\n"


def test_installed_source_sees_what_the_overlay_defines(small):
    assert small.python(PRINT_ALL).stdout == PATCHED_ALL


def test_new_module(small):
    assert small.python("import thunder.nested; print(thunder.nested.__file__)").stdout.startswith(str(small.overlay))


def test_reload(small):
    code = "import thunder, thunder.core.jit_ext; importlib.reload(thunder); importlib.reload(thunder.core.jit_ext)"
    assert small.python(code + PRINT_ALL).stdout == PATCHED_ALL


def test_installing_twice_registers_once(small):
    code = """
    finders = list(sys.meta_path)
    thunder_overlay.install()
    assert sys.meta_path == finders
    """
    small.python(code)


def test_hook_imports_nothing_but_os_and_sys(small):
    code = """
    import os, sys
    before = set(sys.modules)
    import thunder_overlay
    thunder_overlay.install()
    print(set(sys.modules) - before)
    """
    assert small.run("-c", textwrap.dedent(code)).stdout == "{'thunder_overlay'}\n"


def test_threads(small):
    (small.stock / "__init__.py").write_text("import time\ntime.sleep(0.1)\nname = 'stock'\n")
    code = """
    import threading
    seen = []
    def target():
        import thunder.core.jit_ext
        seen.append((thunder.name, thunder.core.jit_ext.read()))
    threads = [threading.Thread(target=target) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(seen), *set(seen))
    """
    assert small.python(code).stdout == "8 ('stock and overlay', 'overlay')\n"


@pytest.mark.parametrize("value", OFF)
def test_variable_turns_it_off(small, value):
    assert small.python(PRINT_ALL, **{VARIABLE: value}).stdout == STOCK_ALL


def test_execute_installed_without_an_installed_module(small):
    # the overlay's own file lies in the package's path, too, and must not be taken for the installed one
    write(small.overlay, {"core/gone.py": "import thunder_overlay\nthunder_overlay.execute_installed(globals())\n"})
    code = """
    try:
        import thunder.core.gone
    except ImportError as error:
        print(error.name, error, sep=": ")
    """
    expected = "thunder.core.gone: lightning-thunder has no module thunder.core.gone; is the installation complete?\n"
    assert small.python(code).stdout == expected


def test_execute_installed_with_a_transform(small):
    source = """
    import ast, thunder_overlay
    def transform(tree):
        return ast.parse(ast.unparse(tree).replace("stock", "transformed"))
    thunder_overlay.execute_installed(globals(), transform)
    """
    write(small.overlay, {"core/jit_ext.py": textwrap.dedent(source)})
    assert small.python(PRINT_ALL).stdout == "stock and overlay, transformed, transformed\n"


#
# Where thunder lies
#


def test_other_finders_are_asked(small):
    """As for an editable thunder, whose finder comes after Python's, which finds but a folder of that name."""
    write(small.folder / "checkout" / "thunder" / "docs", {"index.md": ""})
    small.path = [small.hook, small.folder / "checkout"]
    code = f"""
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "thunder":
                folder = {str(small.stock)!r}
                return importlib.util.spec_from_file_location(
                    name, folder + "/__init__.py", submodule_search_locations=[folder]
                )
    sys.meta_path.append(Finder())
    """
    assert small.python(textwrap.dedent(code) + PRINT_ALL).stdout == PATCHED_ALL


def test_another_finder_goes_before_the_path(small):
    elsewhere = write(small.folder / "elsewhere" / "thunder", STOCK | {"__init__.py": "name = 'elsewhere'"})
    code = f"""
    from importlib.machinery import PathFinder
    class Finder:
        def find_spec(self, name, path=None, target=None):
            return PathFinder.find_spec(name, [{str(elsewhere.parent)!r}]) if name == "thunder" else None
    sys.meta_path.insert(1, Finder())
    """
    expected = PATCHED_ALL.replace("stock", "elsewhere")
    assert small.python(textwrap.dedent(code) + PRINT_ALL).stdout == expected


@pytest.mark.parametrize("position", [0, 1])
def test_import_hook_that_asks_all_finders(small, position):
    code = f"""
    class Hook:
        busy = False
        def find_spec(self, name, path=None, target=None):
            if self.busy or name != "thunder":
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False
    sys.meta_path.insert({position}, Hook())
    """
    assert small.python(textwrap.dedent(code) + PRINT_ALL).stdout == PATCHED_ALL


def test_thunder_is_not_installed(small):
    small.path = [small.hook]
    done = small.run("-c", REGISTER.format(hash=small.hash) + "import thunder")
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'thunder'\n")


@pytest.mark.parametrize("file", ["thunder/__init__.py", "thunder.py"])
def test_thunder_is_something_else(small, file):
    write(small.folder / "else", {file: "name = 'else'"})
    small.path = [small.hook, small.folder / "else"]
    done = small.python("import thunder; print(thunder.name, thunder_overlay.status())")
    assert done.stdout == f"else skipped ({small.folder / 'else' / file} is not lightning-thunder)\n"
    assert done.stderr == ""


#
# Which thunder
#

MISMATCHES = {
    "version": ({"__about__.py": "__version__ = '0.2.9'"}, "the installed lightning-thunder is 0.2.9, tested is 0.2.6"),
    "no version": ({"__about__.py": ""}, "the installed lightning-thunder is unknown, tested is 0.2.6"),
    "definition": (
        {"core/jit_ext.py": STOCK["core/jit_ext.py"] + "def unpack_inputs():\n    pass\n"},
        "the installed lightning-thunder says it is 0.2.6, but the definitions that the patch builds on differ from "
        "the tested 0.2.6 (hash ",
    ),
}


@pytest.fixture(params=MISMATCHES)
def mismatch(small, request) -> str:
    """Makes the stock thunder one that was not tested; gives the reason."""
    files, reason = MISMATCHES[request.param]
    write(small.stock, files)
    return reason


def test_stands_aside_with_one_warning(small, mismatch):
    again = "del sys.modules['thunder']; import thunder; print(thunder_overlay.status())"
    program = write(small.folder, {"program.py": REGISTER.format(hash=small.hash) + PRINT_ALL + again})
    done = small.run("-W", "always", str(program / "program.py"))
    stock, status = done.stdout.splitlines()
    assert stock + "\n" == STOCK_ALL
    assert status.startswith(f"skipped ({mismatch}")
    # the warning is that of the line that imports thunder
    location, _, warning = done.stderr.partition(": RuntimeWarning: ")
    assert Path(location.rpartition(":")[0]).name == "program.py"
    assert warning.startswith(f"lightning-thunder-nested-jit stands aside: {mismatch}")
    assert f"Install lightning-thunder 0.2.6, or set {VARIABLE}=force to apply the patch all the same." in warning
    assert "RuntimeWarning" not in warning


def test_force(small, mismatch):
    done = small.python(PRINT_ALL, **{VARIABLE: "force"})
    assert (done.stdout, done.stderr) == (PATCHED_ALL, "")


def test_a_file_that_is_not_there_is_a_difference(small):
    (small.stock / "core" / "interpreter.py").unlink()
    assert thunder_overlay.definitions_hash(str(small.stock)) == small.hash  # all were absent before
    (small.stock / "core" / "interpreter.py").write_text("def wrap():\n    pass\n")
    assert thunder_overlay.definitions_hash(str(small.stock)) != small.hash


def blocks(file: str) -> dict[str, list[str]]:
    """The definitions in a file of the installed thunder, as the hash sees them."""
    return thunder_overlay._top_level_blocks((INSTALLED / file).read_text(encoding="utf-8").splitlines())


def test_installed_thunder_is_a_tested_one():
    for file, names in thunder_overlay.TESTED_DEFINITIONS.items():
        assert set(names) <= blocks(file).keys()
    assert thunder_overlay.definitions_hash(str(INSTALLED)) == thunder_overlay.TESTED_HASH
    assert thunder_overlay._mismatch(str(INSTALLED)) is None


def replaced(file: Path) -> set[str]:
    """The names that a file defines at its top level, or changes or sets an attribute of."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                names.add(ast.unparse(target).partition(".")[0])
    return names


def private_imports(file: Path) -> set[str]:
    """The private names of the interpreter and of ``jit_ext`` that a file imports."""
    imports = (
        node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    )
    modules = ("thunder.core.interpreter", "thunder.core.jit_ext")
    return {a.name for node in imports if node.module in modules for a in node.names if a.name.startswith("_")}


def test_what_the_patch_builds_on_is_in_the_hash():
    tested = thunder_overlay.TESTED_DEFINITIONS
    missing = set(jit_ext._installed).union(*map(private_imports, TREE.rglob("*.py")))
    missing -= {name for names in tested.values() for name in names}
    for file in TREE.rglob("*.py"):
        name = file.relative_to(TREE).as_posix().replace("__overlay__", "__init__")
        if (INSTALLED / name).is_file():
            missing |= {(name, n) for n in (replaced(file) & blocks(name).keys()) - set(tested.get(name, ()))}
    assert not missing, "add these to TESTED_DEFINITIONS, and set TESTED_HASH to definitions_hash(...)"


#
# What it says
#


def test_status_off(small):
    assert small.run("-m", "thunder_overlay").stdout == "off (the .pth file did not run)\n"
    assert small.run("-m", "thunder_overlay", **{VARIABLE: "0"}).stdout == f"off ({VARIABLE}=0)\n"


def test_status_is_applied_when_it_has_been(small):
    code = """
    print(thunder_overlay.status())
    importlib.util.find_spec("thunder")
    print(thunder_overlay.status().partition(" ")[0])
    import thunder.core.jit_ext, thunder.nested
    print(thunder_overlay.status())
    """
    assert small.python(code).stdout.splitlines() == [
        "registered (waiting for the first import of thunder)",
        "registered",
        f"applied (to {small.stock}): thunder, thunder.core.jit_ext, thunder.nested",
    ]


def test_status_when_thunder_came_first(small):
    code = f"import thunder\n{REGISTER.format(hash=small.hash)}\nprint(thunder_overlay.status())\n{PRINT_ALL}"
    assert small.run("-c", code).stdout == (
        "skipped (thunder was imported before the overlay was registered, or by a finder in front of it)\n" + STOCK_ALL
    )


def test_status_of_this_process():
    state, _, modules = thunder_overlay.status().rpartition(": ")
    assert state == f"applied (to {INSTALLED})"
    assert {"thunder", "thunder.core.jit_ext", "thunder.torch.default_torch_ops"} <= set(modules.split(", "))


#
# The real thunder
#


def test_table_of_torch_operators_has_what_torch_has():
    table = default_torch_ops.torch_auto_registered_ops[torch.Tensor]
    names = {operator.__name__ for operator in table}
    assert {name for name in REMOVED_FROM_TORCH if name in names} == {
        name for name in REMOVED_FROM_TORCH if hasattr(torch.Tensor, name)
    }
    assert "swapdims" in names


def test_nothing_is_added_to_torch(tmp_path):
    code = """
    import torch
    before = set(dir(torch.Tensor))
    import thunder
    print(set(dir(torch.Tensor)) - before)
    """
    assert output(sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), cwd=tmp_path) == "set()\n"


def test_nothing_is_copied():
    def runs(file: Path) -> set[tuple[str, ...]]:
        """Each six lines in a row that say something: no blanks, brackets, comments and imports."""
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if len(line) > 8 and not line.startswith(("#", "import ", "from "))]
        return {tuple(lines[i : i + 6]) for i in range(len(lines) - 5)}

    installed = set().union(*map(runs, INSTALLED.rglob("*.py")))
    ours = [Path(thunder_overlay.__file__), *TREE.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    assert len(installed) > 10_000 and len(ours) > 5
    assert {file: runs(file) & installed for file in ours if runs(file) & installed} == {}


#
# The installation
#

needs_checkout = pytest.mark.skipif(
    not (CHECKOUT / "pyproject.toml").is_file() or not all(map(find_spec, ("pip", "hatchling", "editables"))),
    reason="needs a checkout, pip and the test extra",
)


class Environment:
    """A virtual environment in which the packages of this one can be imported, but whose ``.pth`` files do not run."""

    def __init__(self, folder: Path):
        self.folder = folder
        venv.create(folder / "venv", symlinks=os.name != "nt")
        self.python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        self.site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        packages = {Path(find_spec(name).origin).parents[1] for name in ("torch", "thunder", "pip", "hatchling")}
        (self.site / "zz_outer.pth").write_text("\n".join(map(str, packages)))
        self.before = self.files()

    def files(self) -> set[Path]:
        """Everything in the environment's own site-packages."""
        return set(self.site.rglob("*"))

    def install(self, *what: str | Path) -> None:
        """Builds with the packages of the outer environment, so without a network; that one's overlay is ignored."""
        self.run("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--ignore-installed", *what)

    def run(self, *arguments: str | Path, **environment: str) -> str:
        """What the environment's Python prints."""
        return output(self.python, *arguments, cwd=self.folder, **environment)

    def finders(self, *options: str, **environment: str) -> int:
        """How many overlays a new process has registered."""
        code = "import sys; print([type(f).__name__ for f in sys.meta_path].count('Overlay'))"
        return int(self.run(*options, "-c", code, **environment))


def distribution(kind: str) -> Callable[[Path], tuple[str | Path, ...]]:
    """Builds a wheel or a source distribution in a folder, and gives what to pass to ``pip install``."""

    def build(folder: Path) -> tuple[str | Path, ...]:
        output(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder / "dist", cwd=CHECKOUT)
        return tuple((folder / "dist").iterdir())

    return build


SOURCES = {
    "folder": lambda folder: (CHECKOUT,),
    "editable": lambda folder: ("-e", CHECKOUT),
    "wheel": distribution("wheel"),
    "sdist": distribution("sdist"),
}


@needs_checkout
@pytest.mark.parametrize("source", SOURCES)
def test_install_and_uninstall(source, tmp_path):
    environment = Environment(tmp_path)
    environment.install(*SOURCES[source](tmp_path))
    tree = CHECKOUT / "thunder" if source == "editable" else environment.site / "thunder_overlay_files"

    registered, applied = environment.run("-W", "ignore", "-m", "thunder_overlay").splitlines()
    assert registered == "registered (waiting for the first import of thunder)"
    assert applied.startswith(f"applied (to {INSTALLED}): thunder, thunder.core.interpreter, thunder.core.jit_ext, ")
    assert Path(environment.run("-c", "import thunder_overlay as o; print(o.tree())").strip()) == tree

    environment.run("-m", "pip", "uninstall", "-y", "lightning-thunder-nested-jit")
    assert environment.files() == environment.before
    code = "from importlib.util import find_spec; s = find_spec('thunder'); print(type(s.loader).__name__, s.origin)"
    assert environment.run("-c", code) == f"SourceFileLoader {INSTALLED / '__init__.py'}\n"
    assert environment.finders() == 0


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Iterator[Environment]:
    """An environment in which the folder is installed, not editable."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.install(CHECKOUT)
    yield environment


@needs_checkout
def test_start_of_the_interpreter(environment):
    """The hook is registered once (a virtual environment runs a ``.pth`` file twice), and only it is imported."""
    assert environment.finders() == 1
    code = "import sys; print(*sorted(sys.modules))"
    on, off = (set(environment.run("-c", code, **{VARIABLE: value}).split()) for value in ("1", "0"))
    assert on - off == {"thunder_overlay"}
    assert off - on == set()


@needs_checkout
@pytest.mark.parametrize("option, expected", [("-I", 1), ("-E", 1), ("-s", 1), ("-P", 1), ("-S", 0)])
def test_options_of_the_interpreter(environment, option, expected):
    if option == "-P" and sys.version_info < (3, 11):
        pytest.skip("new in Python 3.11")
    assert environment.finders(option) == expected


@needs_checkout
@pytest.mark.parametrize("value", OFF)
def test_variable_turns_the_installed_one_off(environment, value):
    assert environment.finders(**{VARIABLE: value}) == 0
    assert environment.run("-m", "thunder_overlay", **{VARIABLE: value}) == f"off ({VARIABLE}={value})\n"


@needs_checkout
def test_installed_one_stands_aside(environment, small):
    done = run(environment.python, "-m", "thunder_overlay", cwd=small.folder, PYTHONPATH=str(small.stock.parent))
    registered, skipped = done.stdout.splitlines()
    assert registered.startswith("registered (")
    assert skipped.startswith("skipped (the installed lightning-thunder says it is 0.2.6, but the definitions")
    assert done.stderr.count("RuntimeWarning") == 1
