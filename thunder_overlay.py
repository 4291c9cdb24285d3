# Copyright the lightning-thunder-nested-jit authors. Licensed under the Apache License, Version 2.0.
"""Puts this repository's files in the place of lightning-thunder's, or beside them, at import time.

A file ``thunder/a/b.py`` of the overlay stands in for the installed module ``thunder.a.b``; where none is
installed it is a new module. ``thunder/a/__overlay__.py`` runs after the installed ``thunder/a/__init__.py`` in
the same namespace (an ``__init__.py`` would hide the installed package from a Python that runs in this folder).
A file that stands in for an installed one begins with :func:`execute_installed` and then defines what differs,
so nothing of lightning-thunder is copied and nothing of it is written to.

The environment variable ``THUNDER_NESTED_JIT`` controls it: ``0`` turns it off, ``force`` applies it to a
lightning-thunder that was not tested. ``python -m thunder_overlay`` prints its state.

This module is imported at every start of the interpreter, by the ``.pth`` file of the distribution. It therefore
imports nothing but ``os`` and ``sys`` until ``thunder`` is imported.
"""

import os
import sys

VARIABLE = "THUNDER_NESTED_JIT"
TESTED_VERSIONS = ("0.2.6",)

# The definitions that the overlay builds on, by installed file, and the hash of their source in a tested version.
# A nightly build has the version of the release before it, so the version alone does not tell.
TESTED_DEFINITIONS = {
    "__init__.py": ("jit", "CacheEntry"),
    "core/interpreter.py": (
        "InterpreterFrame",
        "InterpreterRuntimeCtx",
        "MutMappingWrapperMethods",
        "ProvenanceRecord",
        "WrappedValue",
        "_interpret_call",
        "_interpreterruntimectx",
        "_setattr_lookaside",
        "_setup_frame_and_run_python_function",
        "globals_lookup",
        "interpret",
        "interpreter_needs_wrap",
        "make_generator",
        "populate_attribute_wrapper",
        "populate_single_dict_item_wrapper",
        "wrap",
        "wrap_attribute",
    ),
    "core/jit_ext.py": (
        "JitCtx",
        "_apply_trace_proxy_rename",
        "_general_jit_lookaside_map",
        "_general_jit_lookaside_map[hasattr]",
        "_general_jit_object_setattr_lookaside",
        "_general_jit_setattr_lookaside",
        "_general_jit_sharp_edge",
        "_general_jit_store_deref_callback",
        "_general_jit_wrap_callback",
        "_infer_name_postfix_from_provenance",
        "_maybe_update_proxy_name",
        "_raw_object_setattr",
        "bind_inputs",
        "build_value_from_wrapped",
        "general_jit_callbacks",
        "general_jit_lookaside",
        "get_parameter_or_buffer_or_submodule_name_and_root",
        "process_recorded_modifications",
        "propagate_constraints",
        "should_register_for_prologue",
        "thunder_general_jit",
        "unpack_inputs",
    ),
    "core/pytree.py": ("_maybe_register_dataclass", "tree_flatten", "tree_flatten_with_dataclass"),
    "core/symbol.py": ("BoundSymbol", "Symbol", "gather_tags", "has_tags"),
    "core/transforms.py": ("sum_to",),
    "core/utils.py": ("ProxyDict", "safe_map_flat"),
}
TESTED_HASH = "9c6b5066cab0d42a"


def tree() -> str:
    """The folder of the overlay's files: beside this file in a checkout, packed by the wheel elsewhere."""
    here = os.path.dirname(os.path.abspath(__file__))
    packed = os.path.join(here, "thunder_overlay_files")
    return packed if os.path.isdir(packed) else os.path.join(here, "thunder")


def definitions_hash(package: str) -> str:
    """The hash of the definitions in :data:`TESTED_DEFINITIONS`, read from the lightning-thunder at ``package``."""
    import hashlib

    digest = hashlib.sha256()
    for file, names in sorted(TESTED_DEFINITIONS.items()):
        blocks = _top_level_blocks(_read(os.path.join(package, *file.split("/"))).splitlines())
        for name in names:
            digest.update("\n".join(blocks.get(name, ("absent " + name,))).encode())
    return digest.hexdigest()[:16]


def _read(file: str) -> str:
    """The text of a file, or nothing: a file that another version lacks is a difference and no error."""
    if not os.path.isfile(file):
        return ""
    with open(file, encoding="utf-8") as source:
        return source.read()


def _top_level_blocks(lines: list) -> dict:
    """Source lines by name of each top-level ``def``, ``class`` or assignment (faster than a parse of the file)."""
    blocks, block = {}, []
    for line in lines:
        if line and line[0] not in " \t)]}#":
            words = line.replace("(", " ").replace(":", " ").split()
            name = words[1] if words[0] in ("def", "class") and len(words) > 1 else words[0]
            block = blocks[name] = []
        block.append(line.rstrip())
    return blocks


class _AfterInstalled:
    """A loader that runs an overlay file after the installed package's own code, in the same namespace."""

    def __init__(self, installed, file: str, overlay: "Overlay"):
        self._installed, self._file, self._overlay = installed, file, overlay

    def __getattr__(self, name):
        return getattr(self._installed, name)

    def create_module(self, spec):
        return self._installed.create_module(spec)

    def exec_module(self, module):
        from importlib.machinery import SourceFileLoader

        # only now: the finder is also asked by code that wants to know where thunder lies and does not import it
        self._overlay.state = "applied"
        self._installed.exec_module(module)
        exec(SourceFileLoader(module.__name__, self._file).get_code(module.__name__), module.__dict__)


class Overlay:
    """The meta path finder. ``state`` is ``registered``, ``skipped`` or ``applied``; ``reason`` says why."""

    def __init__(self, force: bool = False):
        self.force = force
        self.state = "registered"
        self.reason = "waiting for the first import of thunder"
        self._searching = set()

    def find_spec(self, fullname, path=None, target=None):
        applies = fullname == "thunder" or (self.state == "applied" and fullname.startswith("thunder."))
        # import hooks (those of wrapt, for one) ask all finders anew, this one too: one layer of overlay is enough
        if not applies or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            return self._find_package(path, target) if fullname == "thunder" else self._find(fullname, path, target)
        finally:
            self._searching.discard(fullname)

    def _find_package(self, path, target):
        spec = self.installed_spec("thunder", path, target)
        if spec is None or not spec.origin:
            return None  # not installed; Python's own error tells that best
        package = os.path.dirname(spec.origin)
        if not spec.submodule_search_locations or not os.path.isfile(os.path.join(package, "core", "jit_ext.py")):
            self.state, self.reason = "skipped", f"{spec.origin} is not lightning-thunder"
            return None
        mismatch = None if self.force else _mismatch(package)
        if mismatch is not None:
            self._stand_aside(mismatch)
            return None
        self.reason = f"to {package}"
        return self._extend(spec, tree())

    def _stand_aside(self, mismatch: str):
        warned = (self.state, self.reason) == ("skipped", mismatch)
        self.state, self.reason = "skipped", mismatch
        if not warned:
            import warnings

            warnings.warn(
                f"lightning-thunder-nested-jit stands aside: {mismatch}. The installed thunder is left as it is. "
                f"Install lightning-thunder {' or '.join(TESTED_VERSIONS)}, or set {VARIABLE}=force to apply the patch "
                f"all the same.",
                RuntimeWarning,
                stacklevel=4,  # the line that imports thunder; warnings do not count the frames of importlib
            )

    def _find(self, fullname, path, target):
        file = os.path.join(tree(), *fullname.split(".")[1:])
        if os.path.isfile(file + ".py"):
            from importlib.util import spec_from_file_location

            return spec_from_file_location(fullname, file + ".py")
        if os.path.isdir(file):
            spec = self.installed_spec(fullname, path, target)
            return self._extend(spec, file) if spec is not None else None  # a new package: found in the parent's path
        return None

    def _extend(self, spec, folder: str):
        """Lets the package find the overlay's new modules, and runs the folder's ``__overlay__.py`` after it."""
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations = [*spec.submodule_search_locations, folder]
        file = os.path.join(folder, "__overlay__.py")
        if os.path.isfile(file):
            spec.loader = _AfterInstalled(spec.loader, file, self)
        return spec

    def installed_spec(self, fullname, path, target=None):
        """What the other finders say: an editable checkout of thunder may have one of its own, after Python's."""
        if path is not None:
            path = [entry for entry in path if not _is_ours(entry)]
        found = None
        for finder in tuple(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if find_spec is None or isinstance(finder, Overlay):
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None and spec.origin:
                return spec
            # a mere folder named thunder, such as the overlay's own in a checkout: a later finder may know better
            found = found or spec
        return found

    def modules(self) -> list:
        """The names of the imported modules that are the overlay's, wholly or in part."""
        specs = {name: getattr(module, "__spec__", None) for name, module in tuple(sys.modules.items())}
        return sorted(
            name
            for name, spec in specs.items()
            if name.partition(".")[0] == "thunder"
            and spec is not None
            and (isinstance(spec.loader, _AfterInstalled) or _is_ours(spec.origin or ""))
        )


def _is_ours(file: str) -> bool:
    return file == tree() or file.startswith(tree() + os.sep)


def _mismatch(package: str):
    """Why the lightning-thunder at ``package`` is not one that was tested, or None."""
    namespace = {}
    exec(_read(os.path.join(package, "__about__.py")), namespace)
    version = namespace.get("__version__", "unknown")
    tested = ", ".join(TESTED_VERSIONS)
    if version not in TESTED_VERSIONS:
        return f"the installed lightning-thunder is {version}, tested is {tested}"
    found = definitions_hash(package)
    if found != TESTED_HASH:
        return (
            f"the installed lightning-thunder says it is {version}, but the definitions that the patch builds on "
            f"differ from the tested {tested} (hash {found}, tested {TESTED_HASH})"
        )
    return None


def execute_installed(namespace: dict, transform=None) -> None:
    """Runs the installed source of the module whose namespace is given, in that namespace.

    Args:
        namespace: the ``globals()`` of the overlay file that stands in for an installed module.
        transform: optionally, a function from the installed module's ``ast.Module`` to the one to run.

    Raises:
        ImportError: there is no installed module of that name.
    """
    name = namespace["__name__"]
    spec = Overlay().installed_spec(name, sys.modules[name.rpartition(".")[0]].__path__)
    if spec is None:
        raise ImportError(f"lightning-thunder has no module {name}; is the installation complete?", name=name)
    if transform is None:
        code = spec.loader.get_code(name)
    else:
        import ast

        code = compile(transform(ast.parse(spec.loader.get_source(name))), spec.origin, "exec", dont_inherit=True)
    exec(code, namespace)


def with_other_functions(module, **functions):
    """A copy of a module in which some functions are others, for installed code that calls them by the module's name.

    Args:
        module: the module; it stays as it is.
        functions: the other functions, by name.
    """
    copy = type(sys)(module.__name__)
    copy.__dict__.update(vars(module), **functions)
    return copy


def installed_overlay():
    """The overlay of this process, or None."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Overlay)), None)


def install() -> None:
    """Registers the overlay, once, unless the environment variable turns it off."""
    mode = os.environ.get(VARIABLE, "1").lower()
    if mode not in ("0", "off", "false") and installed_overlay() is None:
        sys.meta_path.insert(0, Overlay(force=mode == "force"))


def status() -> str:
    """One line: off, skipped and why, registered, or applied and to which modules."""
    overlay = installed_overlay()
    if overlay is None:
        mode = os.environ.get(VARIABLE)
        return f"off ({VARIABLE}={mode})" if mode is not None else "off (the .pth file did not run)"
    if overlay.state == "registered" and "thunder" in sys.modules:
        return "skipped (thunder was imported before the overlay was registered, or by a finder in front of it)"
    modules = overlay.modules()
    return f"{overlay.state} ({overlay.reason})" + (f": {', '.join(modules)}" if modules else "")


if __name__ == "__main__":
    # `-m` runs a second copy of this module; the registered finder belongs to the first
    import thunder_overlay

    print(thunder_overlay.status())
    if thunder_overlay.installed_overlay() is not None:
        import thunder  # noqa: F401

        print(thunder_overlay.status())
